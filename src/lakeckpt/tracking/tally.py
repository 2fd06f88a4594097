"""This module adds up what the ranks of a job state in one round: for each fact, which rank states which value.

A `Tally` is made of the facts of all ranks at once. It never communicates (`lakeckpt.tracking.rounds` does), imports
without torch and starts no threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import TrackingError

__all__ = ["Tally", "name_ranks", "ranks_of"]

_MOST_NAMED = 6
_MOST_VALUES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The facts that the ranks of a job state."""

    facts: Mapping[str, Mapping[str, Intervals]]
    """name of a fact → its values → the ranks that state the value."""

    @classmethod
    def of(cls, facts_of_ranks: Sequence[Mapping[str, str]]) -> Tally:
        """Return the tally of the facts (name → value) of rank 0, of rank 1, and so on."""
        stated: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, facts in enumerate(facts_of_ranks):
            for name, value in facts.items():
                stated[name][value].append(rank)
        return cls(
            facts={name: {value: ranks_of(ranks) for value, ranks in values.items()} for name, values in stated.items()}
        )

    def value(self, name: str) -> str:
        """Return the value of a fact that one rank, or all ranks alike, have stated."""
        return next(iter(self.facts[name]))

    def require_agreement(self, names: Iterable[str]) -> None:
        """Raise `TrackingError`, which names the ranks, if the ranks state different values of a fact in
        ``names``."""
        differ = [name for name in names if len(self.facts.get(name, {})) > 1]
        if differ:
            described = ", and ".join(map(self.describe, differ[:_MOST_NAMED]))
            more = f", and {len(differ) - _MOST_NAMED} more" if len(differ) > _MOST_NAMED else ""
            raise TrackingError(f"the ranks are not at one cut: {described}{more}")

    def describe(self, name: str) -> str:
        """Return which ranks state which values of a fact, the rarest value last: ``step: 8 on ranks 0-2; 7 on rank
        3``."""
        values = sorted(self.facts[name].items(), key=lambda item: (-item[1].size, item[1].pairs()))
        described = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in values[:_MOST_VALUES])
        return f"{name}: {described}{' …' if len(values) > _MOST_VALUES else ''}"


def ranks_of(ranks: Iterable[int]) -> Intervals:
    """Return ``ranks`` as a set."""
    return Intervals.of([(rank, rank + 1) for rank in ranks])


def name_ranks(ranks: Intervals) -> str:
    """Return the names of ranks for a message.

    >>> name_ranks(Intervals.of([(0, 3), (7, 8)]))
    'ranks 0-2, 7'
    """
    parts = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in ranks]
    return f"rank{'' if ranks.size == 1 else 's'} {', '.join(parts)}"
