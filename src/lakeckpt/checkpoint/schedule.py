"""This module decides on every rank whether a save falls at a step, without a message at most steps.

Where saves fall every so many steps, each rank counts for itself. Where they fall by time, rank 0 alone looks at its
clock, at *checks*. At a check it announces two steps: the next save (or none), and the next check. The other ranks read
the announcement of cut c at the next cut, so that a save is always announced one step ahead, and a few announcements
suffice for each save.

The next check lies halfway to the time of the next save, but at most an eighth of the interval ahead. Time is converted
into steps by the slower of two paces: the pace since the start, and the pace since the check before. The next check is
also no more steps ahead than were measured, because the first steps may be quick only while they fill a GPU's queue. So
a save is late only by the time by which the steps in an eighth of the interval become slower. A single rank checks at
every step.

The module starts no threads. All calls come from the training thread.
"""

from __future__ import annotations

import json
from datetime import timedelta

from lakeckpt.errors import ConfigError
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.waiting import Waiter

__all__ = ["Schedule", "interval_of"]

_DEFAULT = timedelta(minutes=10)
_CHECKS = 8
"""At least so many checks fall into the interval between two saves."""
_MOST_STEPS_BETWEEN_CHECKS = 10_000


def interval_of(every: object) -> int | timedelta:
    """Return ``every`` how many steps, or how much time, a user asked to save; by default every 10 minutes.
    `ConfigError` if it is neither."""
    if every is None:
        return _DEFAULT
    if type(every) is int and every > 0:
        return every
    if isinstance(every, timedelta) and every > timedelta(0):
        return every
    raise ConfigError(
        f"persist_every is a positive int (optimizer steps), a positive timedelta, or None (10 minutes), got {every!r}"
    )


class Schedule:
    """The schedule of one rank: a save ``every`` so many steps, or so much time.

    Every rank calls `is_due` once for every step, in order.
    """

    def __init__(self, every: int | timedelta, exchange: Exchange, waiter: Waiter) -> None:
        self._every = every
        self._exchange = exchange
        self._waiter = waiter
        self._checked: int | None = None  # the step of a check whose announcement this rank has not read
        self._save: int | None = None  # as announced last
        self._check = 0
        self._saved_s = 0.0
        self._begun = self._looked = (0, 0.0)  # (step, time) of the start, and of the check before

    def start(self, step: int) -> None:
        """Begin the schedule of a run that goes on after ``step``."""
        self._saved_s = self._waiter.now()
        self._begun = self._looked = (step, self._saved_s)
        self._announce(step)

    def is_due(self, step: int) -> bool:
        """Return whether a save falls at ``step``: the same answer on every rank."""
        if isinstance(self._every, int):
            return step % self._every == 0
        if self._checked is not None:
            self._save, self._check = json.loads(self._exchange.fetch(_note(self._checked)))
            self._checked = None
        due = self._save == step
        if due:
            self.begins()
        if self._check == step:
            self._announce(step)
        return due

    def begins(self) -> None:
        """Record that a save begins now. The caller calls this only for a save at a step at which none `is_due`."""
        self._saved_s = self._waiter.now()

    def _announce(self, step: int) -> None:
        if isinstance(self._every, int):
            return
        if self._exchange.rank:
            self._checked = step
            return
        self._save, self._check = self._next(step, self._every.total_seconds())
        if self._exchange.world_size > 1:
            self._exchange.publish(_note(step), json.dumps([self._save, self._check]).encode())

    def _next(self, step: int, interval_s: float) -> tuple[int | None, int]:
        """Return the steps of the next save and of the next check, on rank 0 at the cut of ``step``."""
        now_s = self._waiter.now()
        (first, first_s), (before, before_s) = self._begun, self._looked
        self._looked = (step, now_s)
        if step == first:  # no pace yet
            return None, step + 1
        since_start_s, lately_s = (now_s - first_s) / (step - first), (now_s - before_s) / (step - before)
        left_s = interval_s - (now_s - self._saved_s)
        if left_s <= min(since_start_s, lately_s):
            return step + 1, step + 1
        if self._exchange.world_size == 1:
            return None, step + 1
        most, ahead_s = min(step - first, _MOST_STEPS_BETWEEN_CHECKS), min(left_s / 2, interval_s / _CHECKS)
        step_s = max(since_start_s, lately_s)
        ahead = min(ahead_s / step_s, most) if step_s > 0 else most
        return None, step + max(int(ahead), 1)


def _note(step: int) -> str:
    return f"check/{step}"
