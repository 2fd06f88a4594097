"""This module decides on every rank whether a save falls at a step, without a message at most steps.

A policy by steps is asked directly. For any other policy, rank 0 publishes an announcement at each check (see
``policy``), and the other ranks fetch the announcement at the cut after the check. Rank 0 measures the cost of saves.

The module starts no threads. All calls come from the training thread.
"""

from __future__ import annotations

import json
from collections import deque
from statistics import median

from lakeckpt.checkpoint.policy import Announcement, Pace, Policy
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.waiting import Waiter

__all__ = ["Schedule"]

_COSTS = 5
"""The cost of a save is the median of so many of the latest saves."""


class Schedule:
    """The schedule of one rank. Every rank calls `is_due` once for every step, in order.

    ``name`` keeps the announcements of several schedules apart.
    """

    __slots__ = (
        "_ahead",
        "_begun_s",
        "_checked",
        "_costs",
        "_exchange",
        "_first",
        "_looked",
        "_name",
        "_policy",
        "_saved_s",
        "_saves",
        "_took",
        "_waiter",
    )

    def __init__(self, policy: Policy, exchange: Exchange, waiter: Waiter, *, name: str = "persist") -> None:
        self._policy = policy
        self._exchange = exchange
        self._waiter = waiter
        self._name = name
        self._first = self._saves = 0
        self._checked: int | None = None
        self._ahead = Announcement(save=None, check=0)
        self._begun_s = self._saved_s = 0.0
        self._looked = (0, 0.0)
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._took: deque[float] = deque(maxlen=_COSTS)

    def start(self, step: int) -> None:
        """Begin the schedule of a run that goes on after ``step``."""
        self._first = step
        self._begun_s = self._saved_s = self._waiter.now()
        self._looked = (step, self._begun_s)
        self._check(step)

    def is_due(self, step: int) -> bool:
        """Return whether a save falls at ``step``: the same answer on every rank."""
        if self._policy.by_steps:
            return self._policy.is_due(step)
        if self._checked is not None:
            plain = json.loads(self._exchange.fetch(self._note(self._checked)))
            self._ahead, self._checked = Announcement(save=plain["save"], check=plain["check"]), None
        due = self._ahead.save == step
        if due:
            self.begins()
        if self._ahead.check == step:
            self._check(step)
        return due

    def begins(self) -> None:
        """Record that a save begins now. The caller calls this only for a save at a step at which none `is_due`."""
        self._saved_s = self._waiter.now()
        self._saves += 1

    def saved(self, *, cost_s: float | None = None, took_s: float | None = None) -> None:
        """Record that a save blocked the loop for ``cost_s``, or was committed ``took_s`` after it had begun."""
        if cost_s is not None:
            self._costs.append(cost_s)
        if took_s is not None:
            self._took.append(took_s)

    def _check(self, step: int) -> None:
        if self._policy.by_steps:
            return
        if self._exchange.rank == 0:
            self._ahead = self._policy.announce(step, self._pace(step))
            if self._exchange.world_size == 1:
                return
            text = json.dumps({"save": self._ahead.save, "check": self._ahead.check})
            self._exchange.publish(self._note(step), text.encode())
        else:
            self._checked = step

    def _pace(self, step: int) -> Pace:
        now_s = self._waiter.now()
        (before, before_s), self._looked = self._looked, (step, now_s)
        return Pace(
            steps_done=step - self._first,
            elapsed_s=now_s - self._begun_s,
            since_save_s=now_s - self._saved_s,
            saves=self._saves,
            cost_s=median(self._costs) if self._costs else None,
            took_s=median(self._took) if self._took else None,
            steps_lately=step - before,
            lately_s=now_s - before_s,
            is_alone=self._exchange.world_size == 1,
        )

    def _note(self, step: int) -> str:
        return f"check/{self._name}/{step}"
