"""Do the reports of all workers and ranks add up to one cut?  An algebra whose merge is associative and commutative.

A tally holds which ranks have reported, what they state (named facts, such as the step and the digest of the reader's
state) and which positions they claim to have consumed. Workers' tallies merge into their rank's, ranks' into their
node's, nodes' into the job's, in any order and grouping with one result; what does not add up raises by name:
a rank or a position reported twice as soon as the two meet, missing ranks, disagreement and gaps in `Tally.settle`.

Never communicates (`lakeckpt.tracking.exchange` does) and never lists single rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.receipts import Receipt
from lakeckpt.errors import DisagreementError, GapError, MissingRanksError, OverlapError, WireDamaged, WireError
from lakeckpt.wire.codec import dumps, loads
from lakeckpt.wire.varint import pack_intervals, unpack_intervals

__all__ = ["Tally", "name_ranks"]

Facts = Mapping[str, Mapping[str, Intervals]]
Claims = Mapping[tuple[int, int], Intervals]
_VERSION = (1, 0)
_MOST_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What some of the workers and ranks of a job report of one cut."""

    world_size: int
    """The number of ranks of the whole job."""
    reported: Intervals = field(default_factory=Intervals.empty)
    """The ranks whose report is in."""
    facts: Facts = field(default_factory=dict)
    """name of a fact → what is stated → the ranks that state it."""
    claims: Claims = field(default_factory=dict)
    """(epoch, rank) → the positions that the rank has consumed; never empty ones."""

    def __post_init__(self) -> None:
        ranks = [self.reported, *(who for values in self.facts.values() for who in values.values())]
        if self.world_size < 1 or any(one and one.stops[-1] > self.world_size for one in ranks):
            raise ValueError(f"a tally of {self.world_size} ranks names ranks {self.reported}")
        if any(not 0 <= rank < self.world_size or epoch < 0 for epoch, rank in self.claims):
            raise ValueError(f"a tally of {self.world_size} ranks holds claims of {sorted(self.claims)[:8]}")

    @classmethod
    def of_worker(cls, receipts: Iterable[Receipt], *, rank: int, world_size: int) -> Tally:
        """What one worker of ``rank`` delivered. Raises `OverlapError` where a position was delivered twice."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for receipt in receipts:
            for span in receipt.spans:
                spans.setdefault(span.epoch, []).append((span.start, span.stop))
        claims = {(epoch, rank): Intervals.of(pairs) for epoch, pairs in spans.items()}
        for epoch, pairs in spans.items():
            if claims[epoch, rank].size != sum(stop - start for start, stop in pairs):
                raise OverlapError(
                    f"epoch {epoch}: rank {rank} delivered positions twice, within {claims[epoch, rank]}"
                )
        return cls(world_size=world_size, claims=claims)

    @classmethod
    def of_rank(cls, rank: int, *, world_size: int, facts: Mapping[str, str], workers: Iterable[Tally] = ()) -> Tally:
        """The report of a whole rank: what it states, and what its ``workers`` delivered."""
        mine = Intervals.of([(rank, rank + 1)])
        stated = {name: {value: mine} for name, value in facts.items()}
        return cls(world_size=world_size, reported=mine, facts=stated).merge(*workers)

    def merge(self, *others: Tally) -> Tally:
        """The tally of all together. Raises `OverlapError` naming ranks and positions that were reported twice."""
        every = (self, *others)
        sizes = list(dict.fromkeys(one.world_size for one in every))
        if len(sizes) > 1:
            raise DisagreementError(f"reports of jobs of {sizes[0]} and {sizes[1]} ranks do not add up")
        reported = Intervals.empty()
        for one in every:
            twice = reported.intersection(one.reported)
            if twice:
                raise OverlapError(f"{name_ranks(twice)} reported twice for one cut")
            reported = reported.union(one.reported)
        said: dict[str, dict[str, list[Intervals]]] = {}
        for one in every:
            for name, values in one.facts.items():
                known = said.setdefault(name, {})
                for value, ranks in values.items():
                    known.setdefault(value, []).append(ranks)
        facts = {name: {value: _united(ranks) for value, ranks in values.items()} for name, values in said.items()}
        return Tally(
            world_size=self.world_size,
            reported=reported,
            facts=facts,
            claims=_joined_claims([one.claims for one in every]),
        )

    def consumed(self) -> dict[int, Intervals]:
        """epoch → the positions that all ranks together claim."""
        found: dict[int, Intervals] = {}
        for (epoch, _), positions in sorted(self.claims.items()):
            found[epoch] = found[epoch].union(positions) if epoch in found else positions
        return found

    def settle(self, *, agreed: Iterable[str] = (), expected: Mapping[int, Intervals] | None = None) -> None:
        """Raise unless the whole job has reported, agrees on the facts ``agreed``, and claims what was ``expected``.

        `MissingRanksError`, `DisagreementError` and `GapError` name the ranks or positions; claims beyond ``expected``
        (epoch → positions; None: not checked) raise `OverlapError`: they had been consumed before.
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
            raise DisagreementError(f"the ranks are not at one cut: {said}{more}")
        if expected is not None:
            self._settle_claims(expected)

    def _settle_claims(self, expected: Mapping[int, Intervals]) -> None:
        claimed = self.consumed()
        for epoch in sorted({*claimed, *expected}):
            have, want = claimed.get(epoch, Intervals.empty()), expected.get(epoch, Intervals.empty())
            gap, beyond = want.difference(have), have.difference(want)
            if gap:
                raise GapError(f"epoch {epoch}: {gap.size} positions were reported by no rank: {gap}")
            if beyond:
                ranks = [rank for (at, rank), rows in self.claims.items() if at == epoch and rows.intersection(beyond)]
                who = name_ranks(Intervals.of([(rank, rank + 1) for rank in ranks]))
                raise OverlapError(f"epoch {epoch}: {who} reported positions that had been consumed before: {beyond}")

    def describe(self, name: str) -> str:
        """Who states what of one fact, the fewest last: ``step: 8 on ranks 0-2; 7 on rank 3``."""
        values = sorted(self.facts[name].items(), key=lambda item: (-item[1].size, item[1].pairs()))
        said = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in values[:8])
        return f"{name}: {said}{' …' if len(values) > 8 else ''}"

    def to_bytes(self) -> bytes:
        """The tally as a message; equal tallies give equal bytes."""
        facts = {
            name: {value: pack_intervals(ranks.pairs()) for value, ranks in sorted(values.items())}
            for name, values in sorted(self.facts.items())
        }
        claims = [[*who, pack_intervals(rows.pairs())] for who, rows in sorted(self.claims.items())]
        plain = {
            "world_size": self.world_size,
            "reported": pack_intervals(self.reported.pairs()),
            "facts": facts,
            "claims": claims,
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
            reported=_unpacked(plain["reported"]),
            facts={
                name: {value: _unpacked(ranks) for value, ranks in values.items()}
                for name, values in plain["facts"].items()
            },
            claims={(epoch, rank): _unpacked(rows) for epoch, rank, rows in plain["claims"]},
        )


