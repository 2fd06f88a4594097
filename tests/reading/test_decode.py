from __future__ import annotations

import dataclasses
import errno
import gc
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lakeckpt.errors import ConfigError, DataFileChanged, DataFileDamaged, SchemaError, StorageError
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.parquet.kept_footers import kept_footers
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.columns.convert import convert
from lakeckpt.reading.columns.ragged import to_pylist
from lakeckpt.reading.windows.decode import RowGroupDecoder, select_columns
from tests.reading.cases import PYARROW, CountingStorage, columns, counted, write_file, write_ids


def numbers(count: int, begin: int = 0) -> pa.Table:
    return pa.table({"x": np.arange(begin, begin + count), "y": [f"y{i}" for i in range(begin, begin + count)]})


def whole(decoder: RowGroupDecoder) -> pa.Table:
    rows = decoder.table.index.group_rows.tolist()
    return pa.concat_tables([decoder.schema.empty_table(), *(decoder.decode(g, 0, n) for g, n in enumerate(rows))])


@given(columns(), st.integers(1, 5), st.data())
@settings(deadline=None)
def test_decoded_rows_are_those_of_pyarrow_for_every_type_that_parquet_holds(
    case: tuple[pa.Field, pa.ChunkedArray, list[Any]], size: int, data: st.DataObject
) -> None:
    field, column, _ = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.parquet")
        try:
            pq.write_table(pa.Table.from_arrays([column], schema=pa.schema([field])), path, row_group_size=size)
            reference = pq.read_table(path)
        except pa.ArrowException:  # what Arrow itself cannot write or read back
            assume(False)
        table = open_table(path)
        decoder = RowGroupDecoder(table)
        assert to_pylist(convert(whole(decoder), nulls="mask"), "x") == to_pylist(convert(reference, nulls="mask"), "x")
        begin = 0
        for group, rows in enumerate(table.index.group_rows.tolist()):
            start = data.draw(st.integers(0, rows))
            stop = data.draw(st.integers(start, rows))
            part = decoder.decode(group, start, stop)
            assert part.schema == decoder.schema
            expected = reference.slice(begin + start, stop - start)
            assert to_pylist(convert(part, nulls="mask"), "x") == to_pylist(convert(expected, nulls="mask"), "x")
            begin += rows
        decoder.close()


def test_columns_come_in_the_order_asked_for(tmp_path: Path) -> None:
    write_file(tmp_path / "k=7" / "a.parquet", [numbers(3)])
    table = open_table(tmp_path)
    assert RowGroupDecoder(table).decode(0, 1, 3).to_pydict() == {"x": [1, 2], "y": ["y1", "y2"], "k": [7, 7]}
    swapped = RowGroupDecoder(table, ["k", "y", "x"]).decode(0, 0, 1)
    assert list(swapped.to_pydict().items()) == [("k", [7]), ("y", ["y0"]), ("x", [0])]


def test_only_the_column_chunks_asked_for_are_read(tmp_path: Path) -> None:
    wide = pa.table({f"c{i}": np.random.default_rng(i).integers(0, 2**60, 500) for i in range(500)})
    write_file(tmp_path / "wide.parquet", [wide.slice(0, 250), wide.slice(250)])
    table, storage = counted(open_table(tmp_path))
    decoder = RowGroupDecoder(table, ["c321"])
    assert decoder.decode(1, 0, 250).column("c321").equals(wide.column("c321").slice(250))
    footer_reads = len(storage.reads)
    storage.reads.clear()
    assert decoder.decode(0, 0, 250).column("c321").equals(wide.column("c321").slice(0, 250))
    chunk = table.footer(0).row_group(0).column(321)
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    read = [read for read in storage.reads if read[2] is None or read[1] < begin + chunk.total_compressed_size]
    assert read == [("wide.parquet", begin, begin + chunk.total_compressed_size)]
    assert footer_reads <= 3


def test_partition_columns_alone_read_nothing(tmp_path: Path) -> None:
    write_file(tmp_path / "day=2024-01-01" / "a.parquet", [numbers(3)])
    table, storage = counted(open_table(tmp_path))
    assert RowGroupDecoder(table, ["day"]).decode(0, 0, 2).to_pydict() == {"day": ["2024-01-01"] * 2}
    assert storage.reads == []


