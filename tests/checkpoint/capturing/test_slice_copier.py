"""What does a capture ask of its gate and tell it, and which slices does it copy gently?

Gently those of which nothing comes any other way, or later. Each admission has its end, whenever the fence comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from lakeckpt.checkpoint.arena.filling import Run
from lakeckpt.checkpoint.capture.gate import Gate, OpenGate
from lakeckpt.checkpoint.capture.links import Link
from lakeckpt.checkpoint.capture.moves import Issued, Moves
from lakeckpt.checkpoint.capture.slice_copier import SliceCopier
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


class Noted:
    """What was filled."""

    def __init__(self, filled: list[int]) -> None:
        self.filled = filled

    def fill(self, number: int, /) -> None:
        self.filled.append(number)

    def fill_beside(self, numbers: Sequence[int], /) -> None:
        self.filled += numbers

    def wait(self) -> None: ...

    def give_up(self) -> None: ...


class Case:
    """Two slices; some bytes of the second come with the first."""

    def __init__(self, first: Moves, *, link: Link | None = None, gate: Gate | None = None) -> None:
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
        self.capture = SliceCopier(
            Noted(self.filled), [first, second], gate or self.gate, live=[self.source], gently=self.brought
        )

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


class Noting(OpenGate):
    """Keeps what it is asked and told, and does something in one of its admissions."""

    def __init__(self, *, number: int = -1) -> None:
        self.said: list[str] = []
        self.number = number
        self.act: Callable[[threading.Event], None] = lambda urgent: None

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> bool:
        number = self.said.count("admit")
        self.said.append("admit")
        if number == self.number:
            self.act(urgent)
        return True

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /, *, gently: bool) -> None:
        assert begin_s <= end_s and (size_bytes or not gently)
        self.said.append(f"moved {size_bytes}")

    def fenced(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        self.said.append(f"fenced {size_bytes}")


FIRST, SECOND = SIZE + SIZE // 2, SIZE // 2
"""How many bytes the two slices move."""


def fence_beside(capture: SliceCopier) -> None:
    """The training thread comes to its fence, and goes on."""
    trainer = threading.Thread(target=capture.fence)
    trainer.start()
    trainer.join(PATIENCE_S)
    assert not trainer.is_alive()


def test_documents_take_the_time_of_the_first_admission_and_the_gate_is_asked_again() -> None:
    gate = Noting()
    case = Case(Moves(), gate=gate)

    def first() -> None:
        assert not case.to.any(), "nothing has moved"
        gate.said.append("documents")

    assert case.capture.run(first)
    case.check()
    assert gate.said == ["admit", "documents", "moved 0", "admit", f"moved {FIRST}", "admit", f"moved {SECOND}"]


def test_once_the_fence_has_come_documents_wait_until_all_slices_were_copied() -> None:
    gate = Noting(number=0)
    gate.act = threading.Event.set  # the fence has come, and has taken nothing yet
    case = Case(Moves(), gate=gate)

    def first() -> None:
        assert torch.equal(case.to, case.source)
        gate.said.append("documents")

    assert case.capture.run(first)
    case.check()
    assert gate.said == ["admit", f"moved {FIRST}", "admit", f"moved {SECOND}", "documents"]


def test_a_fence_that_takes_all_in_the_first_admission_ends_it_and_documents_are_made_then() -> None:
    gate = Noting(number=0)
    case = Case(Moves(), gate=gate)
    gate.act = lambda urgent: fence_beside(case.capture)
    assert case.capture.run(lambda: gate.said.append("documents"))
    case.check()
    assert gate.said == ["admit", f"fenced {FIRST}", f"fenced {SECOND}", "moved 0", "documents"]


def test_a_fence_that_takes_all_while_documents_are_made_leaves_no_admission_without_its_end() -> None:
    gate = Noting()
    case = Case(Moves(), gate=gate)

    def first() -> None:
        gate.said.append("documents")
        fence_beside(case.capture)

    assert case.capture.run(first)
    case.check()
    assert gate.said == ["admit", "documents", f"fenced {FIRST}", f"fenced {SECOND}", "moved 0"]


def test_a_fence_that_takes_the_last_slice_after_it_was_admitted_leaves_no_admission_without_its_end() -> None:
    gate = Noting(number=1)
    case = Case(Moves(), gate=gate)
    gate.act = lambda urgent: fence_beside(case.capture)
    assert case.capture.run()
    case.check()
    assert gate.said == ["admit", f"moved {FIRST}", "admit", f"fenced {SECOND}", "moved 0"]


def test_a_capture_without_slices_has_its_documents_made_and_asks_nothing() -> None:
    gate, made = Noting(), list[int]()
    assert SliceCopier(Noted([]), [], gate, live=[]).run(lambda: made.append(1))
    assert (made, gate.said) == ([1], [])
