"""What a finalizer leaves to whoever takes the lock is done, once, and before anything else."""

from __future__ import annotations

import signal
import threading

import pytest

from lakeckpt.lake.storage.deferring import Deferring
from tests.patience import PATIENCE_S


def test_work_is_done_at_once_while_nobody_has_the_lock() -> None:
    state, done = Deferring(), []
    state.when_free(lambda: done.append(1))
    assert done == [1] and not state.lock.locked()


def test_the_thread_that_has_the_lock_never_waits_for_itself() -> None:
    state, done = Deferring(), []
    with state.lock:
        state.when_free(lambda: done.append(1))
        assert done == []
    state.settle()
    assert done == [1]


def test_work_may_leave_more_work() -> None:
    state, done = Deferring(), []
    state.when_free(lambda: (done.append(1), state.when_free(lambda: done.append(2))))
    assert done == [1, 2]


def test_who_takes_the_lock_does_what_was_left_first() -> None:
    state, done = Deferring(), []
    held, is_left = threading.Event(), threading.Event()

    def holds() -> None:
        with state.lock:
            held.set()
            is_left.wait(PATIENCE_S)

    holder = threading.Thread(target=holds)
    holder.start()
    held.wait(PATIENCE_S)
    state.when_free(lambda: done.append(1))
    assert done == [], "it does not wait"
    is_left.set()
    holder.join(PATIENCE_S)
    with state.lock:
        state.catch_up()
        assert done == [1]


class Interrupted(Exception):
    pass


def use(state: Deferring, seconds: float) -> None:
    """Until a signal comes."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        with state.lock:
            state.catch_up()
        state.when_free(int)


def test_a_signal_at_any_moment_leaves_the_lock_free() -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    state = Deferring()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for attempt in range(300):
            with pytest.raises(Interrupted):
                use(state, 1e-4 + 1e-6 * attempt)
            assert not state.lock.locked()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
