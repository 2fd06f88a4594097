"""When is a checkpoint due?  By steps: a pure function that every rank computes. By time: rank 0 announces it ahead.

Rank 0 alone looks at its clock. At a *check* it announces two steps: the next save (or none), and the next check; so
the others read a handful of notes per save instead of one per step. The announcement made at cut c is read at the next
cut, so that a save is always announced a step ahead.

The next check lies halfway to when the save falls due, and no further than an eighth of the interval, by the slower of
two paces: since the start, and since the check before. No further, too, than as many steps as were measured: the first
ones may be quick only because they filled a GPU's queue. So a save is late by no more than what steps of an eighth of
the interval come to take longer meanwhile. A rank that is alone, and has nobody to tell, checks at every step.

How much time between saves is best follows from what a save costs and how often the job fails (`best_interval_s`):
seldom saves lose more work to a failure, frequent ones cost more without one.

No clock is read here: times are arguments.
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
"""So many checks at least fall into the interval between two saves."""
_DEFAULT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What rank 0 says at a check: a save falls at ``save`` (None: none before the next check), the next check at
    ``check``; both are steps after the one of this check."""

    save: int | None
    check: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What rank 0 has measured at a check."""

    steps_done: int
    """Optimizer steps since the start of this process's training, which took `elapsed_s`."""
    elapsed_s: float
    since_save_s: float
    """Since the last save began, or the start."""
    saves: int = 0
    """How many saves have begun."""
    cost_s: float | None = None
    """What a save costs the training loop, the median of the latest ones; None before the first."""
    took_s: float | None = None
    """How long it takes until a save is committed, likewise."""
    steps_lately: int = 0
    """Steps since the check before, which took `lately_s`; 0 where there was none."""
    lately_s: float = 0.0
    is_alone: bool = False
    """Whether there is no other rank to tell, so that a check costs next to nothing."""


class Policy(Protocol):
    """When saves fall. ``by_steps`` policies are asked by every rank at every step, others by rank 0 at checks only."""

    by_steps: bool

    def is_due(self, step: int) -> bool:
        """Whether a save falls at ``step`` (of a policy by steps): the same on every rank."""
        ...

    def announce(self, step: int, pace: Pace) -> Announcement:
        """What to announce at the cut of ``step``."""
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
    """Save as often as loses the least time to a job that fails about every ``seconds_between_failures`` seconds.

    The interval is `best_interval_s` of the cost that was measured, and never shorter than a save takes until it is
    committed. The first save falls at once when the pace is known: it measures the cost, and shows early that saves
    work.
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
        return Announcement(save=found.save, check=found.save + 1)  # when the cost of the first one is known

    def interval_s(self, pace: Pace) -> float:
        """The seconds between saves that follow from what was measured; 0 before the first save."""
        if pace.cost_s is None:
            return _DEFAULT_S if pace.saves else 0.0
        return max(best_interval_s(pace.cost_s, self.seconds_between_failures), pace.took_s or 0.0)


def best_interval_s(cost_s: float, between_failures_s: float) -> float:
    """The seconds of training between two saves that lose the least time in all, where a save costs ``cost_s`` and
    failures come at random, every ``between_failures_s`` in the mean.

    Daly's higher-order estimate (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", FGCS 22, 2006, equation 37), which for cheap saves is Young's: the root of 2 × cost × time between failures
    (J. W. Young, CACM 17, 1974), less the cost.

    >>> round(best_interval_s(10.0, 86400.0)), round(best_interval_s(0.02, 86400.0))
    (1308, 59)
    """
    if cost_s >= 2 * between_failures_s:
        return between_failures_s
    part = cost_s / (2 * between_failures_s)
    return sqrt(2 * cost_s * between_failures_s) * (1 + sqrt(part) / 3 + part / 9) - cost_s


def _at_interval(step: int, pace: Pace, interval_s: float) -> Announcement:
    """The announcement for a save ``interval_s`` after the last one."""
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
    """The seconds that a step took since the start, and since the check before."""
    whole_s = pace.elapsed_s / pace.steps_done
    return whole_s, pace.lately_s / pace.steps_lately if pace.steps_lately else whole_s


def policy_of(
    every: int | timedelta | None, policy: Policy | None = None, *, between_failures: timedelta | None = None
) -> Policy:
    """The policy that a user asked for: ``every`` so many steps or so much time, as ``between_failures`` (the mean time
    between failures) suggests, or ``policy``; else every 10 minutes. `ConfigError` for more than one of them."""
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
