"""This module defines when checkpoints are due: by steps, by time, or by the rate of failures.

Every rank computes alone when a save by steps is due. Any other policy states an interval in seconds, and rank 0 alone
looks at its clock (`lakeckpt.checkpoint.schedule`). The best time between saves follows from the cost of a save
and the time between failures (`best_interval_s`): rare saves lose more work to a failure, and frequent saves cost more
without a failure.

The module reads no clock and starts no threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from math import isfinite, sqrt

from lakeckpt.errors import ConfigError

__all__ = ["ByFailureRate", "Costs", "EverySeconds", "EverySteps", "Policy", "best_interval_s", "policy_of"]

_DEFAULT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the latest saves have cost on rank 0."""

    saves: int = 0
    """How many saves have begun."""
    cost_s: float | None = None
    """Seconds for which a save blocks the training loop: the median of the latest saves; None before the first."""
    took_s: float | None = None
    """Seconds from the start of a save to its commit: the median of the latest saves; None before the first."""


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save after every ``steps``-th optimizer step."""

    steps: int

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise ConfigError(f"every how many steps to save is a positive int, got {self.steps!r}")


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Save about every ``seconds`` seconds of rank 0's clock, at the next step."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"every how many seconds to save is a positive number, got {self.seconds!r}")

    def interval_s(self, costs: Costs) -> float:
        """Return how many seconds lie between the begin of the last save and the begin of the next save."""
        return self.seconds


@dataclass(frozen=True, slots=True)
class ByFailureRate:
    """Save at the interval that loses the least time in a job that fails about every ``seconds_between_failures``.

    The interval is `best_interval_s` of the measured cost of a save, and never shorter than the time from the begin of
    a save to its commit. The first save falls as soon as the pace is known: it measures the cost, and shows early that
    saves work.
    """

    seconds_between_failures: float

    def __post_init__(self) -> None:
        if not (self.seconds_between_failures > 0 and isfinite(self.seconds_between_failures)):
            raise ConfigError(
                f"mean_time_between_failures is a positive time, got {self.seconds_between_failures!r} seconds"
            )

    def interval_s(self, costs: Costs) -> float:
        """See `EverySeconds`."""
        if costs.cost_s is None:
            return _DEFAULT_S if costs.saves else 0.0
        return max(best_interval_s(costs.cost_s, self.seconds_between_failures), costs.took_s or 0.0)


Policy = EverySteps | EverySeconds | ByFailureRate


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


def policy_of(every: int | timedelta | None, *, between_failures: timedelta | None = None) -> Policy:
    """Return the policy that a user asked for: a save ``every`` so many steps or so much time, or the interval that
    follows from ``between_failures`` (the mean time between failures); by default, a save every 10 minutes.
    `ConfigError` if both are given."""
    if every is not None and between_failures is not None:
        raise ConfigError("give one of persist_every= and mean_time_between_failures=, not two")
    if between_failures is not None:
        if not isinstance(between_failures, timedelta):
            raise ConfigError(f"mean_time_between_failures is a timedelta, got {between_failures!r}")
        return ByFailureRate(between_failures.total_seconds())
    if every is None:
        return EverySeconds(_DEFAULT_S)
    if isinstance(every, timedelta):
        return EverySeconds(every.total_seconds())
    return EverySteps(every)
