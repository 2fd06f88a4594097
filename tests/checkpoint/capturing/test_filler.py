"""Slices of a device are summed beside the copier: each gets its own checksums, whoever takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from lakeckpt.checkpoint.arena.slices import plan_slices
from lakeckpt.checkpoint.capture.filler import Filler
from lakeckpt.errors import ArenaError
from tests.patience import PATIENCE_S

SLICES = plan_slices({"one": 60, "other": 164}, slice_bytes=128)  # the first slice holds some of both


class Filling:
    """A generation of two slices."""

    def __init__(self) -> None:
        self.data = memoryview(bytearray(SLICES.data_bytes))
        self.checksums: dict[int, bytes] = {}
        self.here: list[int] = []

    bounds = staticmethod(SLICES.bounds)

    def summed(self, number: int, checksums: bytes) -> None:
        self.checksums[number] = checksums

    def filled(self, number: int) -> None:
        self.here.append(number)


class Summer:
    """Answers with what it was asked, until it is ``lost``."""

    lost = False

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def ask(self, bounds: Sequence[tuple[int, int]]) -> None:
        if self.lost:
            raise ArenaError("it died")
        self.asked += bounds

    def take(self) -> bytes:
        if self.lost:
            raise ArenaError("it died")
        return str(self.asked.pop(0)).encode()


class Helpers:
    """Do what they are given when somebody waits for it."""

    def beside(self, work: Callable[[], None]) -> Future[None]:
        class Later(Future[None]):
            def result(self, timeout: float | None = None) -> None:
                work()

        return Later()


def filler_of(filling: Filling, summer: Summer | None, **more: Any) -> Filler:
    options: dict[str, Any] = {"lost": None, "copier": Helpers(), **more}
    return Filler(filling, checksummer=summer, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("summer", [Summer(), None])
def test_each_slice_gets_its_own_checksums_wherever_it_is_summed(summer: Summer | None) -> None:
    filling = Filling()
    filler = filler_of(filling, summer)
    filler.fill_beside([0, 1])
    filler.wait()
    assert summer is None or filling.checksums == {0: b"(0, 128)", 1: b"(128, 228)"}
    assert summer is not None or filling.here == [0, 1]


@pytest.mark.parametrize("when", ["asked", "answering", "given up"])
def test_a_process_that_is_lost_is_told_once_and_its_slices_are_filled_here(when: str) -> None:
    filling, summer = Filling(), Summer()
    told: list[tuple[object, str]] = []
    filler = filler_of(filling, summer, lost=lambda one, why: told.append((one, why)))
    summer.lost = when == "asked"
    filler.fill_beside([1])
    summer.lost = True
    filler.give_up() if when == "given up" else filler.wait()
    assert told == [(summer, "it died")] and filling.here == [1] and filling.checksums == {}
    filler.fill_beside([1])
    filler.wait()
    assert told == [(summer, "it died")] and filling.here == [1, 1], "helpers fill what comes after"


def test_a_capture_that_is_given_up_takes_its_answers_with_it() -> None:
    filling, summer = Filling(), Summer()
    given_up = filler_of(Filling(), summer)
    given_up.fill_beside([1])
    given_up.give_up()
    filler = filler_of(filling, summer)
    filler.fill_beside([1])
    filler.wait()
    assert filling.checksums == {1: b"(128, 228)"} and not summer.asked


def test_a_capture_that_is_given_up_is_left_by_its_helpers_first() -> None:
    """Its generation is begun again then, by another capture."""
    at_it, may_end, order = threading.Event(), threading.Event(), list[str]()

    class Slow(Filling):
        def filled(self, number: int) -> None:
            at_it.set()
            assert may_end.wait(PATIENCE_S)
            order.append("written")

    def give_up() -> None:
        filler.give_up()
        order.append("given up")

    with ThreadPoolExecutor(1) as helpers:
        filler = filler_of(Slow(), None, copier=SimpleNamespace(beside=helpers.submit))
        filler.fill_beside([0])
        assert at_it.wait(PATIENCE_S)
        giving_up = threading.Thread(target=give_up)
        giving_up.start()
        giving_up.join(0.2)
        may_end.set()
        giving_up.join(PATIENCE_S)
    assert order == ["written", "given up"]
