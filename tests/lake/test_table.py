"""A table is opened, pinned, told apart from what it becomes, and carried to other processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lakeckpt
from lakeckpt.errors import ConfigError, DataFileChanged, DataFileDamaged, SchemaError, TableNotFound, TableVersionGone
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.parquet.ranges import read_pinned
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.windows.decode import select_columns
from tests.lake.conftest import CANARY, S3
from tests.lake.tables import write
from tests.lake.test_index import files_of


def lake(folder: Path) -> Path:
    """Four files in two partitions: 4, 0, 5 and 1 rows."""
    write(folder / "year=2023" / "a.parquet", {"x": pa.array([0, 1, 2, 3], pa.int32())}, row_group_size=3)
    write(folder / "year=2023" / "b ü.parquet", {"x": pa.array([], pa.int32())})
    write(folder / "year=2024" / "a.parquet", {"x": range(5), "y": ["s"] * 5}, row_group_size=2)
    write(folder / "year=2024" / "b.parquet", {"y": pa.array(["t"]).dictionary_encode(), "x": [9]})
    return folder


def content(table: Table, ordinal: int) -> bytes:
    """A file of the table as readers get its bytes."""
    file = table.index.file(ordinal)
    if isinstance(table.storage, LocalStorage):
        with table.open_file(ordinal) as opened:
            return bytes(opened.read())
    return read_pinned(table.storage, table.uri, file, 0, file.size_bytes)


def rows(table: Table) -> list[int]:
    """All values of column x, read file by file as a reader would."""
    found: list[int] = []
    for ordinal in range(len(table.index.paths)):
        parquet = pq.ParquetFile(pa.BufferReader(content(table, ordinal)), metadata=table.footer(ordinal))
        for group in range(parquet.num_row_groups):
            found += parquet.read_row_group(group, columns=["x"])["x"].to_pylist()
    return found


def test_a_table_knows_its_rows_row_groups_and_schema(tmp_path: Path) -> None:
    table = lakeckpt.open_table(lake(tmp_path / "lake"))
    assert table.num_rows == 10
    assert table.index.group_rows[table.index.group_rows > 0].tolist() == [3, 1, 2, 2, 1, 1]
    assert table.schema == pa.schema(
        [("x", pa.int64()), ("y", pa.string()), pa.field("year", pa.int64(), nullable=False)]
    )
    (year,) = table.index.partitions
    assert year.name == "year" and [year.value_of(file) for file in range(4)] == [2023, 2023, 2024, 2024]
    assert rows(table) == [0, 1, 2, 3, 0, 1, 2, 3, 4, 9]
    assert table.uri == str(tmp_path / "lake")
    assert repr(table) == f"Table('{tmp_path}/lake', files=4, rows=10)"


def test_what_a_writer_notes_beside_the_schema_makes_no_difference(tmp_path: Path) -> None:
    for name, note in (("a", "1"), ("b", "2")):
        field = pa.field("x", pa.int64(), metadata={"PARQUET:field_id": note})
        write(tmp_path / f"{name}.parquet", pa.table([[1]], pa.schema([field], metadata={"pandas": note})))
    schema = open_table(tmp_path).schema
    assert (schema.metadata, schema.field("x").metadata) == (None, None)


def test_tables_without_rows_without_files_rows_and_of_many_columns_open(tmp_path: Path) -> None:
    write(tmp_path / "none" / "x.parquet", {"x": pa.array([], pa.int8())})
    write(tmp_path / "wide" / "x.parquet", {f"c{n}": [n] for n in range(500)})
    write(tmp_path / "one" / "x.parquet", {"x": [7]})
    assert open_table(tmp_path / "none").num_rows == 0
    assert len(open_table(tmp_path / "wide").schema) == 500
    assert rows(open_table(tmp_path / "one")) == [7]


def test_a_table_is_the_same_wherever_it_lies(tmp_path: Path, s3: S3) -> None:
    folder = lake(tmp_path / "lake")
    there = open_storage(f"s3://{s3.bucket}/copy", storage_options=s3.options)
    memory = fsspec.filesystem("memory")
    for info in open_storage(folder).list():
        data = open_storage(folder).read(info.path)
        there.put(info.path, [data])
        memory.pipe_file(f"/{s3.bucket}/copy/{info.path}", data)
    shutil.copytree(folder, tmp_path / "moved")
    local = open_table(folder)
    others = [
        open_table(f"s3://{s3.bucket}/copy", storage_options=s3.options),
        open_table(f"memory://{s3.bucket}/copy"),
        open_table(f"memory://{s3.bucket}/copy", filesystem=memory),
        open_table(f"file://{tmp_path}/moved"),
        open_table([path for path in (tmp_path / "moved").rglob("*") if path.is_file()]),
        open_table(f"{tmp_path}/moved/**/*.parquet"),
        open_table(f"s3://{s3.bucket}/copy/*/*.parquet", storage_options=s3.options, threads=1),
    ]
    for other in others:
        assert other.index == local.index
        assert other.schema == local.schema
        assert rows(other) == rows(local)
        other.verify()
    assert all(file.etag for file in files_of(others[0].index))


def test_a_table_goes_to_another_process_by_pickle(tmp_path: Path, s3: S3) -> None:
    folder = lake(tmp_path / "lake")
    there = open_storage(f"s3://{s3.bucket}/copy", storage_options=s3.options)
    for info in open_storage(folder).list():
        there.put(info.path, [open_storage(folder).read(info.path)])
    tables = [open_table(folder), open_table(f"s3://{s3.bucket}/copy", storage_options=s3.options)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for table in tables:
            assert pool.apply(rows, (table,)) == rows(table)
        assert pool.apply(rows, (pickle.loads(pickle.dumps(tables[1])),)) == rows(tables[0])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_reads_the_store_that_its_parent_has_read(tmp_path: Path, s3: S3) -> None:
    path = write(tmp_path / "a.parquet", {"x": range(5)})
    open_storage(f"s3://{s3.bucket}/t", storage_options=s3.options).put("a.parquet", [path.read_bytes()])
    table = open_table(f"s3://{s3.bucket}/t", storage_options=s3.options)
    assert rows(table) == list(range(5))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(rows, (table,)) == list(range(5))


def test_progress_is_told_file_by_file(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    open_table(lake(tmp_path), progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet at all", b"PAR1" + b"\0" * 40 + b"PARE"])
def test_one_bad_file_refuses_the_table_by_name(tmp_path: Path, content: bytes) -> None:
    (lake(tmp_path) / "year=2024" / "c.parquet").write_bytes(content)
    with pytest.raises(DataFileDamaged, match=r"'year=2024/c.parquet' .*leave it out of the table") as caught:
        open_table(tmp_path)
    assert caught.value.file == "year=2024/c.parquet"


def test_files_of_different_kinds_are_both_named_when_the_column_is_read(tmp_path: Path) -> None:
    write(lake(tmp_path) / "year=2025" / "a.parquet", {"x": [["a list"]]})
    table = open_table(tmp_path)
    with pytest.raises(SchemaError, match=r"'x' is .* in 'year=2023/a.parquet', but list.* in 'year=2025/a.parquet'"):
        select_columns(table.schema, None)


def test_a_file_outside_of_the_folders_whose_column_it_has_itself_is_refused(tmp_path: Path) -> None:
    """Its own values would be nulls: the path says nothing of them."""
    write(tmp_path / "day=5" / "x.parquet", pa.table({"v": [1]}))
    write(tmp_path / "early.parquet", pa.table({"v": [2]}))
    assert open_table(tmp_path).num_rows == 2
    write(tmp_path / "late.parquet", pa.table({"v": [3], "day": [7]}))
    with pytest.raises(SchemaError, match=r"'late\.parquet' has a column 'day' of its own and lies in no folder day=…"):
        open_table(tmp_path)


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="threads must be at least 1, not 0"):
        open_table(tmp_path, threads=0)
    with pytest.raises(TableNotFound):
        open_table(tmp_path)


def rewrite(path: Path) -> None:
    """Other rows, same size, another footer (a statistic differs), another time."""
    table = pq.read_table(path, partitioning=None)
    size = path.stat().st_size
    write(path, {"x": [value + 1 for value in table["x"].to_pylist()], "y": table["y"]}, row_group_size=2)
    assert path.stat().st_size == size
    os.utime(path, ns=(1, 1))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda path: path.unlink(), "is gone"),
    "grown": (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"has \d+ bytes, not \d+"),
    "rewritten": (rewrite, "was written again"),
    "damaged": (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), "was written again"),
    "a folder now": (lambda path: (path.unlink(), path.mkdir()), "is gone"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_named_by_verify_with_what_to_do(tmp_path: Path, change: str) -> None:
    table = open_table(lake(tmp_path))
    table.verify()
    path = tmp_path / "year=2024" / "a.parquet"
    CHANGES[change][0](path)
    (tmp_path / "year=2023" / "b ü.parquet").unlink()
    with pytest.raises(
        DataFileChanged, match=f"'year=2024/a.parquet' {CHANGES[change][1]}.*Open the table again"
    ) as caught:
        table.verify()
    assert "'year=2023/b ü.parquet' is gone" in str(caught.value)
    assert "year=2024/b.parquet" not in str(caught.value)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_not_read_as_the_pinned_one(tmp_path: Path, change: str) -> None:
    table = open_table(lake(tmp_path))
    CHANGES[change][0](tmp_path / "year=2024" / "a.parquet")
    reads = [lambda: rows(table), lambda: table.footer(table.index.paths.index("year=2024/a.parquet"))]
    for read in reads[:1] if change == "grown" else reads:  # what has grown still has the footer where it was
        with pytest.raises(DataFileChanged, match=r"'year=2024/a.parquet'") as caught:
            read()
        is_gone = CHANGES[change][1] == "is gone"
        assert isinstance(caught.value, TableVersionGone) == is_gone
        assert str(caught.value).count("pen the table again") == 1, "it is said once what to do"


def test_a_file_that_was_only_touched_or_copied_is_unchanged(tmp_path: Path) -> None:
    table = open_table(lake(tmp_path / "lake"))
    os.utime(tmp_path / "lake" / "year=2024" / "a.parquet", ns=(1, 1))
    table.verify()


def test_files_that_were_added_are_no_change_of_the_pinned_ones(tmp_path: Path) -> None:
    table = open_table(lake(tmp_path))
    write(tmp_path / "year=2025" / "a.parquet", {"x": [1]})
    table.verify()
    assert open_table(tmp_path).index != table.index


def test_changes_in_an_object_store_are_found_by_etag_or_on_reading(s3: S3) -> None:
    storage = open_storage(f"s3://{s3.bucket}/t", storage_options=s3.options)
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": list(range(1000))}), buffer, compression="none")
    data = buffer.getvalue().to_pybytes()
    for name in ("a.parquet", "b.parquet", "c.parquet"):
        storage.put(name, [data])
    table = open_table(f"s3://{s3.bucket}/t", storage_options=s3.options)
    storage.put("b.parquet", [data])  # the same bytes: the same ETag
    table.verify()
    flipped = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    storage.put("b.parquet", [flipped])
    with pytest.raises(DataFileChanged, match=r"'b.parquet' has the ETag \w+, not \w+\. Open"):
        table.verify()
    storage.delete("b.parquet")
    storage.put("c.parquet", [data[:500]])
    with pytest.raises(
        DataFileChanged,
        match=r"'b.parquet' is gone; 'c.parquet' has 500 bytes, not \d+; 1 of its 3 files are gone .* Open",
    ) as caught:
        table.verify()
    assert isinstance(caught.value, TableVersionGone) and caught.value.files == ("b.parquet",)
    for ordinal in (1, 2):
        with pytest.raises(DataFileChanged, match=r"'[bc].parquet'"):
            content(table, ordinal)
    assert content(table, 0) == data


def test_a_table_shows_no_credentials(s3: S3) -> None:
    open_storage(f"s3://{s3.bucket}/t", storage_options=s3.options).put("a.parquet", [b"x"])
    with pytest.raises(DataFileDamaged) as caught:
        open_table(f"s3://{s3.bucket}/t", storage_options=s3.options)
    assert CANARY not in str(caught.value)
    with pytest.raises(TableNotFound) as missing:
        open_table(f"s3://{s3.bucket}/nothing", storage_options=s3.options)
    assert CANARY not in str(missing.value)


def csvs(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("user,item\n" + "1,2\n" * 100)
    return folder


def test_files_of_which_none_is_parquet_are_named_with_what_to_do(tmp_path: Path) -> None:
    folder = csvs(tmp_path, "a.csv", "b.csv")
    with pytest.raises(TableNotFound, match=r"Parquet file.* 2 other files .*'a.csv'.*write the rows .* as Parquet"):
        open_table(folder)
    for source in (f"{folder}/*.csv", folder / "a.csv", [folder / "a.csv"]):
        with pytest.raises(DataFileDamaged, match=r"'a.csv' is no Parquet file.*reads Parquet only"):
            open_table(source)


def test_a_stray_file_beside_parquet_files_is_left_out_of_a_folder_and_named_in_a_list(tmp_path: Path) -> None:
    lake(csvs(tmp_path, "a.csv"))
    assert not any(path.endswith(".csv") for path in open_table(tmp_path).index.paths)
    for source in (f"{tmp_path}/**", [tmp_path / "a.csv", tmp_path / "year=2024" / "a.parquet"]):
        with pytest.raises(
            DataFileDamaged, match=r"'a.csv' is no Parquet file: .* begins with b'user,ite': leave it out"
        ):
            open_table(source)
    (tmp_path / "year=2024" / "a.parquet").write_text("user,item\n")
    with pytest.raises(DataFileDamaged, match=r"'year=2024/a.parquet' is no Parquet file"):
        open_table(tmp_path)


def test_a_parquet_file_of_any_name_that_is_cut_is_damaged_and_no_other_format(tmp_path: Path) -> None:
    path = tmp_path / "part-0"
    write(path, {"x": [1, 2]})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataFileDamaged, match="does not end as Parquet does"):
        open_table(path)
