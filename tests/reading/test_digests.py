"""Digests of our own: what files without checksums cannot tell, they do."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lakeckpt import LakeDataset, LakeLoader, open_table, record_digests
from lakeckpt.errors import ConfigError, DataFileDamaged, WireDamaged
from lakeckpt.lake.chunk_digests import ChunkDigests, digests_path
from lakeckpt.lake.table import Table
from lakeckpt.reading.decode import RowGroupDecoder
from tests.reading.cases import write_file
from tests.reading.damage import Damage
from tests.reading.fuzz_files import page_bodies


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Two files whose pages have no checksums, partitioned, with an empty row group."""
    for number, key in enumerate((7, 8)):
        start = 100 * number
        rows = pa.table({"x": np.arange(start, start + 100), "s": [{"t": f"{i}"} for i in range(start, start + 100)]})
        groups = [rows.slice(0, 40), rows.slice(40, 0), rows.slice(40)]
        write_file(tmp_path / "lake" / f"k={key}" / "a.parquet", groups, compression="none", use_dictionary=False)
    return tmp_path / "lake"


def rows(table: Table, columns: list[str] | None = None) -> pa.Table:
    decoder = RowGroupDecoder(table, columns)
    return pa.concat_tables([decoder.decode(g, 0, n) for g, n in enumerate(table.index.group_rows.tolist())])


def every_byte_of(path: Path) -> list[int]:
    return [at for start, stop in page_bodies(path) for at in range(start, stop)]


def test_a_flipped_byte_that_checksums_would_have_told_is_told_by_the_recorded_digest(lake: Path) -> None:
    bare = open_table(lake)
    table = record_digests(bare, lake.parent / "run")
    expected = rows(bare)
    assert rows(table).equals(expected)
    path = lake / "k=8" / "a.parquet"
    content, silent = path.read_bytes(), 0
    for at in every_byte_of(path)[::97]:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(DataFileDamaged, match="not those of which a digest was recorded") as e:
            rows(table)
        assert e.value.file == "k=8/a.parquet" and e.value.column in ("x", "s")
        try:
            silent += not rows(bare).equals(expected)
        except DataFileDamaged:
            pass
    assert silent > 10, "wrong rows, without a word: what the digests are for"


def test_recorded_digests_are_opened_with_the_table_and_go_to_workers(lake: Path) -> None:
    run = lake.parent / "run"
    record_digests(open_table(lake), run, threads=1)
    table = open_table(lake, digests=run)
    assert pickle.loads(pickle.dumps(table)).digests.dumps() == table.digests.dumps()
    assert len(rows(table)) == 200
    path = lake / "k=7" / "a.parquet"
    content = bytearray(path.read_bytes())
    content[every_byte_of(path)[20]] ^= 1
    path.write_bytes(content)
    for workers in (0, 1):
        loader = LakeLoader(LakeDataset(table, batch_size=50, columns=["x"]), num_workers=workers)
        with pytest.raises(DataFileDamaged, match="a digest was recorded"):
            list(loader)


@pytest.mark.filterwarnings("ignore::lakeckpt.SkipWarning")
def test_what_does_not_have_its_digest_can_be_skipped(lake: Path) -> None:
    table = record_digests(open_table(lake), lake.parent / "run")
    Damage(table).hurt("k=7/a.parquet", 0)
    loader = LakeLoader(LakeDataset(table, batch_size=50, columns=["x"], on_bad_row_group="skip"))
    assert [row for batch in loader for row in batch["x"].tolist()] == list(range(40, 200))


def test_columns_that_were_not_recorded_are_read_unchecked(lake: Path) -> None:
    table = record_digests(open_table(lake), lake.parent / "run", columns=["s", "k"])
    Damage(table).hurt("k=7/a.parquet", 0)  # column x
    assert len(rows(table)) == 200
    Damage(table).hurt("k=7/a.parquet", 0, 1)
    with pytest.raises(DataFileDamaged, match="column 's'"):
        rows(table)


