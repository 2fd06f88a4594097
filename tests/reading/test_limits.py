"""Row groups that are too large, damaged or encrypted are refused by name; all others are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt.errors import DataFileDamaged, TableError
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.reading.windows.decode import RowGroupDecoder
from tests.reading.cases import write_file
from tests.reading.crafted_files import lie, write_encrypted


def decode(path: Path, most: int = 8 * 2**30, group: int = 0) -> pa.Table:
    table = open_table(path)
    return RowGroupDecoder(table, max_row_group_bytes=most).decode(group, 0, int(table.index.group_rows[group]))


def test_a_row_group_of_more_uncompressed_bytes_than_allowed_is_refused_with_file_row_group_and_column(
    tmp_path: Path,
) -> None:
    table = pa.table({"n": range(9000), "x": ["the same text, which compresses well"] * 9000})
    path = write_file(tmp_path / "a.parquet", [table.slice(0, 1), table], compression="zstd", use_dictionary=False)
    group = pq.read_metadata(path).row_group(1)
    size = sum(group.column(leaf).total_uncompressed_size for leaf in range(2))
    assert path.stat().st_size < size // 4
    found = rf"row group 1 of .*'a\.parquet' has {size:,} uncompressed.* column 'x', and at most {size - 1:,}"
    with pytest.raises(TableError, match=found):
        decode(path, size - 1, group=1)
    assert decode(path, size, group=1).equals(table)
    assert decode(path, size - 1, group=0).equals(table.slice(0, 1))
    few = RowGroupDecoder(open_table(path), ["n"], max_row_group_bytes=size - 1)
    assert few.decode(1, 0, 9000).column("n").equals(table.column("n"))


def written(tmp_path: Path) -> tuple[Path, pq.ColumnChunkMetaData]:
    table = pa.table({"x": np.arange(700), "s": [f"text {i}" for i in range(700)]})
    path = write_file(tmp_path / "a.parquet", [table], compression="none", write_statistics=False)
    return path, pq.read_metadata(path).row_group(0).column(1)


@pytest.mark.parametrize(
    ("instead", "what"), [(10**9, r"its footer says that bytes \d+ to \d+ of \d+ hold it"), (50, "")]
)
def test_a_footer_that_contradicts_a_column_chunk_is_refused_with_the_column(
    tmp_path: Path, instead: int, what: str
) -> None:
    path, chunk = written(tmp_path)
    lie(path, chunk.total_compressed_size, instead, which=1)
    with pytest.raises(DataFileDamaged, match=rf"column 's' of row group 0 of the data file 'a\.parquet'.*{what}") as e:
        decode(path)
    assert (e.value.file, e.value.row_group, e.value.column) == ("a.parquet", 0, "s")
    table = open_table(path)
    assert RowGroupDecoder(table, ["x"]).decode(0, 0, 700).column("x").to_pylist() == list(range(700))


def test_a_column_that_cannot_be_decoded_is_found_among_many(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(20)]
    table = pa.table({name: np.random.default_rng(0).integers(0, 2**60, 400) for name in names})
    path = write_file(tmp_path / "a.parquet", [table], write_page_checksum=True, use_dictionary=False)
    chunk = pq.read_metadata(path).row_group(0).column(13)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataFileDamaged, match=r"column 'c13' of row group 0.*(CRC|checksum)") as e:
        decode(path)
    assert e.value.column == "c13"


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_files_are_refused_by_name(tmp_path: Path, plaintext_footer: bool) -> None:
    table = pa.table({"x": [1, 2], "secret": [3, 4]})
    path = write_encrypted(tmp_path / "a.parquet", table, columns=["secret"], plaintext_footer=plaintext_footer)
    what = "encrypted columns" if plaintext_footer else "an encrypted footer"
    with pytest.raises(DataFileDamaged, match=rf"'a\.parquet' has {what}.*decrypt it"):
        open_table(path)
