"""At this cut, do all ranks say the same, and which rank writes what?

One exchange settles the facts (step, attempt, the readers' states: they must be equal on all ranks) and whether all
units are the same everywhere, by a single digest. Only if they are not, a second exchange finds among which units the
differences are, and a third who holds which content of these. Every rank then knows, without a further word, the same
shares: a unit is written once per content, by one of the ranks that hold it, spread by size.

Parts of tensors are left out of this: no two ranks that divide a tensor have the same, and a thousand ranks would tell
one another of a million. Of those of an item that one mesh divides alike, a *bundle*, a rank says one number, and ranks
that say the same have the same: those that hold replicas. What a bundle consists of only they know, and how they share
it out among them.

Never touches storage. Imports without torch.
"""

from __future__ import annotations

import heapq
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, short_digest
from lakeckpt.checkpoint.format.fields import Ranks, holds, ranges
from lakeckpt.checkpoint.format.parts import Outline
from lakeckpt.checkpoint.format.units import UnitId
from lakeckpt.core.intervals import Intervals
from lakeckpt.tracking.tally import Tally

__all__ = ["SUMS", "Agreement", "Merge", "Shares", "Talk", "Unit", "agree", "everyone", "sum_of"]

_UNITS = "the units"
_BUNDLE = "bundle "
_PREFIX = "unit "
_TOLD = "told "
_BUCKETS = 256
SUMS: int = 2 ** (8 * DIGEST_BYTES)
"""Sums of units are taken modulo that."""

