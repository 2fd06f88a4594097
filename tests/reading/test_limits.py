"""What cannot be decoded in the memory allowed, or lies about itself, is refused by name; all else is read."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt.errors import DataFileDamaged, RowGroupTooLarge
from lakeckpt.lake.column_chunks import ChunkFacts
from lakeckpt.lake.table import open_table
from lakeckpt.reading.decode import RowGroupDecoder
from lakeckpt.reading.pages import Leaf, Survey, _longest_entry, _walked
from lakeckpt.reading.prefixes import repeated_bytes
from tests.reading.cases import write_file
from tests.reading.crafted_files import lie, write_encrypted

MIB = 2**20


def decode(path: Path, most: int = 8 * 2**30, group: int = 0) -> pa.Table:
    table = open_table(path)
    return RowGroupDecoder(table, max_row_group_bytes=most).decode(group, 0, int(table.index.group_rows[group]))


def nested(values: int) -> pa.Table:
    return pa.table({"x": [1], "l": pa.ListArray.from_arrays([0, values], np.zeros(values, np.int64))})


BOMBS: dict[str, tuple[Callable[[], pa.Table], dict[str, Any]]] = {
    "runs": (lambda: pa.table({"x": np.zeros(4 * MIB, np.int64)}), {}),
    "a page of zeros": (lambda: pa.table({"x": [b"\0" * 32 * MIB]}), {"compression": "zstd", "use_dictionary": False}),
    "one long text, often": (lambda: pa.table({"x": ["y" * MIB] * 64}), {"compression": "zstd"}),
    "one long text among short ones": (
        lambda: pa.table({"x": [*(f"{i}" for i in range(6000)), *["y" * 65536] * 400]}),
        {"compression": "zstd"},
    ),
    "texts that grow by prefixes": (
        lambda: pa.table({"x": ["y" * (10 * i) for i in range(2500)]}),
        {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}},
    ),
    "a list": (lambda: nested(4 * MIB), {"compression": "zstd"}),
    "long texts in lists": (lambda: pa.table({"x": [["y" * MIB] * 64]}), {"compression": "zstd"}),
    "texts in a list that grow by prefixes": (
        lambda: pa.table({"x": [["y" * (10 * i) for i in range(2500)]]}),
        {"use_dictionary": False, "column_encoding": {"x.list.element": "DELTA_BYTE_ARRAY"}},
    ),
    "decimals": (lambda: pa.table({"x": pa.array([1] * 2 * MIB, pa.decimal128(5))}), {}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_decodes_to_more_than_is_allowed_is_refused_with_file_row_group_and_column(
    tmp_path: Path, name: str
) -> None:
    make, options = BOMBS[name]
    table = make()
    path = write_file(tmp_path / "a.parquet", [table.slice(0, 1), table], **options)
    assert path.stat().st_size < 200_000
    before = pa.total_allocated_bytes()
    with pytest.raises(RowGroupTooLarge, match=r"'a\.parquet' decodes to .*at most 16,777,216 may be: read fewer") as e:
        decode(path, 16 * MIB, group=1)
    assert (e.value.file, e.value.row_group, e.value.column) == ("a.parquet", 1, table.schema.names[-1])
    assert pa.total_allocated_bytes() - before <= 32 * MIB
    restored = pickle.loads(pickle.dumps(e.value))
    assert (type(restored), restored.args, restored.column) == (RowGroupTooLarge, e.value.args, e.value.column)
    assert decode(path, group=1).equals(pq.read_table(path).slice(1))


def test_prefixes_in_parts_that_are_too_long_are_refused_before_any_memory_is_taken() -> None:
    def page(bits: int) -> memoryview:  # 1 << bits numbers, in one part, of which two are meant
        long = [(1 << bits) >> shift & 127 | (128 if bits >= shift + 7 else 0) for shift in range(0, bits + 1, 7)]
        return memoryview(bytes([*long, 1, 3, 2, 2, 0]))

    assert repeated_bytes(page(13), 3) == 1 + 2 + 3
    for bits in (14, 28, 40, 60):
        with pytest.raises(ValueError, match=f"in parts of {1 << bits}"):
            repeated_bytes(page(bits), 3)


def test_of_a_dictionary_so_many_entries_are_looked_at_as_it_says_that_it_has() -> None:
    page = memoryview(b"".join(len(one).to_bytes(4, "little") + one for one in (b"ab", b"abcd", b"abcdefgh")))
    assert [_longest_entry(page, 0, len(page), entries) for entries in (0, 1, 2, 3, 9)] == [0, 2, 4, 8, 8]
    walked = facts_of_dictionary(entries=1 << 19)
    assert walked.longest_bytes == 4 << 19  # not looked at: as long as the page
    assert facts_of_dictionary(entries=1 << 17).longest_bytes == 0
    with pytest.raises(ValueError, match="a second dictionary"):
        facts_of_dictionary(entries=1, dictionaries=2)


def facts_of_dictionary(*, entries: int, dictionaries: int = 1) -> Survey:
    """Of a column chunk with a dictionary of empty texts, or several, whose pages are looked into."""

    def varint(number: int) -> bytes:
        found = bytearray()
        while number >= 128:
            found.append(number & 127 | 128)
            number >>= 7
        return bytes([*found, number])

    body = bytes(4 * entries)
    size = varint(2 * len(body))
    head = b"\x15\x04\x15" + size + b"\x15" + size + b"\x4c\x15" + varint(2 * entries) + b"\x15\x00\x00\x00"
    facts = ChunkFacts(**{**dict.fromkeys(ChunkFacts.__slots__, 0), "physical_type": 6, "values": 1})
    data = b"\x15\x00\x15\x02\x15\x02\x2c\x15\x02\x15\x10\x15\x06\x15\x06\x00\x00" + b"0"
    leaf = Leaf(name="x", nested=True, width=0)
    return _walked(facts, leaf, memoryview((head + body) * dictionaries + data), 0, look_into=64 << 20)


@pytest.mark.parametrize("most", [400_000, 2 * MIB])
def test_row_groups_that_could_be_too_large_and_are_not_are_read_whole(tmp_path: Path, most: int) -> None:
    texts = [*("short" for _ in range(9000)), *(f"{i:09}" for i in range(6000)), "long" * 500, None]
    table = pa.table({"x": texts, "n": np.arange(len(texts)), "b": pa.array(texts, pa.large_binary())})
    path = write_file(tmp_path / "a.parquet", [table], compression="none")
    with pytest.raises(RowGroupTooLarge, match="is stored in"):
        decode(path, 1000)
    if most < table.nbytes:
        with pytest.raises(RowGroupTooLarge, match="decodes to"):
            decode(path, most)
    else:
        assert decode(path, most).equals(table)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_texts_in_lists_that_repeat_parts_of_those_before_are_counted_and_read(
    tmp_path: Path, version: str, codec: str
) -> None:
    sizes = np.random.default_rng(0).integers(0, 9, 4000).tolist()
    texts = [None if n % 50 == 7 else [f"{'a' * (n % 300)}{j}" for j in range(size)] for n, size in enumerate(sizes)]
    table = pa.table({"x": texts, "n": np.arange(len(texts))})
    options = {"use_dictionary": False, "column_encoding": {"x.list.element": "DELTA_BYTE_ARRAY"}}
    path = write_file(tmp_path / "a.parquet", [table], data_page_version=version, compression=codec, **options)
    content = sum(len(text) for row in texts for text in row or [])
    with pytest.raises(RowGroupTooLarge, match=r"decodes to at least .*column 'x'"):
        decode(path, content)
    assert decode(path, content + table.num_rows * 300).equals(pq.read_table(path))


MEASURED = """
import resource, sys
from lakeckpt.errors import RowGroupTooLarge
from lakeckpt.lake.table import open_table
from lakeckpt.reading.decode import RowGroupDecoder
from lakeckpt.reading.prefixes import repeated_bytes

