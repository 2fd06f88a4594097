"""This module decides which checkpoints of a history keep their data: the newest, one of every so many steps, the best.

`Keep` is the rule that a user asks for, and the manifest of each commit records it. `kept_of` applies the rule to a
chain of checkpoints. The rule selects the same checkpoints after the others have been removed. So a removal that was
interrupted can be continued later, and is not mistaken for damage.

The module never touches storage, never imports torch, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Literal, Protocol, TypeVar

from lakeckpt.errors import ConfigError

__all__ = [
    "Commit",
    "Keep",
    "best_first",
    "checked_metric",
    "held_metric",
    "kept_ever_since",
    "kept_of",
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
        """Whether the rule may keep checkpoints older than the newest ``last``."""
        return self.every is not None or bool(self.best)


class Commit(Protocol):
    """The values of a commit that the rule needs: those of a `lakeckpt.checkpoint.format.manifest.Manifest`."""

    @property
    def slot(self) -> int:
        """Its slot in the log."""
        ...

    @property
    def parent(self) -> int | None:
        """The slot of the commit before."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def metric(self) -> float | None:
        """How good the state is; None if the user gave no metric."""
        ...

    @property
    def keep(self) -> Keep | None:
        """The rule by which data was removed after the commit; None if the manifest does not record it."""
        ...


_Commit = TypeVar("_Commit", bound=Commit)


def kept_of(chain: Sequence[Commit], keep: Keep) -> frozenset[int]:
    """Return the slots of the checkpoints in ``chain`` (the oldest first) that keep their data.

    >>> from types import SimpleNamespace as One
    >>> chain = [One(slot=n, step=40 * n, metric=abs(n - 2.0)) for n in range(1, 8)]
    >>> sorted(kept_of(chain, Keep(last=1, every=100, best=1)))
    [2, 3, 5, 7]
    """
    kept = {one.slot for one in chain[-keep.last :]}
    if keep.every is not None:
        firsts: dict[int, int] = {}
        for one in chain:
            if one.step >= keep.every:
                firsts.setdefault(one.step // keep.every, one.slot)
        kept |= set(firsts.values())
    return frozenset(kept | {one.slot for one in best_first(chain, keep.best_is)[: keep.best]})


def best_first(checkpoints: Iterable[_Commit], best_is: Literal["lowest", "highest"]) -> list[_Commit]:
    """Return the ``checkpoints`` that have a metric other than NaN, the best first; of equal ones the newest first."""
    sign = 1.0 if best_is == "lowest" else -1.0
    rated = [
        (sign * one.metric, -one.slot, one) for one in checkpoints if one.metric is not None and not isnan(one.metric)
    ]
    return [one for _, _, one in sorted(rated, key=lambda row: row[:2])]


def kept_ever_since(commits: Sequence[Commit], tip: int) -> frozenset[int]:
    """Return the slots of the history that ends with ``tip`` whose data no commit was allowed to remove.

    ``commits`` are all commits of a log, in its order. Each commit removed the data that its rule did not keep in its
    own history. This includes the commits of branches that were abandoned later.
    """
    by_slot = {one.slot: one for one in commits}
    kept: dict[int, frozenset[int]] = {}
    for one in commits:
        before = kept.get(one.parent, frozenset()) if one.parent is not None else frozenset()
        chain = [*(by_slot[slot] for slot in sorted(before)), one]
        kept[one.slot] = frozenset({one.slot}) if one.keep is None else kept_of(chain, one.keep)
    return frozenset(
        slot for slot in kept.get(tip, ()) if all(slot in some for other, some in kept.items() if other > slot)
    )


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
