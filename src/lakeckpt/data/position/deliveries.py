"""This module counts what a loader delivered to the training loop between two optimizer steps.

A loader calls `delivered` for every batch and `end` at the end of its rows, on whatever thread iterates it. A
checkpoint manager calls `take` at each step. `unsaved` counts what loaders of this process have delivered whose place
no manager saves, and `unsaved_in_training` what they delivered while gradients were on and models were in train mode.
The module starts no threads and takes no locks: if another thread delivers, a count may be off by what that thread
adds meanwhile. In that case read-ahead is suspected anyway.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from lakeckpt.core.read_ahead import Given

__all__ = ["ConsumptionWarning", "Deliveries", "ReadAheadWarning", "unsaved", "unsaved_in_training", "watch_training"]

_MANY = 1000
"""So many micro-batches without a step are warned of."""
_MANY_ROWS = 1_000_000
"""So many rows, if the loop gets single rows."""
_EVERY: weakref.WeakValueDictionary[int, Deliveries] = weakref.WeakValueDictionary()
"""All that have delivered, by `id`; loaders of other threads are added at any time."""
_IN_TRAINING: list[Callable[[], bool]] = []
"""Says whether the models of the newest manager of this process are in train mode; empty: there is none."""
_NO_STEP = (
    "reader {!r} has delivered {:,} {} since restore(), and manager.step(batch) was never called: no checkpoint "
    "is saved by the policy, and after a crash all of these rows come again. Call manager.step(batch) after each "
    "optimizer.step()"
)


class ConsumptionWarning(UserWarning):
    """The training loop does not say what it uses: checkpoints miss rows, or are not made."""


class ReadAheadWarning(ConsumptionWarning):
    """Something between the loader and the training loop seems to read ahead, and ``manager.step()`` counts what it
    holds as used. ``manager.step(batch)`` settles it."""


class Deliveries:
    """Counts what one loader has delivered in this process."""

    def __init__(self, *, row_wise: bool = False) -> None:
        self._row_wise = row_wise
        self._count, self._recent, self._fresh, self._over = 0, 0, False, False
        self._threads: set[int] = set()
        self._iteration: int | None = None
        self._primed: int | None = None
        self._name: str | None = None
        self._steps = 0
        self.run = 0
        """How many managers have tracked the loader."""
        self._in_training = 0
        """How many batches came while a model was trained, and no manager saved the place of the loader."""
        self.beat: Any = None
        """The page of the rank follows what is delivered: ``waits()``, ``delivered(receipt)``, ``ended()``."""

    def __reduce__(self) -> tuple[type[Deliveries], tuple[()]]:
        return Deliveries, ()  # in a worker process nothing was delivered

    @property
    def name(self) -> str:
        """The name by which a manager tracks the loader; empty if none does."""
        return self._name or ""

    @property
    def is_saved(self) -> bool:
        """True if a manager saves the place of the loader."""
        return self._name is not None

    def waits(self) -> None:
        """Note that the loop asks for a batch."""
        if self.beat is not None:
            self.beat.waits()

    def delivered(self, iteration: int, receipt: Any = None) -> None:
        """Note that the iterator with this number gave the loop a batch (in row-wise use: a row), of ``receipt``."""
        if self.beat is not None:
            self.beat.delivered(receipt)
        if iteration != self._iteration:
            self._iteration, self._fresh, self._recent = iteration, True, 0
        self._count += 1
        self._recent += 1
        self._over = False
        self._threads.add(get_ident())
        if self._name is None and _IN_TRAINING and torch.is_grad_enabled() and _IN_TRAINING[-1]():
            self._in_training += 1
        if self._count == 1:
            _EVERY[id(self)] = self
        elif self._count == (_MANY_ROWS if self._row_wise else _MANY):
            self.check_stepped()

    def end(self) -> None:
        """Note that the loop saw the end of the rows."""
        self._over = True
        if self.beat is not None:
            self.beat.ended()

    def begin_run(self, name: str) -> int:
        """Note that a manager tracks the loader as ``name`` from now on: earlier deliveries are not of its run. Returns
        the number of this run, which ``run`` is until another manager takes the loader."""
        self._primed = None if self._over else self._iteration
        self.take()
        self._name, self._steps = name, 0
        self.run += 1
        return self.run

    def saved(self) -> None:
        """Note that there is nothing to warn of: the place of the loader is saved without tracking, or never."""
        self._name, self._steps = "", 1

    def take(self) -> Given:
        """Return what was delivered since the last call. The thread that steps calls it at each step."""
        given = Given(
            batches=self._count,
            elsewhere=bool(self._threads - {get_ident()}),
            primed=self._count > 0 and self._iteration == self._primed,
            recent=self._recent,
            fresh=self._fresh,
            over=self._over,
        )
        self._count, self._recent, self._fresh, self._threads = 0, 0, False, set()
        self._steps += 1
        return given

    def check_stepped(self) -> None:
        """Warn if a tracked loader has delivered batches and no step was taken."""
        if self._name is not None and self._count and not self._steps:
            what = "rows" if self._row_wise else "batches"
            warnings.warn(_NO_STEP.format(self._name, self._count, what), ConsumptionWarning, stacklevel=4)


def unsaved() -> int:
    """Return how many batches were delivered by loaders of this process whose place no manager saves."""
    return sum(one._count for one in _every() if not one.is_saved)


def watch_training(is_training: Callable[[], bool]) -> None:
    """Count batches of loaders that no manager saves, from now on, while ``is_training`` returns True."""
    _IN_TRAINING[:] = [is_training]


def unsaved_in_training() -> int:
    """Return how many batches loaders whose place no manager saves have delivered while a model was trained."""
    return sum(one._in_training for one in _every() if not one.is_saved)


def _every() -> list[Deliveries]:
    return [one for each in _EVERY.valuerefs() if (one := each()) is not None]  # at once, whatever another thread adds
