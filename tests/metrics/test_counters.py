"""Counters never fall, keep nothing alive, and lose nothing that threads and processes add."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import threading
import weakref

import pytest

from lakeckpt import counters
from lakeckpt.counters import Living, ReaderCounters, add_stores, store_counters, stores, take_stores
from lakeckpt.errors import StorageError
from lakeckpt.lake.storage.retry import Deadlines, Retrier, Retryable


class Owner:
    """Something that is counted of."""


def counted(rows: int, name: str = "train") -> ReaderCounters:
    found = ReaderCounters(name)
    found.delivered(rows)
    return found


def test_what_owners_that_are_gone_have_counted_stays_in_the_sum_and_nothing_else_of_them() -> None:
    living, owners = Living(ReaderCounters), [Owner(), Owner(), Owner()]
    for owner, one in zip(owners, (counted(3), counted(4), counted(5, "loader")), strict=True):
        living.follow(owner, one)
    ref = weakref.ref(owners[0])
    del owner, owners[0]
    gc.collect()
    assert ref() is None
    assert len(living.living) == 2
    assert {(one.name, one.rows, one.batches) for one in living.sums()} == {("train", 7, 2), ("loader", 5, 1)}
    del owners[:]
    gc.collect()
    assert living.living == []
    assert {(one.name, one.rows) for one in living.sums()} == {("train", 7), ("loader", 5)}


def test_an_owner_is_followed_until_its_end_is_called_and_counts_once() -> None:
    living, owner = Living(ReaderCounters), Owner()
    end = living.follow(owner, counted(3))
    end()
    end()
    del owner
    gc.collect()
    assert living.living == []
    assert [one.rows for one in living.sums()] == [3]


def test_threads_lose_nothing_that_they_count_of_a_store() -> None:
    def add() -> None:
        for _ in range(2000):
            store_counters("local").read(3)
            store_counters("local").retried()

    threads = [threading.Thread(target=add) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [(one.kind, one.bytes_read, one.retries) for one in stores()] == [("local", 48000, 16000)]


def test_what_a_worker_takes_is_added_once() -> None:
    store_counters("s3").add(7, 2)
    store_counters("local")
    taken = take_stores()
    assert taken == [("s3", 7, 2)]
    assert take_stores() == []
    add_stores(taken)
    add_stores([("s3", 1, 0), ("gs", 5, 0)])
    assert {one.kind: (one.bytes_read, one.retries) for one in stores()} == {
        "s3": (8, 2),
        "local": (0, 0),
        "gs": (5, 0),
    }


def _in_child(pipe: object) -> None:
    store_counters("local").read(1)
    found = [one.bytes_read for one in stores()], counters.READERS.sums(), counters.READERS.living
    pipe.send(found)  # type: ignore[attr-defined]


def test_a_forked_process_begins_with_nothing_also_where_a_thread_holds_the_locks() -> None:
    owner = Owner()
    counters.READERS.follow(owner, counted(3))
    store_counters("local").read(100)
    here, there = multiprocessing.Pipe()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with counters.READERS._lock, store_counters("local")._lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(there,))
    process.start()
    try:
        assert here.poll(60), "the child waits for a lock that no thread of it holds"
        assert here.recv() == ([1], [], [])
    finally:
        over.set()
        thread.join()
        process.kill() if process.is_alive() and not here.poll(0) else None
        process.join()


def test_counters_that_are_pickled_are_new() -> None:
    found = pickle.loads(pickle.dumps(counted(3)))
    assert (found.rows, found.name) == (0, "")


def test_the_time_of_a_pull_is_counted_and_the_end_is_none() -> None:
    one = ReaderCounters()
    found = iter(["a"])
    assert (one.pull(found), one.pull(found)) == ("a", None)
    assert one.wait_s > 0


@pytest.mark.parametrize("fails", [0, 2, 9])
def test_attempts_that_are_made_once_more_are_counted(fails: int) -> None:
    left, now = [fails], [0.0]

    def attempt() -> int:
        now[0] += 1.0
        if left[0]:
            left[0] -= 1
            raise Retryable("busy", errno=5)
        return 7

    retrier = Retrier(Deadlines(total_s=4.0), clock=lambda: now[0], sleep=lambda _: None, counters=store_counters("s3"))
    retrier._draw = lambda: 0.0
    if fails < 4:
        assert retrier.call("cannot read", attempt) == 7
    else:
        with pytest.raises(StorageError, match="4 attempts"):
            retrier.call("cannot read", attempt)
    assert store_counters("s3").retries == min(fails, 3)
