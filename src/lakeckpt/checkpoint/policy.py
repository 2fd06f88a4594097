"""When is a checkpoint due?  By steps: a pure function that every rank computes. By time: rank 0 announces it ahead.

Rank 0 alone looks at its clock. At a *check* it announces two steps: the next save (or none), and the next check, which
lies about halfway to when the save falls due by the pace measured so far; so the others read a handful of notes per
save instead of one per step. The announcement made at cut c is read at the next cut, so that a save is always
announced a step ahead.

No clock is read here: times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from lakeckpt.errors import ConfigError

__all__ = ["Announcement", "EverySeconds", "EverySteps", "Policy", "policy_of"]

_MOST_STEPS_BETWEEN_CHECKS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What rank 0 says at a check: a save falls at ``save`` (None: none before the next check), the next check at
    ``check``; both are steps after the one of this check."""

    save: int | None
    check: int


class Policy(Protocol):
    """When saves fall. ``by_steps`` policies are asked by every rank at every step, others by rank 0 at checks only."""

    by_steps: bool

    def is_due(self, step: int) -> bool:
        """Whether a save falls at ``step`` (of a policy by steps): the same on every rank."""
        ...

    def announce(self, step: int, *, elapsed_s: float, since_save_s: float, steps_done: int) -> Announcement:
        """What to announce at the cut of ``step``: ``steps_done`` steps took ``elapsed_s``, and the last save (or the
        start) was ``since_save_s`` ago."""
        ...


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save after every ``steps``-th optimizer step."""

    steps: int
    by_steps = True

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise ConfigError(f"every how many steps to save is a positive int, got {self.steps!r}")

    def is_due(self, step: int) -> bool:
        """See `Policy`."""
        return step % self.steps == 0

    def announce(self, step: int, *, elapsed_s: float, since_save_s: float, steps_done: int) -> Announcement:
        """See `Policy`."""
        due = (step // self.steps + 1) * self.steps
        return Announcement(save=due, check=due)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Save about every ``seconds`` seconds of rank 0's clock, at the next step."""

    seconds: float
    by_steps = False

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"every how many seconds to save is a positive number, got {self.seconds!r}")

    def is_due(self, step: int) -> bool:
        """Never by the step alone."""
        return False

    def announce(self, step: int, *, elapsed_s: float, since_save_s: float, steps_done: int) -> Announcement:
        """See `Policy`."""
        if not steps_done:  # no pace yet
            return Announcement(save=None, check=step + 1)
        left_s, pace_s = self.seconds - since_save_s, elapsed_s / steps_done
        if left_s <= pace_s:
            return Announcement(save=step + 1, check=step + 1)
        ahead = int(left_s / (2 * pace_s)) if pace_s > 0 else _MOST_STEPS_BETWEEN_CHECKS
        return Announcement(save=None, check=step + min(max(ahead, 1), _MOST_STEPS_BETWEEN_CHECKS))


def policy_of(every: int | timedelta | None, policy: Policy | None) -> Policy:
    """The policy that a user asked for: ``every`` so many steps or so much time, or ``policy``; else every 10
    minutes."""
    if every is not None and policy is not None:
        raise ConfigError("give either every= or policy=, not both")
    if policy is not None:
        if not (callable(getattr(policy, "is_due", None)) and callable(getattr(policy, "announce", None))):
            raise ConfigError(f"policy is an object with by_steps, is_due and announce, got {policy!r}: see every=")
        return policy
    if every is None:
        return EverySeconds(600.0)
    if isinstance(every, timedelta):
        return EverySeconds(every.total_seconds())
    return EverySteps(every)
