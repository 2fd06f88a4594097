"""Which slices of a capture are copied gently: those of which nothing comes any other way, or later."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from lakeckpt.checkpoint.arena.filling import Run
from lakeckpt.checkpoint.capturing.capture import Capture
from lakeckpt.checkpoint.capturing.links import Link
from lakeckpt.checkpoint.capturing.moves import Issued, Moves
from lakeckpt.checkpoint.gate import OpenGate
from tests.checkpoint.capturing.device import Device, SimulatedLink
from tests.patience import PATIENCE_S

SIZE = 2**17
"""Half of it is as little as is a run of its own."""


class Gentle(OpenGate):
    """Has time for all, once it is open."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> bool:
        self.open.wait(PATIENCE_S)
        return True


@dataclass(slots=True)
class Held(Moves):
    """Copies that are begun, and made when they may be."""

    begun: threading.Event | None = None
    may: threading.Event | None = None

    def make(self, *, runs: bool = True) -> list[Issued]:
        assert self.begun is not None and self.may is not None
        self.begun.set()
        self.may.wait(PATIENCE_S)
        return Moves.make(self, runs=runs)


class Case:
    """Two slices; some bytes of the second come with the first."""

    def __init__(self, first: Moves, *, link: Link | None = None) -> None:
        self.source = (torch.arange(2 * SIZE) % 251).to(torch.uint8)
        self.to = torch.zeros_like(self.source)
        self.filled: list[int] = []
        self.gently: list[int] = []
        second = Moves(touches=[1])
        cut = SIZE + SIZE // 2
        for moves, start, stop in ((first, 0, SIZE), (first, SIZE, cut), (second, cut, 2 * SIZE)):
            moves.add(self.to[start:stop], self.source[start:stop], link if moves is second else None, at=start)
        first.touches += [0, 1]
        self.gate = Gentle()
        self.capture = Capture(self.filled.append, [first, second], self.gate, live=[self.source], gently=self.brought)

    def brought(self, number: int, runs: Sequence[Run]) -> None:
        self.gently.append(number)
        for run in runs:
            run.to[:] = run.source

    def check(self) -> None:
        assert torch.equal(self.to, self.source) and self.filled == [0, 1]


def test_a_slice_that_has_all_else_is_copied_gently() -> None:
    case = Case(Moves())
    case.gate.open.set()
    assert case.capture.run()
    assert case.gently == [0, 1]
    case.check()


def test_a_slice_that_waits_for_more_is_not_copied_gently() -> None:
    """It would be digested before all of it is there."""
    begun, may = threading.Event(), threading.Event()
    case = Case(Held(begun=begun, may=may))
    whole: list[bool] = []
    copier = threading.Thread(target=lambda: whole.append(case.capture.run()))
    copier.start()
    trainer = threading.Thread(target=case.capture.fence)
    trainer.start()
    assert begun.wait(PATIENCE_S), "the fence is at the first slice"
    case.gate.open.set()
    while 1 in case.capture._open:
        copier.join(0.001)
    may.set()
    for thread in (copier, trainer):
        thread.join(PATIENCE_S)
    assert whole == [True] and case.gently == []
    case.check()


@pytest.mark.parametrize("seed", range(3))
def test_what_comes_over_a_link_is_not_copied_gently(seed: int) -> None:
    device = Device(seed)
    case = Case(Moves(), link=SimulatedLink(device))
    case.gate.open.set()
    assert case.capture.run()
    assert case.gently == [0]
    case.check()
