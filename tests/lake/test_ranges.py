"""Pieces of an object are read whole, close ones together, several at once. Another object is refused."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.errors import DataFileChanged, ObjectChanged, ObjectMissing, StorageError, TableVersionGone
from lakeckpt.lake.parquet import ranges
from lakeckpt.lake.parquet.ranges import Fetch, Range, coalesced, read_pinned
from lakeckpt.lake.storage.base import ObjectInfo

CONTENT = bytes(np.random.default_rng(0).integers(0, 256, 1000, np.uint8))
FILE = ObjectInfo(path="a", size_bytes=len(CONTENT), etag="e")
BOUND_S = 30.0
"""A test that waits for so long has failed."""

PIECES = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)).map(lambda one: (one[0], one[0] + one[1])))


class Store:
    """A storage of one object. ``together``: how many reads must be under way at once before any is answered."""

    def __init__(self, *, together: int = 1, failure: Exception | None = None, content: bytes = CONTENT) -> None:
        self.asked: list[Range] = []
        self._barrier = threading.Barrier(together)
        self._failure, self._content = failure, content

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        assert (path, etag) == ("a", "e") and stop is not None
        self.asked.append((start, stop))
        self._barrier.wait(BOUND_S)
        if self._failure is not None:
            raise self._failure
        return self._content[start:stop]

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        raise AssertionError("nothing lists")

    def put(self, path: str, chunks: object) -> int:
        raise AssertionError("nothing writes")

    def put_new(self, path: str, data: bytes) -> None:
        raise AssertionError("nothing writes")

    def delete(self, path: str) -> None:
        raise AssertionError("nothing deletes")


def fetch(store: Store, asked: Sequence[Range]) -> Fetch:
    return Fetch(partial(read_pinned, store, "uri", FILE), asked)


def at(file: pa.NativeFile, start: int, stop: int) -> bytes:
    file.seek(start)
    return bytes(file.read_buffer(stop - start))


def held(fetched: Fetch, asked: Sequence[Range]) -> list[bytes]:
    file = fetched.wait()
    return [at(file, start, stop) for start, stop in asked]


def read(store: Store, asked: Sequence[Range]) -> list[bytes]:
    return held(fetch(store, asked), asked)


@given(pieces=PIECES, hole=st.integers(0, 80), most=st.integers(1, 200))
def test_pieces_lie_whole_in_ranges_that_hold_no_more_than_the_holes_allowed(
    pieces: list[Range], hole: int, most: int
) -> None:
    found = coalesced(pieces, hole_bytes=hole, most_bytes=most)
    assert found == sorted(found)
    for start, stop in pieces:
        assert any(first <= start <= stop <= last for first, last in found)
    for first, last in found:
        inside = [(start, stop) for start, stop in pieces if first <= start and stop <= last]
        assert first == min(start for start, _ in inside) and last == max(stop for _, stop in inside)
        assert last - first <= most or (first, last) in pieces
        reached = first
        for start, stop in sorted(inside):
            assert start - reached <= hole
            reached = max(reached, stop)


def test_neighbours_share_a_range_and_only_as_long_as_it_stays_small() -> None:
    chunks = [(0, 10), (10, 20), (25, 30), (41, 50), (50, 99)]
    assert coalesced(chunks, hole_bytes=10, most_bytes=100) == [(0, 30), (41, 99)]
    assert coalesced(chunks, hole_bytes=11, most_bytes=100) == [(0, 99)]
    assert coalesced(chunks, hole_bytes=10, most_bytes=20) == [(0, 20), (25, 30), (41, 50), (50, 99)]


def test_all_ranges_of_an_object_are_asked_for_at_once() -> None:
    asked = [(0, 10), (100, 150), (900, 1000), (500, 500)]
    store = Store(together=3)
    assert read(store, asked) == [CONTENT[start:stop] for start, stop in asked]
    assert sorted(store.asked) == [(0, 10), (100, 150), (900, 1000)]


def test_a_large_range_comes_in_requests_of_equal_size_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "REQUEST_BYTES", 100)
    store = Store(together=4)
    assert read(store, [(7, 357)]) == [CONTENT[7:357]]
    assert sorted(store.asked) == [(7, 94), (94, 182), (182, 269), (269, 357)]


def test_no_more_requests_are_under_way_than_there_are_threads() -> None:
    counted = threading.Semaphore(ranges.THREADS)

    class Counting(Store):
        def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
            assert counted.acquire(blocking=False), "more at once than there are threads"
            try:
                return super().read(path, start, stop, etag=etag)
            finally:
                counted.release()

    asked = [(n, n + 10) for n in range(0, 960, 10)]
    assert read(Counting(together=ranges.THREADS), asked) == [CONTENT[start:stop] for start, stop in asked]


@pytest.mark.parametrize(
    ("store", "kind", "text"),
    [
        (Store(failure=ObjectMissing("?")), TableVersionGone, r"'a' is gone .*keep-a-version"),
        (Store(failure=ObjectChanged("?")), DataFileChanged, r"'a' was written again \(its ETag is not e\)"),
        (Store(content=CONTENT[:550]), DataFileChanged, "'a' ends at 550, not at 1000"),
        (Store(failure=StorageError("the store is down")), StorageError, "the store is down"),
    ],
)
def test_an_object_that_is_not_the_pinned_one_is_refused(store: Store, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        read(store, [(0, 10), (500, 600)])


def test_a_cancelled_fetch_begins_no_more_requests() -> None:
    entered, go_on = threading.Barrier(ranges.THREADS + 1), threading.Event()

    class Held(Store):
        def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
            if start < 500:
                entered.wait(BOUND_S)
                assert go_on.wait(BOUND_S)
            return super().read(path, start, stop, etag=etag)

    store, waited = Held(), [(n, n + 1) for n in range(ranges.THREADS)]
    first = fetch(store, waited)
    entered.wait(BOUND_S)
    fetch(store, [(n, n + 1) for n in range(600, 650)]).cancel()
    go_on.set()
    assert held(first, waited) == [CONTENT[start:stop] for start, stop in waited]
    assert read(store, [(700, 710)]) == [CONTENT[700:710]]  # behind all that was asked for
    assert {start for start, _ in store.asked} == {*range(ranges.THREADS), 700}


def test_a_file_of_parts_has_nothing_beside_them() -> None:
    file = fetch(Store(), [(10, 20), (900, 1000)]).wait()
    assert at(file, 12, 17) == CONTENT[12:17]
    for start, stop in ((5, 15), (15, 25), (500, 501), (990, 1010)):
        assert at(file, start, stop) == b""


def test_a_file_is_closed_when_pyarrow_has_released_what_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[pa.Buffer] = []
    waits: list[float] = []

    def releases(seconds: float) -> None:
        waits.append(seconds)
        lent.clear()

    monkeypatch.setattr(ranges.time, "sleep", releases)
    file = fetch(Store(), [(10, 20)]).wait()
    file.seek(10)
    lent.append(file.read_buffer(5))
    file.close()
    assert len(waits) == 1 and not lent
    fetch(Store(), [(10, 20)]).wait().close()
    assert len(waits) == 1, "nothing was read, and nothing has to be released"


def _in_child(told: multiprocessing.SimpleQueue[bytes]) -> None:
    told.put(read(Store(together=2), [(0, 10), (20, 30)])[1])


def test_a_forked_process_reads_with_threads_of_its_own() -> None:
    read(Store(), [(0, 1)])
    context = multiprocessing.get_context("fork")
    told: multiprocessing.SimpleQueue[bytes] = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(told,))
    child.start()
    child.join(BOUND_S)
    assert child.exitcode == 0
    assert told.get() == CONTENT[20:30]
