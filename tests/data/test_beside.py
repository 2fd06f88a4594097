"""What is taken beside the loop, and how its thread ends."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from lakeckpt.data.beside import Beside
from lakeckpt.errors import StateUnavailable
from tests.patience import PATIENCE_S


def counting(taken: list[int], most: int | None = None) -> Callable[[Callable[[], bool]], Iterator[int]]:
    def found(is_wanted: Callable[[], bool]) -> Iterator[int]:
        for one in itertools.count() if most is None else range(most):
            taken.append(one)
            yield one

    return found


def comes(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return condition()


def test_items_come_in_order_and_two_are_taken_ahead() -> None:
    taken: list[int] = []
    beside = Beside(counting(taken))
    assert comes(lambda: len(taken) == 2)
    assert [next(beside) for _ in range(3)] == [0, 1, 2]
    assert comes(lambda: len(taken) == 5)
    time.sleep(0.05)
    assert len(taken) == 5
    beside.close()
    assert not beside.thread.is_alive() and len(taken) == 5
    with pytest.raises(StateUnavailable, match="given up"):
        next(beside)


def test_the_end_and_errors_stay_what_they_are() -> None:
    beside = Beside(counting([], 3))
    assert list(beside) == [0, 1, 2] and list(beside) == [] and not beside.thread.is_alive()

    def fails(is_wanted: Callable[[], bool]) -> Iterator[int]:
        yield 0
        raise KeyError("one")

    beside = Beside(fails)
    assert next(beside) == 0
    for _ in range(2):
        with pytest.raises(KeyError, match="one"):
            next(beside)

    def cannot() -> None:
        raise OSError("no device")

    with pytest.raises(OSError, match="no device"):
        next(Beside(counting([]), prepare=cannot))


def test_who_waits_is_told_that_it_is_closed() -> None:
    asked = threading.Event()

    def waits(is_wanted: Callable[[], bool]) -> Iterator[int]:
        while is_wanted():
            asked.set()
            time.sleep(0.001)
        yield 0

    beside = Beside(waits)
    ended: list[bool] = []

    def loops() -> None:
        with pytest.raises(StateUnavailable, match="given up"):
            next(beside)
        ended.append(True)

    loop = threading.Thread(target=loops)
    loop.start()
    asked.wait(PATIENCE_S)
    beside.close()
    loop.join(PATIENCE_S)
    assert ended and not beside.thread.is_alive()


def test_it_may_be_let_go_of_by_the_collector_in_its_own_thread() -> None:
    """As happens where it is part of a cycle: the collector runs in whatever thread allocates."""
    collected = threading.Event()
    may = threading.Event()

    def collects(is_wanted: Callable[[], bool]) -> Iterator[int]:
        may.wait(PATIENCE_S)
        gc.collect()
        collected.set()
        while is_wanted():
            time.sleep(0.001)
        yield 0

    beside = Beside(collects)
    thread = beside.thread
    cycle: list[object] = [beside]
    cycle.append(cycle)
    del beside, cycle
    may.set()
    assert collected.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


class Source:
    def __call__(self, is_wanted: Callable[[], bool]) -> Iterator[int]:
        return iter(self)

    def __iter__(self) -> Iterator[int]:
        yield 0
        if self.fails:
            raise KeyError("one")

    fails = False


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_keeps_what_was_taken_from_without_the_collector(fails: bool) -> None:
    source = Source()
    source.fails = fails
    gone = weakref.ref(source)
    gc.disable()
    try:
        beside = Beside(source)
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            assert list(beside) == [0]
        del beside, source
        assert comes(lambda: gone() is None)
    finally:
        gc.enable()


def test_the_interpreter_ends_threads_of_which_the_collector_may_have_let_go() -> None:
    script = """
import atexit, time
over = []
atexit.register(lambda: print(over))
from lakeckpt.data.beside import Beside

def found(is_wanted):
    def items():
        try:
            while is_wanted():
                time.sleep(0.001)
            time.sleep(0.2)
            over.append(True)
            yield
        finally:
            pass
    return items()

kept = Beside(found)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "[True]\n")


def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    taken: list[int] = []
    beside = Beside(counting(taken, 5))
    assert comes(lambda: len(taken) == 2)
    child = os.fork()
    if not child:
        code = 1
        try:
            next(beside)
        except StateUnavailable as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(beside) == [0, 1, 2, 3, 4]
