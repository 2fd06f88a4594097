"""This module decides on every rank whether a save falls at a step, without a message at most steps.

Rank 0 alone decides, at *checks*. At a check it announces two steps: the next save (or none), and the next check. The
other ranks read the announcement of cut c at the next cut, so that a save is always announced one step ahead, and a few
announcements suffice for each save. Each save is a check, after it was made: if it has failed, rank 0 waits by its
clock as long as the `Outage` says. If saves fall every so many steps, there are no other checks while saves succeed.

By the clock, the next check lies halfway to the time of the next save, but at most an eighth of the interval ahead.
Time is converted into steps by the slower of two paces: the pace since the start, and the pace since the check before.
The next check is also no more steps ahead than were measured, because the first steps may be quick only while they fill
a GPU's queue. So a save is late only by the time by which the steps in an eighth of the interval become slower. If
there is one rank, it checks at every step.

The module starts no threads. All calls come from the training thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from lakeckpt.checkpoint.outage import Outage
from lakeckpt.errors import ConfigError, MissingRanksError
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
    """The schedule of one rank: a save ``every`` so many steps, or so much time, and later in an ``outage``.

    Every rank calls `is_due` once for every step, in order, within `passing`.
    """

    def __init__(self, every: int | timedelta, exchange: Exchange, waiter: Waiter, outage: Outage) -> None:
        self._every, self._outage = every, outage
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
        if self._checked is not None:
            self._save, self._check = json.loads(self._announced(_note(self._checked)))
            self._checked = None
        due = self._save == step
        if due:
            self.begins()
        return due

    @contextmanager
    def passing(self, step: int) -> Iterator[None]:
        """Announce at the end of the block, in which the save of ``step`` is made, when the next one falls."""
        try:
            yield
        finally:
            if self._check == step:
                self._announce(step)

    def begins(self) -> None:
        """Record that a save begins now. The caller calls this only for a save at a step at which none `is_due`."""
        self._saved_s = self._waiter.now()

    def _announced(self, note: str) -> bytes:
        """Return a note of rank 0. Raises why a rank has stopped, if rank 0 leaves none."""
        try:
            return self._exchange.fetch(note)
        except MissingRanksError:
            self._exchange.obstacles.refuse(float("inf"))
            raise

    def _announce(self, step: int) -> None:
        if self._exchange.rank:
            self._checked = step
            return
        self._save, self._check = self._next(step)
        if self._exchange.world_size > 1:
            self._exchange.publish(_note(step), json.dumps([self._save, self._check]).encode())

    def _next(self, step: int) -> tuple[int | None, int]:
        """Return the steps of the next save and of the next check, on rank 0 at the cut of ``step``."""
        now_s, retry_s = self._waiter.now(), self._outage.left_s(self._saved_s)
        (first, first_s), (before, before_s) = self._begun, self._looked
        self._looked = (step, now_s)
        if retry_s is not None:
            left_s = interval_s = retry_s
        elif isinstance(self._every, int):
            save = (step // self._every + 1) * self._every
            return save, save
        else:
            interval_s = self._every.total_seconds()
            left_s = interval_s - (now_s - self._saved_s)
        if step == first:  # no pace yet
            return None, step + 1
        since_start_s, lately_s = (now_s - first_s) / (step - first), (now_s - before_s) / (step - before)
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
