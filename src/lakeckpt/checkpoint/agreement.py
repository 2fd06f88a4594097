"""At this cut, do all ranks say the same, and which rank writes what?

One exchange settles the facts (step, attempt, the readers' states: they must be equal on all ranks) and whether all
units are the same everywhere, by a single digest. Only if they are not, a second exchange finds among which units the
differences are, and a third who holds which content of these. Every rank then knows, without a further word, the same
shares: a unit is written once per content, by one of the ranks that hold it, spread by size.

Units that no other rank can have (parts of tensors that a mesh divides among all its ranks) are left out of this: a
rank says their digest and size, together. A thousand ranks would tell one another of a million otherwise.

Never touches storage. Imports without torch.
"""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lakeckpt.checkpoint.digests import short_digest
from lakeckpt.checkpoint.fields import Ranks, holds, ranges
from lakeckpt.checkpoint.parts import Outline
from lakeckpt.core.intervals import Intervals
from lakeckpt.tracking.tally import Tally

__all__ = ["Agreement", "Merge", "Talk", "Unit", "agree", "digest_of", "everyone"]

_UNITS = "the units"
_OWN = "the units of one rank"
_PREFIX = "unit "
_TOLD = "told "
_BUCKETS = 256

Held = Mapping[tuple[str, bytes], tuple[int, Intervals]]
"""(unit, digest) → its size in bytes, and the ranks that hold it."""


class Talk(Protocol):
    """What is needed of a `lakeckpt.tracking.exchange.Exchange` here."""

    rank: int
    world_size: int

    def combine(self, data: bytes, merge: Merge, /) -> bytes:
        """The merge of the data of all ranks."""
        ...