Held = Mapping[UnitId, tuple[int, Intervals]]
"""A unit → its size in bytes, and the ranks that hold it."""
Shares = Mapping[UnitId, tuple[int, Ranks]]
"""A unit → the rank that writes it, and the ranks that hold it."""


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
    """A tensor or a tree, as it is on this rank."""

    id: UnitId
    size_bytes: int
    bundle: Hashable = None
    """With which others it is said together: those that have the same here, on ranks that have all of them or none.
    None: it is said alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks know after the exchange."""

    cut: bytes
    """Digest of all that was agreed on."""
    told: Mapping[str, str]
    """What rank 0 told all."""
    owners: Shares
    """Of what is said alone: known to all ranks."""
    mine: Shares
    """Of the bundles of this rank."""
    bundles: Mapping[Ranks, int]
    """Ranks that hold the same bundles → `sum_of` what they write of them between them."""

    def share(self, rank: int) -> dict[UnitId, Ranks]:
        """What ``rank``, which is this one, writes, with the ranks that hold it."""
        every = (*self.owners.items(), *self.mine.items())
        return {what: ranks for what, (owner, ranks) in every if owner == rank}

    def outline(self, rank: int) -> Outline:
        """Of what the state of ``rank``, which is this one, consists."""
        contents = Counter(name for name, _ in self.owners)
        alone = [(name, owner) for (name, _), (owner, ranks) in self.owners.items() if holds(ranks, rank)]
        owners = {owner for _, owner in alone} | {owner for owner, _ in self.mine.values()}
        return Outline(
            units=len(alone) + len(self.mine),
            elsewhere=ranges(owners - {rank}),
            different=tuple(sorted(name for name, _ in alone if contents[name] > 1)),
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

    Raises `TrackingError` naming the ranks and the fact, `MissingRanksError` naming the ranks.
    """
    alone = sorted((unit for unit in units if unit.bundle is None), key=lambda unit: unit.id)
    bundles: defaultdict[Hashable, list[Unit]] = defaultdict(list)
    for unit in units:
        if unit.bundle is not None:
            bundles[unit.bundle].append(unit)
    said = {f"{_BUNDLE}{number}": _said_of(bundle) for number, bundle in enumerate(bundles.values())}
    told = {f"{_TOLD}{name}": value for name, value in tell.items()}
    tally = everyone(talk, {**facts, _UNITS: _digest(alone), **said, **told})
    tally.settle(agreed=sorted(facts))
    held = _held(talk, alone, alike=len(tally.facts[_UNITS]) == 1)
    holders = _holders(tally)
    mine: defaultdict[Intervals, list[Unit]] = defaultdict(list)
    for text, bundle in zip(said.values(), bundles.values(), strict=True):
        mine[holders[text]] += bundle
    loads = [0] * talk.world_size
    sums: defaultdict[Intervals, int] = defaultdict(int)
    for text, ranks in holders.items():
        total, size_bytes = map(int, text.split(":"))
        sums[ranks] += total
        for rank in _each(ranks):
            loads[rank] += size_bytes // ranks.size
    texts = [f"{name}={value}" for name, value in sorted(facts.items())]
    texts += [f"{_BUNDLE}{text} {ranks.pairs()}" for text, ranks in sorted(holders.items())]
    contents = [part for name, content in sorted(held) for part in (name.encode(), content)]
    return Agreement(
        cut=short_digest(*(text.encode() for text in texts), *contents),
        told={
            name.removeprefix(_TOLD): next(iter(values))
            for name, values in tally.facts.items()
            if name.startswith(_TOLD)
        },
        owners=_spread(held, loads),
        mine={what: share for ranks, some in mine.items() for what, share in _shared_out(some, ranks).items()},
        bundles={tuple(ranks.pairs()): total % SUMS for ranks, total in sums.items()},
    )


def sum_of(units: Iterable[UnitId]) -> int:
    """One number for units, in any order; of several together, the sum modulo 2^128."""
    every = (short_digest(name.encode(), content) for name, content in units)
    return sum(int.from_bytes(one, "big") for one in every) % SUMS


def _said_of(bundle: Sequence[Unit]) -> str:
    """What a rank says of a bundle."""
    return f"{sum_of(unit.id for unit in bundle)}:{sum(unit.size_bytes for unit in bundle)}"


def _holders(tally: Tally) -> dict[str, Intervals]:
    """What is said of each bundle → the ranks that hold it, by whichever number."""
    found: defaultdict[str, list[Intervals]] = defaultdict(list)
    for name, values in tally.facts.items():
        if name.startswith(_BUNDLE):
            for text, ranks in values.items():
                found[text].append(ranks)
    return {text: Intervals.empty().union(*several) for text, several in found.items()}


def _each(ranks: Intervals) -> Iterable[int]:
    return (rank for start, stop in ranks for rank in range(start, stop))


def _digest(units: Sequence[Unit]) -> str:
    return short_digest(
        *(part for name, content in (unit.id for unit in units) for part in (name.encode(), content))
    ).hex()


def _held(talk: Talk, units: Sequence[Unit], *, alike: bool) -> Held:
    """Who holds which content: known without a word of all units that are ``alike``, asked of the others."""
    whole = Intervals.whole(talk.world_size)
    held = {unit.id: (unit.size_bytes, whole) for unit in units}
    if not alike:
        buckets: dict[str, list[Unit]] = {f"{number:02x}": [] for number in range(_BUCKETS)}
        for unit in units:
            buckets[f"{zlib.crc32(unit.id[0].encode()) % _BUCKETS:02x}"].append(unit)
        tally = everyone(talk, {number: _digest(bucket) for number, bucket in buckets.items()})
        differ = [unit for number, bucket in buckets.items() if len(tally.facts[number]) > 1 for unit in bucket]
        tally = everyone(talk, {_PREFIX + unit.id[0]: f"{unit.id[1].hex()}:{unit.size_bytes}" for unit in differ})
        for name, values in tally.facts.items():
            for value, ranks in values.items():
                content, _, size = value.partition(":")
                held[name.removeprefix(_PREFIX), bytes.fromhex(content)] = (int(size), ranks)
    return held


def _shared_out(units: Iterable[Unit], ranks: Intervals) -> Shares:
    """Who of the ``ranks`` writes which of the units that all of them hold, and only they know."""
    every, whole = list(_each(ranks)), Intervals.whole(ranks.size)
    places = _spread({unit.id: (unit.size_bytes, whole) for unit in units}, [0] * len(every))
    return {what: (every[at], tuple(ranks.pairs())) for what, (at, _) in places.items()}


def _spread(held: Held, loads: list[int]) -> Shares:
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
            owner = min(_each(ranks), key=lambda rank: (loads[rank], rank))
        loads[owner] += size
        heapq.heappush(heap, (loads[owner], owner))
        owners[what] = (owner, tuple(ranks.pairs()))
    return owners
