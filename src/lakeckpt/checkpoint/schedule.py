"""Does a save fall at this step?  The same answer on every rank, without a message at most steps.

A policy by steps is asked directly. For any other, rank 0 publishes an announcement at each check (see ``policy``), and
the other ranks fetch it at the cut after the check.
"""

from __future__ import annotations

import json

from lakeckpt.checkpoint.policy import Announcement, Policy
from lakeckpt.checkpoint.waiting import Waiter
from lakeckpt.tracking.exchange import Exchange

__all__ = ["Schedule"]


class Schedule:
    """Asked once for every step, in order, by every rank."""

    __slots__ = ("_ahead", "_begun_s", "_checked", "_exchange", "_first", "_policy", "_saved_s", "_waiter")

    def __init__(self, policy: Policy, exchange: Exchange, waiter: Waiter) -> None:
        self._policy = policy
        self._exchange = exchange
        self._waiter = waiter
        self._first = 0
        self._checked: int | None = None
        self._ahead = Announcement(save=None, check=0)
        self._begun_s = self._saved_s = 0.0

    def start(self, step: int) -> None:
        """The run goes on after ``step``."""
        self._first = step
        self._begun_s = self._saved_s = self._waiter.now()
        self._check(step)

    def is_due(self, step: int) -> bool:
        """Whether a save falls at ``step``."""
        if self._policy.by_steps:
            return self._policy.is_due(step)
        if self._checked is not None:
            plain = json.loads(self._exchange.fetch(f"check/{self._checked}"))
            self._ahead, self._checked = Announcement(save=plain["save"], check=plain["check"]), None
        due = self._ahead.save == step
        if due:
            self.saved()
        if self._ahead.check == step:
            self._check(step)
        return due

    def saved(self) -> None:
        """A save was made, or begins now."""
        self._saved_s = self._waiter.now()

    def _check(self, step: int) -> None:
        if self._policy.by_steps:
            return
        if self._exchange.rank == 0:
            now_s = self._waiter.now()
            self._ahead = self._policy.announce(
                step,
                elapsed_s=now_s - self._begun_s,
                since_save_s=now_s - self._saved_s,
                steps_done=step - self._first,
            )
            text = json.dumps({"save": self._ahead.save, "check": self._ahead.check})
            self._exchange.publish(f"check/{step}", text.encode())
        else:
            self._checked = step