def _unpacked(data: bytes) -> Intervals:
    return Intervals.of(unpack_intervals(data))


def _united(sets: list[Intervals]) -> Intervals:
    return sets[0].union(*sets[1:]) if len(sets) > 1 else sets[0]


def _joined_claims(several: Sequence[Claims]) -> Claims:
    found: dict[tuple[int, int], list[Intervals]] = {}
    for claims in several:
        for who, rows in claims.items():
            found.setdefault(who, []).append(rows)
    for epoch in {epoch for epoch, _ in found}:
        every = [(rank, one) for (at, rank), rows in found.items() if at == epoch for one in rows]
        if len(every) > 1:
            union = Intervals.empty().union(*(rows for _, rows in every))
            if union.size != sum(rows.size for _, rows in every):
                raise OverlapError(_name_overlap(epoch, every))
    return {who: _united(rows) for who, rows in found.items()}


def _name_overlap(epoch: int, every: list[tuple[int, Intervals]]) -> str:
    for (rank, rows), (other, others) in combinations(every, 2):
        twice = rows.intersection(others)
        if twice:
            who = f"two workers of rank {rank}" if rank == other else f"ranks {min(rank, other)} and {max(rank, other)}"
            return f"epoch {epoch}: {who} both report {twice.size} positions: {twice}"
    raise AssertionError("claims overlap and no two of them do")


def name_ranks(ranks: Intervals) -> str:
    """Ranks in words.

    >>> name_ranks(Intervals.of([(0, 3), (7, 8)]))
    'ranks 0-2, 7'
    """
    parts = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in ranks]
    return f"rank{'' if ranks.size == 1 else 's'} {', '.join(parts)}"
