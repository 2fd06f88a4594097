"""A capture asks its gate before each slice, and each admission has its end, whenever the fence comes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.checkpoint.capture.moves import Moves
from lakeckpt.checkpoint.capture.slice_copier import SliceCopier
from tests.patience import PATIENCE_S

SIZE = 2**17
"""Half of it is as little as is a run of its own."""


class Case:
    """Two slices; some bytes of the second come with the first."""

    def __init__(self, gate: Gate) -> None:
        self.source = (torch.arange(2 * SIZE) % 251).to(torch.uint8)
        self.to = torch.zeros_like(self.source)
        first, second = Moves(), Moves()
        cut = SIZE + SIZE // 2
        for moves, start, stop in ((first, 0, SIZE), (first, SIZE, cut), (second, cut, 2 * SIZE)):
            moves.add(self.to[start:stop], self.source[start:stop], None)
        self.capture = SliceCopier([first, second], gate, live=[self.source])

    def check(self) -> None:
        assert torch.equal(self.to, self.source)


class Noting(Gate):
    """Keeps what it is asked and told, and does something in one of its admissions."""

    def __init__(self, *, number: int = -1) -> None:
        self.said: list[str] = []
        self.number = number
        self.act: Callable[[threading.Event], None] = lambda urgent: None

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        number = self.said.count("admit")
        self.said.append("admit")
        if number == self.number:
            self.act(urgent)

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        assert begin_s <= end_s
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


def test_each_slice_is_admitted_and_its_end_reported() -> None:
    gate = Noting()
    case = Case(gate)
    assert case.capture.run()
    case.check()
    assert gate.said == ["admit", f"moved {FIRST}", "admit", f"moved {SECOND}"]


def test_a_fence_that_takes_all_in_the_first_admission_ends_it() -> None:
    gate = Noting(number=0)
    case = Case(gate)
    gate.act = lambda urgent: fence_beside(case.capture)
    assert case.capture.run()
    case.check()
    assert gate.said == ["admit", f"fenced {FIRST}", f"fenced {SECOND}", "moved 0"]


def test_a_fence_that_takes_the_last_slice_after_it_was_admitted_leaves_no_admission_without_its_end() -> None:
    gate = Noting(number=1)
    case = Case(gate)
    gate.act = lambda urgent: fence_beside(case.capture)
    assert case.capture.run()
    case.check()
    assert gate.said == ["admit", f"moved {FIRST}", "admit", f"fenced {SECOND}", "moved 0"]


def test_a_capture_without_slices_asks_nothing() -> None:
    gate = Noting()
    assert SliceCopier([], gate, live=[]).run()
    assert gate.said == []
