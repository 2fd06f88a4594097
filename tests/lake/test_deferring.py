"""What a finalizer leaves to whoever has the lock is done, once, and before anybody else has it."""

from __future__ import annotations

import threading

import pytest

from lakeckpt.lake.deferring import DeferringLock
from tests.patience import PATIENCE_S


def test_work_is_done_at_once_while_nobody_has_the_lock() -> None:
    lock, done = DeferringLock(), []
    lock.when_free(lambda: done.append(1))
    assert done == [1]
    with lock:
        assert done == [1]


def test_the_thread_that_has_the_lock_never_waits_for_itself() -> None:
    lock, done = DeferringLock(), []
    with lock:
        lock.when_free(lambda: done.append(1))
        assert done == []
    assert done == [1]


def test_work_may_leave_more_work() -> None:
    lock, done = DeferringLock(), []
    lock.when_free(lambda: (done.append(1), lock.when_free(lambda: done.append(2))))
    assert done == [1, 2]


def test_who_waits_for_the_lock_has_it_after_the_work() -> None:
    lock, seen, done = DeferringLock(), [], []
    held, is_left = threading.Event(), threading.Event()

    def holds() -> None:
        with lock:
            held.set()
            is_left.wait(PATIENCE_S)

    def waits() -> None:
        with lock:
            seen.extend(done)

    first = threading.Thread(target=holds)
    first.start()
    held.wait(PATIENCE_S)
    second = threading.Thread(target=waits)
    second.start()
    lock.when_free(lambda: done.append(threading.current_thread()))
    assert done == [], "it does not wait"
    is_left.set()
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert len(seen) == 1 and seen == done and done[0] in (first, second)


def test_an_error_in_the_block_frees_the_lock() -> None:
    lock, done = DeferringLock(), []

    def fails() -> None:
        with lock:
            lock.when_free(lambda: done.append(1))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert done == [1]
    with lock:
        pass
