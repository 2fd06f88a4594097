"""This module adds up the reports of ranks of one cut, with a merge that is associative and commutative.

A `Tally` holds which ranks have reported and what they state: named facts, such as the step and the digest of the
reader's state. Tallies merge in any order and grouping with one result. `Tally.merge` raises where a rank reports
twice, `Tally.settle` where ranks are missing or disagree; both name the ranks.

It never communicates (`lakeckpt.tracking.exchange` does).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import MissingRanksError, TrackingError, WireDamaged, WireError
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Tally", "name_ranks"]

Facts = Mapping[str, Mapping[str, Intervals]]
_VERSION = (1, 0)
_MOST_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What some of the ranks of a job report of one cut."""

    world_size: int
    """The number of ranks of the whole job."""
    reported: Intervals = field(default_factory=Intervals.empty)
    """The ranks whose report is in."""
    facts: Facts = field(default_factory=dict)
    """name of a fact → what is stated → the ranks that state it."""

    def __post_init__(self) -> None:
        ranks = [self.reported, *(who for values in self.facts.values() for who in values.values())]
        if self.world_size < 1 or any(one and one.stops[-1] > self.world_size for one in ranks):
            raise ValueError(f"a tally of {self.world_size} ranks names ranks {self.reported}")

    @classmethod
    def of_rank(cls, rank: int, *, world_size: int, facts: Mapping[str, str]) -> Tally:
        """Return the report of one rank."""
        mine = Intervals.of([(rank, rank + 1)])
        stated = {name: {value: mine} for name, value in facts.items()}
        return cls(world_size=world_size, reported=mine, facts=stated)

    def merge(self, *others: Tally) -> Tally:
        """Return the tally of all together. Raises `TrackingError` naming the ranks that reported twice."""
        every = (self, *others)
        sizes = list(dict.fromkeys(one.world_size for one in every))
        if len(sizes) > 1:
            raise TrackingError(f"reports of jobs of {sizes[0]} and {sizes[1]} ranks do not add up")
        reported = Intervals.empty()
        for one in every:
            twice = reported.intersection(one.reported)
            if twice:
                raise TrackingError(f"{name_ranks(twice)} reported twice for one cut")
            reported = reported.union(one.reported)
        said: dict[str, dict[str, list[Intervals]]] = {}
        for one in every:
            for name, values in one.facts.items():
                known = said.setdefault(name, {})
                for value, ranks in values.items():
                    known.setdefault(value, []).append(ranks)
        facts = {name: {value: _united(ranks) for value, ranks in values.items()} for name, values in said.items()}
        return Tally(world_size=self.world_size, reported=reported, facts=facts)

    def settle(self, *, agreed: Iterable[str] = ()) -> None:
        """Raise unless the whole job has reported and agrees on the facts ``agreed``.

        `MissingRanksError` and `TrackingError` name the ranks.
        """
        missing = self.reported.complement(self.world_size)
        if missing:
            raise MissingRanksError(
                f"{name_ranks(missing)} of {self.world_size} did not report for this cut: see their logs; "
                "nothing was committed"
            )
        differ = [name for name in agreed if len(self.facts.get(name, {})) > 1]
        if differ:
            said = ", and ".join(map(self.describe, differ[:_MOST_NAMED]))
            more = f", and {len(differ) - _MOST_NAMED} more" if len(differ) > _MOST_NAMED else ""
            raise TrackingError(f"the ranks are not at one cut: {said}{more}")

    def describe(self, name: str) -> str:
        """Who states what of one fact, the fewest last: ``step: 8 on ranks 0-2; 7 on rank 3``."""
        values = sorted(self.facts[name].items(), key=lambda item: (-item[1].size, item[1].pairs()))
        said = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in values[:8])
        return f"{name}: {said}{' …' if len(values) > 8 else ''}"

    def to_bytes(self) -> bytes:
        """The tally as a message; equal tallies give equal bytes."""
        facts = {
            name: {value: ranks.to_plain() for value, ranks in sorted(values.items())}
            for name, values in sorted(self.facts.items())
        }
        plain = {
            "world_size": self.world_size,
            "reported": self.reported.to_plain(),
            "facts": facts,
        }
        return dumps(plain, kind="tally", version=_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> Tally:
        """The tally that `to_bytes` made ``data`` of; `WireError` for damage, and for a document of anything else."""
        plain = loads(data, kind="tally", supported=_VERSION).value
        try:
            return cls._from_plain(plain)
        except WireError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WireDamaged(f"this document is not of a tally: {error!r}") from error

    @classmethod
    def _from_plain(cls, plain: dict[str, Any]) -> Tally:
        return cls(
            world_size=plain["world_size"],
            reported=Intervals.from_plain(plain["reported"]),
            facts={
                name: {value: Intervals.from_plain(ranks) for value, ranks in values.items()}
                for name, values in plain["facts"].items()
            },
        )


def _united(sets: list[Intervals]) -> Intervals:
    return sets[0].union(*sets[1:]) if len(sets) > 1 else sets[0]


def name_ranks(ranks: Intervals) -> str:
    """Ranks in words.

    >>> name_ranks(Intervals.of([(0, 3), (7, 8)]))
    'ranks 0-2, 7'
    """
    parts = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in ranks]
    return f"rank{'' if ranks.size == 1 else 's'} {', '.join(parts)}"