def test_partitions_are_constants_null_where_the_path_says_so_and_win_over_the_file(tmp_path: Path) -> None:
    for folder in ("größe=5", "größe=__HIVE_DEFAULT_PARTITION__"):
        write_file(tmp_path / folder / "ä ü.parquet", [pa.table({"größe": ["file"], "x": [1]})])
    decoder = RowGroupDecoder(open_table(tmp_path), ["größe"])
    assert whole(decoder).column("größe").to_pylist() == [5, None]


def test_a_column_that_a_file_lacks_is_null_and_other_types_are_cast(tmp_path: Path) -> None:
    inner = [{"a": 1}]
    write_file(tmp_path / "1.parquet", [pa.table({"x": pa.array([1], pa.int8()), "s": pa.array(inner)})])
    later = pa.table({"x": pa.array([2.5]), "s": pa.array([{"a": 2, "b": "two"}]), "new": [[1, 2]]})
    write_file(tmp_path / "2.parquet", [later])
    decoder = RowGroupDecoder(open_table(tmp_path), ["new", "x", "s"])
    assert whole(decoder).to_pylist() == [
        {"new": None, "x": 1.0, "s": {"a": 1, "b": None}},
        {"new": [1, 2], "x": 2.5, "s": {"a": 2, "b": "two"}},
    ]
    with pytest.raises(SchemaError, match="no column 'news'; it has 'new'"):
        RowGroupDecoder(open_table(tmp_path), ["news"])


def test_values_that_do_not_fit_the_tables_type_name_file_row_group_and_column(tmp_path: Path) -> None:
    write_file(tmp_path / "1.parquet", [pa.table({"x": [1]}), pa.table({"x": [2**60 + 1]})])
    write_file(tmp_path / "2.parquet", [pa.table({"x": [0.5]})])
    decoder = RowGroupDecoder(open_table(tmp_path))
    assert decoder.decode(0, 0, 1).column("x").to_pylist() == [1.0]
    with pytest.raises(SchemaError, match=r"column 'x' of row group 1 of '1\.parquet' is int64 and does not fit"):
        decoder.decode(1, 0, 1)


def test_dictionaries_views_and_extensions_are_delivered_as_values(tmp_path: Path) -> None:
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"] * 2, pa.binary(16)))
    table = pa.table(
        {"d": pa.array(["a", "b"]).dictionary_encode(), "v": pa.array(["c", "d"], pa.string_view()), "u": ids}
    )
    write_file(tmp_path / "1.parquet", [table])
    decoder = RowGroupDecoder(open_table(tmp_path))
    assert decoder.schema.types[0] == pa.string()
    assert decoder.schema.types[2] == pa.binary(16)
    assert decoder.decode(0, 1, 2).to_pydict() == {"d": ["b"], "v": ["d"], "u": [b"0123456789abcdef"]}


@pytest.mark.parametrize("leaf", [pa.string_view(), pa.binary_view()], ids=str)
def test_views_inside_of_lists_structs_and_maps_are_delivered_as_values(tmp_path: Path, leaf: pa.DataType) -> None:
    values = ["a", "b" * 30, "c"] if leaf == pa.string_view() else [b"a", b"b" * 30, b"c"]
    inner = pa.struct([("a", leaf), ("l", pa.list_(leaf))])
    columns = {
        "list": pa.array([values, [], None], pa.list_(leaf)),
        "fixed": pa.array([[one] for one in values], pa.list_(leaf, 1)),
        "struct": pa.array([{"a": one, "l": [one]} for one in values], inner),
        "map": pa.array([[("k", one)] for one in values], pa.map_(pa.string(), leaf)),
    }
    write_file(tmp_path / "1.parquet", [pa.table(columns)])
    decoder = RowGroupDecoder(open_table(tmp_path))
    assert "view" not in str(decoder.schema)
    assert decoder.decode(0, 1, 3).to_pydict() == pa.table(columns).slice(1).to_pydict()


@pytest.mark.skipif(PYARROW < 24, reason="this pyarrow cannot write list views")
def test_list_views_are_refused_by_name_when_the_table_is_opened(tmp_path: Path) -> None:
    views = pa.array([{"a": [1, 2]}, None], pa.struct([("a", pa.list_view(pa.int8()))]))
    pq.write_table(pa.table({"x": views}), tmp_path / "x.parquet")
    with pytest.raises(SchemaError, match=r"column 'x': the type list_view<.*> is not read: write the file again"):
        open_table(tmp_path)


