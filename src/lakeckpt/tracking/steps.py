"""This module records up to where a reader was consumed when each optimizer step was done, as a run-length record.

After each optimizer step the manager notes the *frontier* of a reader: the epoch, and the steps of the loader that are
done in it. What step K consumed lies between the frontiers after K-1 and after K. A job in lockstep advances by the
same stride every step, so that thousands of steps are one run of five numbers.

The module never holds rows or positions: with the reader's state, frontiers are enough to find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lakeckpt.core.streams.mixed_batches import AnyReceipt

__all__ = ["Frontier", "StepRecord", "StepRecorder", "StepRun", "frontier_after"]


_JUMP = -1
"""The stride of a run that is a jump."""


class Frontier(NamedTuple):
    """Up to where a reader has been consumed: ``step`` steps of ``epoch``."""

    epoch: int
    step: int


def frontier_after(receipt: AnyReceipt) -> Frontier:
    """Return the frontier when all up to ``receipt`` has been consumed."""
    return Frontier(receipt.epoch, receipt.step + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """Optimizer steps ``first`` … ``first + count - 1``: after the i-th of them, the frontier is ``start`` moved on by
    i times ``stride`` loader steps.

    A *jump* is a run of one step with a stride of -1. It stands for all steps after the run before it, up to this one,
    which other processes did. The rows of these steps are known only together.
    """

    first: int
    count: int
    start: Frontier
    stride: int

    def __post_init__(self) -> None:
        if self.first < 1 or self.count < 1 or min(self.start) < 0:
            raise ValueError(f"not a run of optimizer steps: {self.first} × {self.count} from {tuple(self.start)}")

    @property
    def last(self) -> int:
        """The last optimizer step of the run."""
        return self.first + self.count - 1

    @property
    def is_jump(self) -> bool:
        """True if other processes did the step, and those before it."""
        return self.count == 1 and self.stride == _JUMP

    def part(self, first: int, last: int) -> StepRun | None:
        """Return the part of the run from optimizer step ``first`` to ``last``; None if there is none."""
        first, last = max(first, self.first), min(last, self.last)
        if first > last:
            return None
        stride = self.stride if first < last or self.is_jump else 0
        return StepRun(first=first, count=last - first + 1, start=self.at(first - self.first), stride=stride)

    def at(self, index: int) -> Frontier:
        """Return the frontier after the ``index``-th step of the run, from 0."""
        epoch, step = self.start
        return Frontier(epoch, step + index * self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The frontiers after each optimizer step since the parent checkpoint; runs are in order of steps."""

    runs: tuple[StepRun, ...] = ()

    def __post_init__(self) -> None:
        for before, after in zip(self.runs, self.runs[1:], strict=False):
            follows = after.first == before.first + before.count
            if not (follows or (after.is_jump and after.first > before.last)):
                raise ValueError(f"runs of steps must follow one another: {after.first} after {before}")

    def is_known(self, step: int) -> bool:
        """Return whether it is known which rows optimizer step ``step`` used."""
        return not next((run.is_jump for run in self.runs if run.last >= step), False)

    def frontier(self, step: int) -> Frontier | None:
        """The frontier after optimizer step ``step`` (counted from 1), or None if this record does not hold it."""
        for run in self.runs:
            if run.first <= step < run.first + run.count:
                return run.at(step - run.first)
        return None

    def to_plain(self) -> list[list[int]]:
        """Lists of [first, count, epoch, step, stride]."""
        return [[run.first, run.count, *run.start, run.stride] for run in self.runs]

    @classmethod
    def from_plain(cls, plain: Sequence[Sequence[int]]) -> StepRecord:
        """The record that `to_plain` made ``plain`` of; ValueError if it is none."""
        runs = []
        for entry in plain:
            if len(entry) != 5 or not all(type(number) is int for number in entry):
                raise ValueError(f"a run of steps is five integers, got {entry!r}")
            first, count, epoch, step, stride = entry
            runs.append(StepRun(first=first, count=count, start=Frontier(epoch, step), stride=stride))
        return cls(runs=tuple(runs))


class StepRecorder:
    """Notes a frontier for each optimizer step. It is made at each restore, and cut back at each commit."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[StepRun] = []

    def note(self, step: int, frontier: Frontier) -> None:
        """Note that after optimizer step ``step`` the reader was consumed up to ``frontier``. Constant time."""
        last = self._runs[-1] if self._runs and not self._runs[-1].is_jump else None
        if last is not None and step == last.first + last.count and frontier.epoch == last.start.epoch:
            moved = frontier.step - last.start.step
            stride = moved if last.count == 1 else last.stride
            if moved == last.count * stride:
                self._runs[-1] = StepRun(first=last.first, count=last.count + 1, start=last.start, stride=stride)
                return
        self._runs.append(StepRun(first=step, count=1, start=frontier, stride=0))

    def jump(self, step: int, frontier: Frontier) -> None:
        """Note that other processes did the steps up to ``step``, after which the reader is at ``frontier``."""
        self._runs.append(StepRun(first=step, count=1, start=frontier, stride=_JUMP))

    def forget(self, up_to: int) -> None:
        """Forget the steps up to and including ``up_to``: a commit has recorded them."""
        parts = (run.part(up_to + 1, run.last) for run in self._runs)
        self._runs = [part for part in parts if part is not None]

    def record(self, up_to: int) -> StepRecord:
        """Return the record of the noted steps up to and including ``up_to``."""
        parts = (run.part(run.first, up_to) for run in self._runs)
        return StepRecord(runs=tuple(part for part in parts if part is not None))