def test_what_is_damaged_already_is_not_blessed(tmp_path: Path) -> None:
    write_file(tmp_path / "a.parquet", [pa.table({"x": np.arange(100)})], write_page_checksum=True)
    table = open_table([tmp_path / "a.parquet"])
    Damage(table).hurt("a.parquet", 0)
    with pytest.raises(DataFileDamaged):
        record_digests(table, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_columns_are_added_to_those_that_were_recorded_before(lake: Path) -> None:
    run, every = lake.parent / "run", open_table(lake)
    for columns in (["x"], ["s"], ["x", "k"]):
        last = record_digests(every, run, columns=columns).digests
    whole = record_digests(every, lake.parent / "other").digests
    assert whole is not None and last is not None and np.array_equal(last.digests, whole.digests)
    opened = open_table(lake, digests=run).digests
    assert opened is not None and np.array_equal(opened.digests, whole.digests)


def test_columns_that_others_record_at_the_same_time_are_kept(lake: Path) -> None:
    run, table = lake.parent / "run", open_table(lake)

    def other(done: int, files: int) -> None:
        if done == files:
            record_digests(table, run, columns=["s"])

    found = record_digests(table, run, columns=["x"], progress=other).digests
    whole = record_digests(table, lake.parent / "other").digests
    assert found is not None and whole is not None and np.array_equal(found.digests, whole.digests)


@pytest.mark.parametrize("columns", [None, ["x"]])
def test_what_differs_from_what_was_recorded_is_not_recorded_again(lake: Path, columns: list[str] | None) -> None:
    run = lake.parent / "run"
    table = record_digests(open_table(lake), run)
    recorded = (run / digests_path(table.index.digest)).read_bytes()
    damage = Damage(table)
    damage.hurt("k=8/a.parquet", 2)
    assert rows(open_table(lake)).num_rows == 200  # wrong rows, without a word
    for again in (open_table(lake), open_table(lake, digests=run)):
        with pytest.raises(DataFileDamaged, match="not those of which a digest was recorded") as e:
            record_digests(again, run, columns=columns)
        assert (e.value.file, e.value.column) == ("k=8/a.parquet", "x")
    assert (run / digests_path(table.index.digest)).read_bytes() == recorded
    record_digests(table, run, columns=["s"])
    damage.heal("k=8/a.parquet")
    record_digests(open_table(lake), run)
    assert (run / digests_path(table.index.digest)).read_bytes() == recorded


def test_digests_that_cannot_be_read_are_not_replaced(lake: Path) -> None:
    run = lake.parent / "run"
    table = record_digests(open_table(lake), run)
    file = run / digests_path(table.index.digest)
    damaged = file.read_bytes()[:-1]
    file.write_bytes(damaged)
    with pytest.raises(WireDamaged, match=r"'digests/.*cannot tell whether the table is as it was.*remove it"):
        record_digests(open_table(lake), run)
    assert file.read_bytes() == damaged


def test_digests_that_are_not_there_or_of_another_table_are_refused(lake: Path) -> None:
    run = lake.parent / "run"
    with pytest.raises(ConfigError, match="record them once"):
        open_table(lake, digests=run)
    table = record_digests(open_table(lake), run)
    assert table.digests is not None
    write_file(lake / "k=9" / "a.parquet", [pa.table({"x": [1], "s": [{"t": "1"}]})])
    with pytest.raises(ConfigError, match="record them once"):
        open_table(lake, digests=run)
    other = open_table(lake)
    (run / digests_path(other.index.digest)).write_bytes(table.digests.dumps())
    with pytest.raises(WireDamaged, match="another table"):
        open_table(lake, digests=run)
    for data in (b"", table.digests.dumps()[:-1]):
        with pytest.raises(WireDamaged):
            ChunkDigests.loads(data)
    with pytest.raises(ConfigError, match="threads"):
        record_digests(table, run, threads=0)


def test_progress_is_told_file_by_file(lake: Path) -> None:
    told: list[tuple[int, int]] = []
    record_digests(open_table(lake), lake.parent / "run", progress=lambda done, files: told.append((done, files)))
    assert told == [(1, 2), (2, 2)]