def test_a_dotted_name_is_a_column_and_not_a_path_into_a_struct(tmp_path: Path) -> None:
    write_file(tmp_path / "1.parquet", [pa.table({"a": [{"b": 1, "c": 2}], "a.b": [3]})])
    table = open_table(tmp_path)
    assert RowGroupDecoder(table, ["a.b"]).decode(0, 0, 1).to_pydict() == {"a.b": [3]}
    assert RowGroupDecoder(table, ["a"]).decode(0, 0, 1).to_pydict() == {"a": [{"b": 1, "c": 2}]}


def test_files_of_one_row_empty_row_groups_and_empty_files_read_well(tmp_path: Path) -> None:
    table = write_ids(tmp_path / "tåble", [[1], [0, 2, 0], [], [1]])
    decoder = RowGroupDecoder(table, ["id"])
    assert whole(decoder).column("id").to_pylist() == [0, 1, 2, 3]
    empty = RowGroupDecoder(write_ids(tmp_path / "empty", [[0], []]))
    assert whole(empty).num_rows == 0
    assert whole(empty).schema == empty.schema


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 4), (2, 1)])
def test_rows_outside_of_a_row_group_are_refused(tmp_path: Path, start: int, stop: int) -> None:
    decoder = RowGroupDecoder(write_ids(tmp_path, [[3]]))
    with pytest.raises(ValueError, match=r"of row group 0, which has 3 rows"):
        decoder.decode(0, start, stop)


def test_a_selection_that_cannot_be_meant_is_refused() -> None:
    schema = pa.schema([("x", pa.int8()), ("y", pa.int8())])
    with pytest.raises(ConfigError, match=r"got the text 'x': write \['x'\]"):
        select_columns(schema, "x")
    with pytest.raises(ConfigError, match="named twice: 'y'"):
        select_columns(schema, ["y", "x", "y"])
    with pytest.raises(ConfigError, match="name at least one"):
        select_columns(schema, [])


def test_every_decode_has_memory_of_its_own(tmp_path: Path) -> None:
    decoder = RowGroupDecoder(write_ids(tmp_path, [[4]]), ["id", "pair"])
    for array in convert(decoder.decode(0, 0, 4)).values():
        assert isinstance(array, np.ndarray)
        array[...] = -1
    assert decoder.decode(0, 0, 4).column("id").to_pylist() == [0, 1, 2, 3]


