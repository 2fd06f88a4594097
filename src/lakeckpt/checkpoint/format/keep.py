"""This module defines the rule that selects which checkpoints keep their data, and reads the metrics that it compares.

`Keep` is the rule that a user asks for, and the manifest of each commit records it. The rule is applied by
`lakeckpt.checkpoint.persist.history`. The module never touches storage, never imports torch, and starts no threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lakeckpt.errors import ConfigError

__all__ = [
    "Keep",
    "checked_metric",
    "held_metric",
]

_NO_NUMBER = "metric is a number that says how good the state is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """The rule that selects the checkpoints that keep their data. A checkpoint stays if any of the three selects it.

    ``last``: the newest so many checkpoints, at least 1. ``every``: the first checkpoint of each so many optimizer
    steps (``every=1000``: the first from step 1000 on, the first from step 2000 on, …), for good. ``best``: the so many
    checkpoints with the lowest (or ``"highest"``) ``metric`` that was given to ``manager.step`` or ``save``; the newest
    of equal ones. A checkpoint without a metric, or with NaN, is never one of the best.
    """

    last: int = 3
    every: int | None = None
    best: int = 0
    best_is: Literal["lowest", "highest"] = "lowest"

    def __post_init__(self) -> None:
        if type(self.last) is not int or self.last < 1:
            raise ConfigError(f"keep is how many checkpoints keep their data, at least 1, got {self.last!r}")
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ConfigError(f"keep every how many steps is a positive int or None, got {self.every!r}")
        if type(self.best) is not int or self.best < 0:
            raise ConfigError(f"keep how many of the best is an int of at least 0, got {self.best!r}")
        if self.best_is not in ("lowest", "highest"):
            raise ConfigError(f"the best is the 'lowest' or the 'highest' metric, got {self.best_is!r}")

    @property
    def looks_back(self) -> bool:
        """True if the rule may keep checkpoints older than the newest ``last``."""
        return self.every is not None or bool(self.best)


def held_metric(metric: Any) -> Any:
    """Return the value to remember of a metric until `checked_metric` reads it. For a tensor this is a detached copy:
    nobody waits for a GPU, and no autograd graph is kept. `ConfigError` if the metric cannot be a number."""
    if not hasattr(metric, "detach"):
        return checked_metric(metric)
    if metric.numel() != 1 or metric.is_complex() or metric.is_meta:
        raise ConfigError(f"{_NO_NUMBER}, got {metric!r:.80}")
    return metric.detach().clone()


def checked_metric(metric: object) -> float | None:
    """Return a metric as a float, or None. `ConfigError` if it is not a number."""
    if metric is None:
        return None
    try:
        return float(metric)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"{_NO_NUMBER}, got {metric!r:.80}") from error
