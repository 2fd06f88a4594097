"""Expected row groups are fetched ahead, many at once and within bounds, and the rows are the same."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.errors import DataFileChanged, DataFileDamaged, StorageError
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.parquet import prefetch as fetching
from lakeckpt.lake.parquet.kept_footers import kept_footers
from lakeckpt.lake.parquet.ranges import THREADS
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.testing.faulty_storage import FaultyStorage, StoreFault
from tests.patience import PATIENCE_S
from tests.reading.cases import write_file, write_ids

BOUND_S = 30.0
"""A test that waits for so long has failed."""


class Watched:
    """A storage that reads from another. ``before(path, start)`` is called ahead of each read."""

    def __init__(self, inner: Storage, before: Callable[[str, int], None] = lambda path, start: None) -> None:
        self._inner, self._before = inner, before
        self.read_paths: list[str] = []

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        self.read_paths.append(path)
        self._before(path, start)
        return self._inner.read(path, start, stop, etag=etag)

    list = put = put_new = delete = None  # type: ignore[assignment]


def stored(table: Table, before: Callable[[str, int], None] = lambda path, start: None) -> Table:
    """The table, read as from a store."""
    return replace(table, storage=Watched(table.storage, before))  # type: ignore[arg-type]


def ids(table: pa.Table) -> list[int]:
    return table.column("id").to_pylist()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return write_ids(tmp_path_factory.mktemp("lake"), [[3, 2], [4], [], [1, 0, 2], [5]])


@given(data=st.data(), ahead_bytes=st.sampled_from([0, 200, 1 << 20]), open_files=st.integers(1, 3))
def test_rows_are_the_same_whatever_was_expected(
    table: Table, data: st.DataObject, ahead_bytes: int, open_files: int
) -> None:
    groups = st.lists(st.integers(0, len(table.index.group_rows) - 1), max_size=12)
    expected = RowGroupDecoder(table)
    decoder = RowGroupDecoder(stored(table), ahead_bytes=ahead_bytes, open_files=open_files)
    for announced, wanted, forgets in data.draw(st.lists(st.tuples(groups, groups, st.booleans()), max_size=4)):
        decoder.expect(announced)
        for group in wanted:
            rows = int(table.index.group_rows[group])
            assert decoder.decode(group, 0, rows).equals(expected.decode(group, 0, rows))
        if forgets:
            decoder.expect([])
    decoder.close()


def test_footers_and_then_row_groups_that_are_expected_are_read_at_once(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[2], [3], [4], [5]])
    footers, bodies = threading.Barrier(4), threading.Barrier(4)
    asked: list[str] = []

    def together(path: str, start: int) -> None:
        (bodies if path in asked else footers).wait(BOUND_S)
        asked.append(path)

    decoder = RowGroupDecoder(stored(table, together))
    decoder.expect(range(4))
    assert [ids(decoder.decode(group, 0, 2)) for group in range(4)] == [[0, 1], [2, 3], [5, 6], [9, 10]]
    assert sorted(asked) == sorted(table.index.paths * 2)


def test_no_more_than_the_bytes_allowed_are_held_ahead(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[1000] * 6])
    read: list[int] = []
    came = threading.Semaphore(0)

    def note(path: str, start: int) -> None:
        read.append(start)
        came.release()

    probe = RowGroupDecoder(stored(table, note), ["id"])
    probe.decode(0, 0, 1)
    size = next(iter(probe._prefetcher._state.files.values())).result().plan(0).size_bytes
    kept_footers.forget()
    decoder = RowGroupDecoder(stored(table, note), ["id"], ahead_bytes=2 * size + size // 2)
    while came.acquire(blocking=False):
        pass
    read.clear()
    decoder.expect(range(6))
    for _ in range(3):  # the footer, and two row groups
        assert came.acquire(timeout=BOUND_S)
    for group in range(6):
        assert len(read) <= 3 + group
        assert ids(decoder.decode(group, 0, 1)) == [1000 * group]
    assert len(read) == 7
    small = RowGroupDecoder(stored(table, note), ["id"], ahead_bytes=size // 2)
    small.expect(range(6))
    assert ids(small.decode(3, 0, 1)) == [3000]


def test_a_row_group_larger_than_the_bytes_allowed_holds_up_none_behind_it(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[5000], [3], [4]])
    came = threading.Semaphore(0)
    decoder = RowGroupDecoder(stored(table, lambda path, start: came.release()), ahead_bytes=5000)
    decoder.expect(range(3))
    for _ in range(5):  # three footers, two row groups
        assert came.acquire(timeout=BOUND_S)
    assert [ids(decoder.decode(group, 0, 1)) for group in range(3)] == [[0], [5000], [5003]]


def test_a_row_group_that_is_decoded_now_does_not_wait_for_expected_ones(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[1000] * 6])
    decoder = RowGroupDecoder(stored(table), ahead_bytes=30_000)
    decoder.expect([0, 1, 2, 3])
    assert ids(decoder.decode(5, 0, 1)) == [5000]
    decoder.expect([4])
    assert [ids(decoder.decode(group, 0, 1)) for group in (4, 4, 3, 0)] == [[4000], [4000], [3000], [0]]


def test_row_groups_that_are_expected_no_more_do_not_hold_up_those_behind_them(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[10] * 300])
    came, awaited = threading.Event(), list[int]()
    starts: list[int] = []

    def note(path: str, start: int) -> None:
        starts.append(start)
        if start in awaited:
            came.set()

    RowGroupDecoder(stored(table, note)).decode(70, 0, 1)
    awaited.append(starts[-1])
    came.clear()
    decoder = RowGroupDecoder(stored(table, note))
    decoder.expect([*range(300)])
    for group in range(100, 300):
        assert ids(decoder.decode(group, 0, 1)) == [10 * group]
    assert not came.is_set()
    decoder.expect([*range(70, 300)])
    assert came.wait(BOUND_S)


def test_reads_of_row_groups_that_are_expected_no_more_are_cancelled(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[10] * 60])
    begun, go_on = threading.Semaphore(0), threading.Event()
    starts: list[int] = []

    def hold(path: str, start: int) -> None:
        starts.append(start)
        begun.release()
        if len(starts) > 1:  # the first one reads the footer
            go_on.wait(BOUND_S)

    decoder = RowGroupDecoder(stored(table, hold))
    decoder.expect(range(60))
    for _ in range(1 + THREADS):
        assert begun.acquire(timeout=BOUND_S)
    decoder.expect([])
    go_on.set()
    assert ids(decoder.decode(59, 0, 1)) == [590]
    assert len(starts) == 1 + THREADS + 1


def test_a_local_file_is_not_read_ahead(tmp_path: Path) -> None:
    decoder = RowGroupDecoder(write_ids(tmp_path, [[2], [3]]))
    assert not decoder.fetches
    decoder.expect([0, 1])
    assert decoder._prefetcher._state.expected == {}
    assert ids(decoder.decode(1, 0, 1)) == [2]


@pytest.mark.parametrize("call", [1, 2])
def test_a_failure_ahead_is_raised_when_the_row_group_is_decoded_and_the_next_decode_reads_again(
    tmp_path: Path, call: int
) -> None:
    table = write_ids(tmp_path, [[2], [3]])
    storage = FaultyStorage(table.storage, fail_at={("read", call): StoreFault.ERROR})
    decoder = RowGroupDecoder(replace(table, storage=storage))
    decoder.expect([0])
    with pytest.raises(StorageError, match="injected"):
        decoder.decode(0, 0, 2)
    assert ids(decoder.decode(0, 0, 2)) == [0, 1]


def test_damage_that_was_fetched_ahead_is_raised_only_after_a_second_read(tmp_path: Path) -> None:
    write_file(tmp_path / "a.parquet", [pa.table({"id": range(2000)})], write_page_checksum=True)
    table = open_table(tmp_path)
    for faults, is_damaged in (([2], False), ([2, 4], True)):  # the first and the third read are of the footer
        kept_footers.forget()
        storage = FaultyStorage(table.storage, fail_at={("read", call): StoreFault.FLIPPED for call in faults})
        decoder = RowGroupDecoder(replace(table, storage=storage))
        decoder.expect([0])
        if is_damaged:
            with pytest.raises(DataFileDamaged, match="'id' of row group 0"):
                decoder.decode(0, 0, 2)
        else:
            assert ids(decoder.decode(0, 0, 2)) == [0, 1]
        assert len(storage.calls) == 4


def test_a_file_that_was_written_again_is_refused_when_it_was_expected(tmp_path: Path) -> None:
    table = write_ids(tmp_path / "a", [[2], [3]])
    write_ids(tmp_path / "b", [[2], [4]])
    (tmp_path / "b" / table.index.paths[1]).replace(tmp_path / "a" / table.index.paths[1])
    decoder = RowGroupDecoder(stored(table))
    decoder.expect([0, 1])
    assert ids(decoder.decode(0, 0, 2)) == [0, 1]
    with pytest.raises(DataFileChanged, match=table.index.paths[1]):
        decoder.decode(1, 0, 3)


@pytest.mark.parametrize("is_stored", [False, True])
def test_threads_may_share_a_decoder(tmp_path: Path, is_stored: bool) -> None:
    table = write_ids(tmp_path, [[5] * 8] * 6)
    decoder = RowGroupDecoder(stored(table) if is_stored else table, open_files=2)
    groups = [*range(48)] * 3
    decoder.expect(groups)
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda group: ids(decoder.decode(group, 0, 5)), groups)
        assert list(found) == [list(range(5 * group, 5 * group + 5)) for group in groups]
    decoder.close()


ENDS_WHILE_A_FILE_IS_TO_BE_OPENED = """
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lakeckpt.lake.parquet.ranges import THREADS, in_background
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.threads import Threads
from tests.reading.test_fetching import stored

