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

from lakeckpt.core.receipts import Receipt

__all__ = ["Frontier", "Run", "StepRecord", "StepRecorder", "frontier_after"]


class Frontier(NamedTuple):
    """Up to where a reader has been consumed: ``step`` steps of ``epoch``."""

    epoch: int
    step: int


def frontier_after(receipt: Receipt) -> Frontier:
    """The frontier when all up to ``receipt`` has been consumed."""
    return Frontier(receipt.epoch, receipt.step + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Optimizer steps ``first`` … ``first + count - 1``: after the i-th of them, the frontier is ``start`` moved on by
    i times ``stride`` loader steps."""

    first: int
    count: int
    start: Frontier
    stride: int

    def __post_init__(self) -> None:
        if self.first < 1 or self.count < 1 or min(self.start) < 0:
            raise ValueError(f"not a run of optimizer steps: {self.first} × {self.count} from {tuple(self.start)}")

    def at(self, index: int) -> Frontier:
        """The frontier after the ``index``-th step of the run, from 0."""
        epoch, step = self.start
        return Frontier(epoch, step + index * self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The frontiers after each optimizer step since the parent checkpoint; runs are in order of steps."""

    runs: tuple[Run, ...] = ()

    def __post_init__(self) -> None:
        for before, after in zip(self.runs, self.runs[1:], strict=False):
            if after.first != before.first + before.count:
                raise ValueError(f"runs of steps must follow one another: {after.first} after {before}")

    def frontier(self, step: int) -> Frontier | None:
        """The frontier after optimizer step ``step`` (counted from 1), or None where this record does not hold it."""
        for run in self.runs:
            if run.first <= step < run.first + run.count:
                return run.at(step - run.first)
        return None

    def to_plain(self) -> list[list[int]]:
        """Lists of [first, count, epoch, step, stride]."""
        return [[run.first, run.count, *run.start, run.stride] for run in self.runs]

    @classmethod
    def from_plain(cls, plain: Sequence[Sequence[int]]) -> StepRecord:
        """The record that `to_plain` made ``plain`` of; ValueError where it is none."""
        runs = []
        for entry in plain:
            if len(entry) != 5 or not all(type(number) is int for number in entry):
                raise ValueError(f"a run of steps is five integers, got {entry!r}")
            first, count, epoch, step, stride = entry
            runs.append(Run(first=first, count=count, start=Frontier(epoch, step), stride=stride))
        return cls(runs=tuple(runs))


class StepRecorder:
    """Notes a frontier per optimizer step; made anew at each restore, cut back at each commit."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[list[int]] = []

    def note(self, step: int, frontier: Frontier) -> None:
        """Note that after optimizer step ``step`` the reader was consumed up to ``frontier``. Constant time."""
        if self._runs:
            run = self._runs[-1]
            first, count, epoch, start, stride = run
            if step == first + count and frontier.epoch == epoch:
                moved = frontier.step - start
                if count == 1:
                    run[1], run[4] = 2, moved
                    return
                if moved == count * stride:
                    run[1] = count + 1
                    return
        self._runs.append([step, 1, *frontier, 0])

    def forget(self, up_to: int) -> None:
        """Forget the steps up to and including ``up_to``: a commit has recorded them."""
        kept = []
        for first, count, epoch, start, stride in self._runs:
            skip = min(max(up_to + 1 - first, 0), count)
            if skip < count:
                kept.append([first + skip, count - skip, epoch, start + skip * stride, stride])
        self._runs = kept

    def record(self, up_to: int) -> StepRecord:
        """The record of the noted steps up to and including ``up_to``."""
        whole = StepRecord.from_plain(self._runs)
        runs = []
        for run in whole.runs:
            count = min(run.count, up_to + 1 - run.first)
            if count > 0:
                runs.append(Run(first=run.first, count=count, start=run.start, stride=run.stride))
        return StepRecord(runs=tuple(runs))
