"""What is taken beside the loop, and how its thread ends."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lakeckpt.data.beside import Beside
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
    assert not beside._thread.is_alive() and len(taken) == 5
    assert list(beside) == []


def test_the_end_and_errors_stay_what_they_are() -> None:
    beside = Beside(counting([], 3))
    assert list(beside) == [0, 1, 2] and list(beside) == [] and not beside._thread.is_alive()

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
    ended: list[list[int]] = []
    loop = threading.Thread(target=lambda: ended.append(list(beside)))
    loop.start()
    asked.wait(PATIENCE_S)
    beside.close()
    loop.join(PATIENCE_S)
    assert len(ended) == 1 and not beside._thread.is_alive()


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
    thread = beside._thread
    cycle = [beside]
    cycle.append(cycle)  # type: ignore[arg-type]
    del beside, cycle
    may.set()
    assert collected.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