def until_the_interpreter_ends():
    other = ThreadPoolExecutor(1)
    while True:
        try:
            other.submit(int).result()
        except RuntimeError:
            return

decoder, threads, waits = RowGroupDecoder(stored(open_table(sys.argv[1]))), Threads(1), threading.Event()
for _ in range(THREADS):
    in_background(until_the_interpreter_ends)
decoder.expect([0])  # behind them: no thread opens the file any more

def decode():
    waits.set()
    return decoder.decode(0, 0, 2)

threads.submit(decode)
waits.wait()
"""


def test_decoding_does_not_wait_for_a_file_that_no_thread_opens_as_the_interpreter_ends(tmp_path: Path) -> None:
    write_ids(tmp_path, [[2], [3]])
    script = [sys.executable, "-c", ENDS_WHILE_A_FILE_IS_TO_BE_OPENED, str(tmp_path)]
    ran = subprocess.run(script, capture_output=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


def test_a_file_that_no_thread_can_be_asked_to_open_is_opened_by_the_thread_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = RowGroupDecoder(stored(write_ids(tmp_path, [[2], [3]])))

    def refuse(*_: Any) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    with monkeypatch.context() as patched:
        patched.setattr(fetching, "in_background", refuse)
        decoder.expect([0])
        assert ids(decoder.decode(0, 0, 2)) == [0, 1]