def files_open_below(folder: Path) -> int:
    """Return how many files below ``folder`` this process has open."""
    found = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_open(number)]
    return sum(name.startswith(f"{folder}/") for name in found)


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def is_leased(path: Path) -> bool:
    inode = f":{path.stat().st_ino} "
    return any("LEASE" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


@pytest.mark.parametrize("kind", ["numbers", "bytes", "fixed", "lists"])
def test_what_was_decoded_of_a_mapped_file_stays_when_the_file_is_written_over(tmp_path: Path, kind: str) -> None:
    columns = {
        "numbers": np.arange(200_000),
        "bytes": pa.array([bytes([number % 256]) * 1000 for number in range(1000)]),
        "fixed": pa.array([bytes([number % 256]) * 1000 for number in range(1000)], pa.binary(1000)),
        "lists": pa.array([np.arange(number, number + 300) for number in range(1000)]),
    }
    table = pa.table({"x": columns[kind]})
    # As near to what is stored as can be: neither compressed nor encoded.
    path = write_file(tmp_path / "a.parquet", [table], compression="none", use_dictionary=False)
    decoder = RowGroupDecoder(open_table(tmp_path))
    decoded = decoder.decode(0, 0, table.num_rows)
    assert not is_leased(path)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert decoded.equals(table)


def test_a_file_that_could_not_be_decoded_can_be_written_again_at_once(tmp_path: Path) -> None:
    table = pa.table({"x": np.random.default_rng(0).integers(0, 1 << 60, 100_000)})
    path = write_file(tmp_path / "a.parquet", [table], write_page_checksum=True, use_dictionary=False)
    decoder = RowGroupDecoder(open_table(tmp_path))
    good = path.read_bytes()
    path.write_bytes(good[:400_000] + b"damaged!" + good[400_008:])
    with pytest.raises(DataFileDamaged) as kept:
        decoder.decode(0, 0, table.num_rows)
    assert kept.value.__traceback__ is not None
    assert not is_leased(path), "who writes would wait"
    path.write_bytes(good)
    assert decoder.decode(0, 0, table.num_rows).equals(table)


def test_no_file_stays_open_and_each_footer_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write_ids(tmp_path, [[1, 1], [1], [1], [1]])
    read, footer = [], Table.footer
    monkeypatch.setattr(Table, "footer", lambda self, file: (read.append(file), footer(self, file))[1])
    for storage in (table.storage, CountingStorage(table.storage)):
        kept_footers.forget()
        decoder = RowGroupDecoder(replace(table, storage=storage), open_files=1)
        for group in (0, 2, 1, 3, 4, 0):  # row groups 0 and 1 are of one file
            decoder.decode(group, 0, 1)
            assert files_open_below(tmp_path) == 0
        decoder.close()
        assert decoder.decode(0, 0, 1).num_rows == 1
        decoder.close()
    assert read == [0, 1, 2, 3] * 2


def test_a_local_file_that_another_one_replaced_is_noticed_though_its_footer_is_kept(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a" / "0.parquet", [pa.table({"id": [1, 2]})] * 2)
    other = write_file(tmp_path / "b" / "0.parquet", [pa.table({"id": [1, 3]})] * 2)
    table, copy = open_table(path.parent), tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    assert other.stat().st_size == path.stat().st_size
    decoder = RowGroupDecoder(table)
    assert decoder.decode(0, 0, 2).num_rows == 2
    os.replace(copy, path)  # the same bytes, as a new file
    assert decoder.decode(1, 0, 2).num_rows == 2
    os.replace(other, path)
    for reader in (decoder, RowGroupDecoder(table)):
        with pytest.raises(DataFileChanged, match="another footer"):
            reader.decode(1, 0, 2)


def test_the_number_of_files_that_a_decoder_knows_is_checked(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[1]])
    with pytest.raises(ConfigError, match="open_files must be at least 1, got 0"):
        RowGroupDecoder(table, open_files=0)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x55
    path.write_bytes(content)


def pages(path: Path, group: int, column: int) -> tuple[int, int]:
    """Return where the bytes of a column chunk begin and end."""
    chunk = pq.read_metadata(path).row_group(group).column(column)
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    return begin, begin + chunk.total_compressed_size


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("column", [0, 1])
def test_a_byte_that_flipped_in_a_page_is_noticed_by_its_checksum(tmp_path: Path, fraction: float, column: int) -> None:
    path = write_file(
        tmp_path / "sub" / "ä.parquet",
        [numbers(400), numbers(400, 400)],
        write_page_checksum=True,
        use_dictionary=False,
    )
    table = open_table(tmp_path)
    begin, end = pages(path, 1, column)
    flip(path, begin + int((end - begin) * fraction))
    decoder = RowGroupDecoder(table)
    assert decoder.decode(0, 0, 400).num_rows == 400
    with pytest.raises(
        DataFileDamaged, match=r"row group 1 of the data file 'sub/ä\.parquet' cannot be decoded.*restore"
    ) as e:
        decoder.decode(1, 0, 10)
    assert (e.value.file, e.value.row_group) == ("sub/ä.parquet", 1)
    assert RowGroupDecoder(table, ["yx"[column]]).decode(1, 0, 10).num_rows == 10


def test_a_column_chunk_that_is_gone_is_noticed_without_checksums(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.parquet", [numbers(400), numbers(400)])
    table = open_table(tmp_path)
    begin, end = pages(path, 0, 0)
    content = bytearray(path.read_bytes())
    content[begin:end] = bytes(end - begin)
    path.write_bytes(content)
    with pytest.raises(DataFileDamaged, match=r"row group 0 of the data file 'a\.parquet'"):
        RowGroupDecoder(table).decode(0, 0, 1)


def test_a_file_cut_while_it_is_open_has_changed(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.parquet", [numbers(400), numbers(400)])
    decoder = RowGroupDecoder(open_table(tmp_path))
    decoder.decode(0, 0, 1)
    os.truncate(path, pages(path, 1, 0)[0] + 10)
    with pytest.raises(DataFileChanged, match=r"'a\.parquet' has \d+ bytes, not \d+"):
        decoder.decode(1, 0, 1)


def test_a_file_written_again_while_it_is_open_has_changed_and_is_not_damaged(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.parquet", [numbers(400), numbers(400)])
    decoder = RowGroupDecoder(open_table(tmp_path))
    decoder.decode(0, 0, 1)
    content = path.read_bytes()
    with path.open("r+b") as file:  # in place: the file that is open becomes another one
        file.write(bytes(len(content)))
    with pytest.raises(DataFileChanged, match=r"'a\.parquet'"):
        decoder.decode(1, 0, 1)


class FlippingOnce(CountingStorage):
    """A storage whose first read over byte ``at`` of a file, its footer aside, has that byte wrong."""

    def __init__(self, inner: Storage, at: int) -> None:
        super().__init__(inner)
        self.at = at
        self.flipped = 0

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        found = bytearray(super().read(path, start, stop, etag=etag))
        if not self.flipped and start <= self.at < start + len(found) and not found.endswith(b"PAR1"):
            self.flipped += 1
            found[self.at - start] ^= 0x55
        return bytes(found)


def test_damage_that_a_second_read_does_not_find_is_none(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.parquet", [numbers(400)], write_page_checksum=True)
    table = open_table(tmp_path)
    storage = FlippingOnce(table.storage, pages(path, 0, 0)[0] + 10)
    decoded = RowGroupDecoder(dataclasses.replace(table, storage=storage)).decode(0, 0, 400)
    assert decoded.equals(pq.read_table(path)) and storage.flipped == 1


def test_a_file_replaced_by_another_is_told_before_anything_is_decoded(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.parquet", [numbers(400)])
    table = open_table(tmp_path)
    original = path.read_bytes()
    write_file(path, [numbers(40)])
    with pytest.raises(DataFileChanged, match=r"'a\.parquet'"):
        RowGroupDecoder(table).decode(0, 0, 1)
    path.write_bytes(original)
    flip(path, len(original) - 20)  # the same size, another footer
    with pytest.raises(DataFileChanged, match=r"'a\.parquet'"):
        RowGroupDecoder(table).decode(0, 0, 1)
    path.unlink()
    with pytest.raises(DataFileChanged, match=r"'a\.parquet'"):
        RowGroupDecoder(table).decode(0, 0, 1)
    path.write_bytes(original)
    assert RowGroupDecoder(table).decode(0, 0, 1).num_rows == 1


def test_a_store_that_fails_is_no_damaged_file(tmp_path: Path) -> None:
    write_file(tmp_path / "a.parquet", [numbers(4), numbers(4)])
    table, storage = counted(open_table(tmp_path))
    decoder = RowGroupDecoder(table)
    decoder.decode(0, 0, 1)
    storage.fail = StorageError("the store is away")
    with pytest.raises(StorageError, match="the store is away"):
        decoder.decode(1, 0, 1)
    storage.fail = None
    assert decoder.decode(1, 0, 1).num_rows == 1


def test_rows_fewer_than_the_footer_says_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "a.parquet", [numbers(4)])
    decoder = RowGroupDecoder(open_table(tmp_path))
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda *_, **__: numbers(3))
    with pytest.raises(DataFileDamaged, match="it holds 3 rows, but its footer says 4"):
        decoder.decode(0, 0, 1)


def test_nothing_of_a_row_group_stays_in_memory_once_its_table_is_dropped(tmp_path: Path) -> None:
    noise = pa.table({"x": np.random.default_rng(0).integers(0, 2**60, 50_000)})
    write_file(tmp_path / "a.parquet", [noise, noise])
    decoder = RowGroupDecoder(open_table(tmp_path), use_threads=False)  # Arrow's own threads let go later
    decoder.decode(0, 0, 1)
    gc.collect()
    before = pa.total_allocated_bytes()
    decoded = decoder.decode(1, 0, 50_000)
    assert pa.total_allocated_bytes() >= before + decoded.nbytes
    del decoded
    gc.collect()
    assert pa.total_allocated_bytes() <= before


def test_memory_that_runs_out_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(*_: Any, **__: Any) -> pa.Table:
        raise MemoryError("malloc")

    write_file(tmp_path / "a.parquet", [numbers(4)])
    decoder = RowGroupDecoder(open_table(tmp_path))
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", starve)
    with pytest.raises(MemoryError) as e:
        decoder.decode(0, 0, 1)
    assert e.value.__notes__ == ["while decoding row group 0 of 'a.parquet' (4 rows)"]


def test_a_process_without_file_descriptors_left_is_told_to_raise_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    decoder = RowGroupDecoder(open_table(tmp_path))

    def no_file(path: str, *_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files", path)

    with monkeypatch.context() as patch:
        patch.setattr("lakeckpt.lake.table.table.FileIO", no_file)
        with pytest.raises(StorageError, match=r"no file descriptor is left to open 'a\.parquet'.*ulimit -n"):
            decoder.decode(0, 0, 2)
    assert decoder.decode(0, 0, 2).num_rows == 2