class Merge(Protocol):
    """An associative, commutative merge of messages."""

    def __call__(self, messages: Sequence[bytes], /) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A tensor or a tree, by the digest and size of its content on this rank."""

    name: str
    digest: bytes
    size_bytes: int
    own: bool = False
    """Whether no other rank can have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks know after the exchange."""

    cut: bytes
    """Digest of all that was agreed on."""
    told: Mapping[str, str]
    """What rank 0 told all."""
    owners: Mapping[tuple[str, bytes], tuple[int, Ranks]]
    """(unit, digest) → the rank that writes it, and the ranks that hold it: without those that no other can have."""
    own: Sequence[str]
    """`digest_of` those of each rank."""
    mine: frozenset[tuple[str, bytes]]
    """Those of this rank."""

    def share(self, rank: int) -> dict[tuple[str, bytes], Ranks]:
        """What ``rank`` writes of what others could have, with the ranks that hold it."""
        return {what: ranks for what, (owner, ranks) in self.owners.items() if owner == rank}

    def outline(self, rank: int) -> Outline:
        """Of what the state of ``rank``, which is this one, consists."""
        contents = Counter(name for name, _ in self.owners)
        held = [(name, owner) for (name, _), (owner, ranks) in self.owners.items() if holds(ranks, rank)]
        return Outline(
            units=len(held) + len(self.mine),
            elsewhere=ranges({owner for _, owner in held} - {rank}),
            different=tuple(sorted(name for name, _ in held if contents[name] > 1)),
        )


def _merge(messages: Sequence[bytes]) -> bytes:
    first, *others = [Tally.from_bytes(message) for message in messages]
    return first.merge(*others).to_bytes()


def everyone(talk: Talk, facts: Mapping[str, str]) -> Tally:
    """The facts of all ranks; `MissingRanksError` where one does not answer."""
    mine = Tally.of_rank(talk.rank, world_size=talk.world_size, facts=facts)
    tally = Tally.from_bytes(talk.combine(mine.to_bytes(), _merge))
    tally.settle()
    return tally


def agree(talk: Talk, *, facts: Mapping[str, str], units: Sequence[Unit], tell: Mapping[str, str]) -> Agreement:
    """Settle the ``facts`` and the shares. ``tell`` is what this rank tells all others: rank 0 only.

    Raises `DisagreementError` naming the ranks and the fact, `MissingRanksError` naming the ranks.
    """
    ordered = sorted((unit for unit in units if not unit.own), key=lambda unit: unit.name)
    mine = {(unit.name, unit.digest): unit.size_bytes for unit in units if unit.own}
    told = {f"{_TOLD}{name}": value for name, value in tell.items()}
    own = f"{digest_of(mine)}:{sum(mine.values())}"
    tally = everyone(talk, {**facts, _UNITS: _digest(ordered), _OWN: own, **told})
    tally.settle(agreed=sorted(facts))
    held = _held(talk, ordered, alike=len(tally.facts[_UNITS]) == 1)
    texts = [f"{name}={value}" for name, value in sorted(facts.items())]
    contents = [part for name, digest in sorted(held) for part in (name.encode(), digest)]
    every = [""] * talk.world_size
    for text, ranks in tally.facts[_OWN].items():
        for start, stop in ranks:
            every[start:stop] = [text] * (stop - start)
    if any(not text.endswith(":0") for text in every):
        texts += every
    digests, sizes = zip(*(text.split(":") for text in every), strict=True)
    return Agreement(
        cut=short_digest(*(text.encode() for text in texts), *contents),
        told={
            name.removeprefix(_TOLD): next(iter(values))
            for name, values in tally.facts.items()
            if name.startswith(_TOLD)
        },
        owners=_spread(held, [int(size) for size in sizes]),
        own=digests,
        mine=frozenset(mine),
    )


def digest_of(units: Iterable[tuple[str, bytes]]) -> str:
    """One digest of units, each a name and a digest, in any order."""
    return short_digest(*(part for name, digest in sorted(units) for part in (name.encode(), digest))).hex()


def _digest(units: Sequence[Unit]) -> str:
    return digest_of((unit.name, unit.digest) for unit in units)


def _held(talk: Talk, units: Sequence[Unit], *, alike: bool) -> Held:
    """Who holds which content: known without a word of all units that are ``alike``, asked of the others."""
    differ: list[Unit] = []
    if not alike:
        buckets: dict[str, list[Unit]] = {f"{number:02x}": [] for number in range(_BUCKETS)}
        for unit in units:
            buckets[f"{zlib.crc32(unit.name.encode()) % _BUCKETS:02x}"].append(unit)
        tally = everyone(talk, {number: _digest(bucket) for number, bucket in buckets.items()})
        differ = [unit for number, bucket in buckets.items() if len(tally.facts[number]) > 1 for unit in bucket]
    asked = {unit.name for unit in differ}
    whole = Intervals.whole(talk.world_size)
    held = {(unit.name, unit.digest): (unit.size_bytes, whole) for unit in units if unit.name not in asked}
    if not alike:
        tally = everyone(talk, {_PREFIX + unit.name: f"{unit.digest.hex()}:{unit.size_bytes}" for unit in differ})
        for name, values in tally.facts.items():
            for value, ranks in values.items():
                digest, _, size = value.partition(":")
                held[name.removeprefix(_PREFIX), bytes.fromhex(digest)] = (int(size), ranks)
    return held


def _spread(held: Held, loads: list[int]) -> dict[tuple[str, bytes], tuple[int, Ranks]]:
    """Give each content to the least loaded of the ranks that hold it: the largest first, ties to the lowest rank.

    ``loads``: the bytes that each rank writes anyway."""
    world_size = len(loads)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = {}
    for what, (size, ranks) in sorted(held.items(), key=lambda item: (-item[1][0], item[0])):
        if ranks.size == world_size:
            load, owner = heapq.heappop(heap)
            while load != loads[owner]:  # an old entry: the rank has been given more since
                load, owner = heapq.heappop(heap)
        else:
            holders = (rank for start, stop in ranks for rank in range(start, stop))
            owner = min(holders, key=lambda rank: (loads[rank], rank))
        loads[owner] += size
        heapq.heappush(heap, (loads[owner], owner))
        owners[what] = (owner, tuple(ranks.pairs()))
    return owners