table = open_table(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    RowGroupDecoder(table, max_row_group_bytes=64 * 2**20).decode(0, 0, 1)
except RowGroupTooLarge as error:
    print(error.column, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_small_file_that_decodes_to_gigabytes_and_lies_about_it_takes_little_memory(tmp_path: Path) -> None:
    table = pa.table({"x": pa.DictionaryArray.from_arrays(np.zeros(5000, np.int32), pa.array(["y" * MIB]))})
    path = write_file(tmp_path / "a.parquet", [table], compression="zstd", store_schema=False)
    assert path.stat().st_size < 200_000
    size = pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size
    lie(path, size, 1000)
    child = subprocess.run([sys.executable, "-c", MEASURED, path], capture_output=True, text=True, check=True)
    column, grown = child.stdout.split()
    assert column == "x"
    assert int(grown) < 200, "MiB"


def written(tmp_path: Path) -> tuple[Path, pq.ColumnChunkMetaData]:
    table = pa.table({"x": np.arange(700), "s": [f"text {i}" for i in range(700)]})
    path = write_file(tmp_path / "a.parquet", [table], compression="none", write_statistics=False)
    return path, pq.read_metadata(path).row_group(0).column(1)


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        ("total_compressed_size", 10**9),
        ("total_compressed_size", 50),
        ("dictionary_page_offset", 10**9),
        ("num_values", 701),
    ],
)
def test_a_footer_that_lies_about_a_column_chunk_is_told_with_the_column(
    tmp_path: Path, field: str, instead: int
) -> None:
    path, chunk = written(tmp_path)
    headers = {"dictionary_page_offset": 0x26}
    which = {"num_values": 2, "total_compressed_size": 1}.get(field, 0)
    lie(path, getattr(chunk, field), instead, which=which, field=headers.get(field, 0x16))
    with pytest.raises(DataFileDamaged, match=r"column 's' of row group 0 of the data file 'a\.parquet'") as e:
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
    what = r"encrypted columns \('secret'\)" if plaintext_footer else "an encrypted footer"
    with pytest.raises(DataFileDamaged, match=rf"'a\.parquet' has {what}.*decrypt it"):
        open_table(path)


def test_a_writer_whose_name_is_no_text_does_not_stop_reading(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.parquet", [pa.table({"x": [1, 2]})])
    content = path.read_bytes()
    assert content.count(b"parquet-cpp-arrow") == 1
    path.write_bytes(content.replace(b"parquet-cpp-arrow", b"parquet-\xff\xfe\xfd-arrow"))
    assert decode(path).column("x").to_pylist() == [1, 2]
