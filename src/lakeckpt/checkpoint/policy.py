"""This module decides when checkpoints are due: by steps, by time, or by the rate of failures.

A policy by steps is a pure function that every rank computes. For all other policies rank 0 alone looks at its clock.
At a *check*, rank 0 announces two steps: the next save (or none), and the next check. So the other ranks read a few
announcements for each save instead of one for each step. They read the announcement of cut c at the next cut, so a save
is always announced one step ahead.

The next check lies halfway to the time of the next save, but at most an eighth of the interval ahead. Time is converted
into steps by the slower of two paces: the pace since the start, and the pace since the check before. The next check is
also no more steps ahead than were measured, because the first steps may be quick only while they fill a GPU's queue. So
a save is late only by the time by which the steps in an eighth of the interval become slower. A single rank checks at
every step.

The best time between saves follows from the cost of a save and the time between failures (`best_interval_s`): rare
saves lose more work to a failure, and frequent saves cost more without a failure.

The module reads no clock: times are arguments. It starts no threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from math import isfinite, sqrt
from typing import Protocol

from lakeckpt.errors import ConfigError

__all__ = [
    "Announcement",
    "ByFailureRate",
    "EverySeconds",
    "EverySteps",
    "Pace",
    "Policy",
    "best_interval_s",
    "policy_of",
]

_MOST_STEPS_BETWEEN_CHECKS = 10_000
_CHECKS = 8
"""At least so many checks fall into the interval between two saves."""
_DEFAULT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The announcement of rank 0 at a check: the next save falls at step ``save`` (None: no save before the next
    check), and the next check at step ``check``. Both steps come after the step of this check."""

    save: int | None
    check: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The measurements of rank 0 at a check."""

    steps_done: int
    """Optimizer steps since the start of this process's training, which took `elapsed_s`."""
    elapsed_s: float
    since_save_s: float
    """Seconds since the last save began; before the first save, since the start."""
    saves: int = 0
    """How many saves have begun."""
    cost_s: float | None = None
    """Seconds for which a save blocks the training loop: the median of the latest saves; None before the first."""
    took_s: float | None = None
    """Seconds from the start of a save to its commit: the median of the latest saves; None before the first."""
    steps_lately: int = 0
    """Steps since the check before, which took `lately_s`; 0 at the first check."""
    lately_s: float = 0.0
    is_alone: bool = False
    """Whether there is no other rank, so that a check costs almost nothing."""


class Policy(Protocol):
    """Decides when saves fall. Every rank asks a ``by_steps`` policy at every step. Rank 0 alone asks any other policy,
    and only at checks."""

    by_steps: bool

    def is_due(self, step: int) -> bool:
        """Return whether a save falls at ``step``, for a policy by steps: the same answer on every rank."""
        ...

    def announce(self, step: int, pace: Pace) -> Announcement:
        """Return the announcement at the cut of ``step``."""
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

    def announce(self, step: int, pace: Pace) -> Announcement:
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

    def announce(self, step: int, pace: Pace) -> Announcement:
        """See `Policy`."""
        return _at_interval(step, pace, self.seconds)


@dataclass(frozen=True, slots=True)
class ByFailureRate:
    """Save at the interval that loses the least time in a job that fails about every ``seconds_between_failures``.

    The interval is `best_interval_s` of the measured cost of a save, and never shorter than the time from the begin of
    a save to its commit. The first save falls as soon as the pace is known: it measures the cost, and shows early that
    saves work.
    """

    seconds_between_failures: float
    by_steps = False

    def __post_init__(self) -> None:
        if not (self.seconds_between_failures > 0 and isfinite(self.seconds_between_failures)):
            raise ConfigError(
                f"mean_time_between_failures is a positive time, got {self.seconds_between_failures!r} seconds"
            )

    def is_due(self, step: int) -> bool:
        """Never by the step alone."""
        return False

    def announce(self, step: int, pace: Pace) -> Announcement:
        """See `Policy`."""
        found = _at_interval(step, pace, self.interval_s(pace))
        if found.save is None or pace.saves:
            return found
        return Announcement(save=found.save, check=found.save + 1)  # the cost of the first save is known then

    def interval_s(self, pace: Pace) -> float:
        """Return the seconds between saves that follow from the measurements; 0 before the first save."""
        if pace.cost_s is None:
            return _DEFAULT_S if pace.saves else 0.0
        return max(best_interval_s(pace.cost_s, self.seconds_between_failures), pace.took_s or 0.0)


def best_interval_s(cost_s: float, between_failures_s: float) -> float:
    """Return the seconds of training between two saves that lose the least time in all.

    A save costs ``cost_s``, and failures come at random, every ``between_failures_s`` seconds in the mean. This is
    Daly's higher-order estimate (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", FGCS 22, 2006, equation 37). For cheap saves it is Young's estimate: the root of 2 × cost × time between
    failures (J. W. Young, CACM 17, 1974), less the cost.

    >>> round(best_interval_s(10.0, 86400.0)), round(best_interval_s(0.02, 86400.0))
    (1308, 59)
    """
    if cost_s >= 2 * between_failures_s:
        return between_failures_s
    part = cost_s / (2 * between_failures_s)
    return sqrt(2 * cost_s * between_failures_s) * (1 + sqrt(part) / 3 + part / 9) - cost_s


def _at_interval(step: int, pace: Pace, interval_s: float) -> Announcement:
    """Return the announcement for a save ``interval_s`` after the last save."""
    if not pace.steps_done:  # no pace yet
        return Announcement(save=None, check=step + 1)
    left_s, step_s = interval_s - pace.since_save_s, _paces_s(pace)
    if left_s <= min(step_s):
        return Announcement(save=step + 1, check=step + 1)
    if pace.is_alone:
        return Announcement(save=None, check=step + 1)
    most, ahead_s = min(pace.steps_done, _MOST_STEPS_BETWEEN_CHECKS), min(left_s / 2, interval_s / _CHECKS)
    ahead = min(ahead_s / max(step_s), most) if max(step_s) > 0 else most
    return Announcement(save=None, check=step + max(int(ahead), 1))


def _paces_s(pace: Pace) -> tuple[float, float]:
    """Return the seconds that a step took since the start, and since the check before."""
    whole_s = pace.elapsed_s / pace.steps_done
    return whole_s, pace.lately_s / pace.steps_lately if pace.steps_lately else whole_s


def policy_of(
    every: int | timedelta | None, policy: Policy | None = None, *, between_failures: timedelta | None = None
) -> Policy:
    """Return the policy that a user asked for: a save ``every`` so many steps or so much time, the interval that
    follows from ``between_failures`` (the mean time between failures), or ``policy`` itself; by default, a save every
    10 minutes. `ConfigError` if more than one of them is given."""
    if (every is not None) + (policy is not None) + (between_failures is not None) > 1:
        raise ConfigError("give one of persist_every=, mean_time_between_failures= and policy=, not two")
    if policy is not None:
        if not (callable(getattr(policy, "is_due", None)) and callable(getattr(policy, "announce", None))):
            raise ConfigError(f"policy is an object with by_steps, is_due and announce, got {policy!r}")
        return policy
    if between_failures is not None:
        if not isinstance(between_failures, timedelta):
            raise ConfigError(f"mean_time_between_failures is a timedelta, got {between_failures!r}")
        return ByFailureRate(between_failures.total_seconds())
    if every is None:
        return EverySeconds(_DEFAULT_S)
    if isinstance(every, timedelta):
        return EverySeconds(every.total_seconds())
    return EverySteps(every)
