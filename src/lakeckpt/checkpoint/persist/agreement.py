"""This module settles, at the cut of a save, whether all ranks agree, and which rank writes what.

One round settles the facts (step, attempt), which must be equal on all ranks. One digest crosses for each state of a
reader, and one for all units (tensors and trees) together. Only if states differ, another round finds the fields, for
the error. Only if units differ, a round finds which groups of units do, and another one which ranks hold which content
of these. Every rank then computes the same shares without a further message: a unit is written once per content, by one
of the ranks that hold it, spread by size.

Parts of sharded tensors are not compared one by one: no two ranks that shard a tensor hold the same part, and a
thousand ranks would send each other a million digests. All parts of an item that one mesh shards alike form a *bundle*.
A rank sends two digests of a bundle: of what it is, and of its contents. Ranks that send the same contents hold
replicas. Only they know the parts of the bundle, and they compute among themselves who writes which part. Ranks that
send other contents of the same bundle hold replicas that drifted apart, and the save is refused by the names of the
tensors.

The module never touches storage, imports without torch and starts no threads.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, short_digest
from lakeckpt.checkpoint.format.fields import Ranks, holds, ranges
from lakeckpt.checkpoint.format.parts import Outline
from lakeckpt.checkpoint.format.units import SUMS, TENSOR, Held, Shares, Unit, UnitId, spread, sum_of
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import ReplicasDiffer, TrackingError
from lakeckpt.tracking.rounds import Rounds
from lakeckpt.tracking.tally import Tally, name_ranks

__all__ = ["Agreed", "Shares", "agree"]

_UNITS = "the units"
_REPLICAS = "the replicas that captured a share each"
_DIGEST = "digest of "
_BUNDLE = "bundle "
_KIND_BYTES = 8
_PREFIX = "unit "
_ANNOUNCED = "announced "
_BUCKETS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The result of `agree` on one rank."""

    cut: bytes
    """Digest of all that was agreed on."""
    announced: Mapping[str, str]
    """The announcements of ranks to all ranks, by name."""
    owners: Shares
    """The shares of units that are in no bundle: known to all ranks."""
    mine: Shares
    """The shares of the bundles of this rank."""
    bundles: Mapping[Ranks, int]
    """Ranks that hold the same bundles → `sum_of` the units of these bundles, which they write between them."""

    def share(self, rank: int) -> dict[UnitId, Ranks]:
        """Return the units that ``rank``, which is this one, writes, with the ranks that hold each."""
        every = (*self.owners.items(), *self.mine.items())
        return {what: ranks for what, (owner, ranks) in every if owner == rank}

    def outline(self, rank: int) -> Outline:
        """Return which units the state of ``rank``, which is this one, consists of."""
        contents = Counter(name for name, _ in self.owners)
        alone = [(name, owner) for (name, _), (owner, ranks) in self.owners.items() if holds(ranks, rank)]
        owners = {owner for _, owner in alone} | {owner for owner, _ in self.mine.values()}
        return Outline(
            units=len(alone) + len(self.mine),
            elsewhere=ranges(owners - {rank}),
            different=tuple(sorted(name for name, _ in alone if contents[name] > 1)),
        )


def agree(
    talk: Rounds,
    *,
    facts: Mapping[str, str],
    units: Sequence[Unit],
    announce: Mapping[str, str],
    states: Mapping[str, Mapping[str, str]] | None = None,
    replicas: Mapping[str, str] | None = None,
) -> Agreed:
    """Settle the ``facts`` and the shares. ``announce`` goes to all ranks, and need not be equal; of one name that
    several ranks announce, the value of the first counts. ``states`` are facts, too: name of a state → facts of its
    fields, of which a digest crosses unless they differ. ``replicas`` captured a share each: key of a tensor → a sum
    of its bytes as this rank holds it.

    Raises `TrackingError` naming the ranks and the fact, or parts of a mesh that drifted apart. Raises `ReplicasDiffer`
    naming the ranks and the tensors if only ``replicas`` differ, and `MissingRanksError` naming the ranks.
    """
    every_state = {**(states or {}), **({_REPLICAS: replicas} if replicas else {})}
    alone = sorted((unit for unit in units if unit.bundle is None), key=lambda unit: unit.id)
    bundles: defaultdict[Hashable, list[Unit]] = defaultdict(list)
    for unit in units:
        if unit.bundle is not None:
            bundles[unit.bundle].append(unit)
    digests = [_digest_of_bundle(bundle) for bundle in bundles.values()]
    announced = {f"{_ANNOUNCED}{name}": value for name, value in announce.items()}
    alike = {f"{_DIGEST}{name}": _digest_of_facts(fields) for name, fields in every_state.items()}
    kinds = {f"{_BUNDLE}{_kind_of(bundle)}": bundle for bundle in bundles.values()}
    bundled = dict(zip(kinds, digests, strict=True))
    tally = talk.everyone({**facts, **alike, _UNITS: _digest(alone), **bundled, **announced})
    tally.require_agreement(sorted(facts))
    _compare_states(talk, tally, every_state)
    _compare_replicas(talk, tally, kinds)
    held = _held(talk, alone, alike=len(tally.facts[_UNITS]) == 1)
    holders: dict[str, Intervals] = {}
    for text, ranks in _bundles_in(tally):
        holders[text] = holders[text].union(ranks) if text in holders else ranks
    mine: defaultdict[Intervals, list[Unit]] = defaultdict(list)
    for digest, bundle in zip(digests, bundles.values(), strict=True):
        mine[holders[digest]] += bundle
    loads = [0] * talk.world_size
    sums: defaultdict[Intervals, int] = defaultdict(int)
    for text, ranks in holders.items():
        total, _, size = text.partition(":")
        size_bytes = int(size)
        sums[ranks] += int(total, 16)
        for rank in _each(ranks):
            loads[rank] += size_bytes // ranks.size
    texts = [f"{name}={value}" for name, value in sorted({**facts, **alike}.items())]
    texts += [f"{_BUNDLE}{text} {ranks.pairs()}" for text, ranks in sorted(holders.items())]
    contents = [part for name, content in sorted(held) for part in (name.encode(), content)]
    return Agreed(
        cut=short_digest(*(text.encode() for text in texts), *contents),
        announced={
            name.removeprefix(_ANNOUNCED): tally.value(name) for name in tally.facts if name.startswith(_ANNOUNCED)
        },
        owners=spread(held, loads),
        mine={what: share for ranks, some in mine.items() for what, share in _shared_out(some, ranks).items()},
        bundles={tuple(ranks.pairs()): total % SUMS for ranks, total in sums.items()},
    )


def _compare_states(talk: Rounds, tally: Tally, states: Mapping[str, Mapping[str, str]]) -> None:
    """Raise `TrackingError`, which names the fields of states that differ, or `ReplicasDiffer` if only replicas do. All
    ranks see in the ``tally`` whether any does, and a rank without states takes part in the round, too."""
    differ = [name for name, values in tally.facts.items() if name.startswith(_DIGEST) and len(values) > 1]
    if differ:
        facts = {f"{name}, {field}": text for name, fields in states.items() for field, text in fields.items()}
        tally_of_fields = talk.everyone(facts)
        try:
            tally_of_fields.require_agreement(sorted(tally_of_fields.facts))
            tally.require_agreement(differ)
        except TrackingError as error:
            if differ == [f"{_DIGEST}{_REPLICAS}"]:
                raise ReplicasDiffer(str(error)) from error
            raise


def _compare_replicas(talk: Rounds, tally: Tally, kinds: Mapping[str, Sequence[Unit]]) -> None:
    """Raise `TrackingError`, which names a tensor and its ranks, if replicas inside of one mesh are not alike.

    All ranks see in the ``tally`` whether any are not, and a rank without these tensors takes part in the round, too.
    """
    differ = [name for name, values in tally.facts.items() if name.startswith(_BUNDLE) and len(values) > 1]
    if not differ:
        return
    mine = {f"{name} {unit.id[0]}": unit.id[1].hex() for name in differ for unit in kinds.get(name, ())}
    found = {name: values for name, values in talk.everyone(mine).facts.items() if len(values) > 1}
    name, values = min(found.items())
    key = name.partition(f" {TENSOR}")[2]
    ranks = " and ".join(name_ranks(one) for one in values.values())
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    raise TrackingError(
        f"{ranks} hold replicas of {key!r}{more}, which must be alike: these ranks are in one DTensor mesh, and their "
        "contents differ. Nothing was saved. Train replicas with the same gradients and the same optimizer steps, or "
        "keep what belongs to one rank in a plain tensor; a restore makes replicas alike again"
    )


def _bundles_in(tally: Tally) -> Iterator[tuple[str, Intervals]]:
    """Yield the contents of bundles, and the ranks that hold them."""
    return (pair for name, values in tally.facts.items() if name.startswith(_BUNDLE) for pair in values.items())


def _kind_of(bundle: Sequence[Unit]) -> str:
    """Return a digest of the tensors of a bundle and their division, apart from their contents."""
    kinds = sum_of((unit.id[0], unit.id[1][DIGEST_BYTES:]) for unit in bundle)
    return short_digest(repr(bundle[0].bundle).encode(), b"%x" % kinds)[:_KIND_BYTES].hex()


def _digest_of_bundle(bundle: Sequence[Unit]) -> str:
    """Return the sum of the units of a bundle, and their size."""
    return f"{sum_of(unit.id for unit in bundle):x}:{sum(unit.size_bytes for unit in bundle)}"


def _each(ranks: Intervals) -> Iterable[int]:
    return (rank for start, stop in ranks for rank in range(start, stop))


def _digest_of_facts(facts: Mapping[str, str]) -> str:
    return short_digest(*(text.encode() for pair in sorted(facts.items()) for text in pair)).hex()


def _digest(units: Sequence[Unit]) -> str:
    return short_digest(
        *(part for name, content in (unit.id for unit in units) for part in (name.encode(), content))
    ).hex()


def _held(talk: Rounds, units: Sequence[Unit], *, alike: bool) -> Held:
    """Return which ranks hold which content. If units differ (not ``alike``), two rounds find that out."""
    whole = Intervals.whole(talk.world_size)
    held = {unit.id: (unit.size_bytes, whole) for unit in units}
    if not alike:
        buckets: dict[str, list[Unit]] = {f"{number:02x}": [] for number in range(_BUCKETS)}
        for unit in units:
            buckets[f"{zlib.crc32(unit.id[0].encode()) % _BUCKETS:02x}"].append(unit)
        tally = talk.everyone({number: _digest(bucket) for number, bucket in buckets.items()})
        differ = [unit for number, bucket in buckets.items() if len(tally.facts[number]) > 1 for unit in bucket]
        tally = talk.everyone({_PREFIX + unit.id[0]: f"{unit.id[1].hex()}:{unit.size_bytes}" for unit in differ})
        for name, values in tally.facts.items():
            for value, ranks in values.items():
                content, _, size = value.partition(":")
                held[name.removeprefix(_PREFIX), bytes.fromhex(content)] = (int(size), ranks)
    return held


def _shared_out(units: Iterable[Unit], ranks: Intervals) -> Shares:
    """Return which of the ``ranks`` writes which of the units that all of them hold, and only they know."""
    every, whole = list(_each(ranks)), Intervals.whole(ranks.size)
    places = spread({unit.id: (unit.size_bytes, whole) for unit in units}, [0] * len(every))
    return {what: (every[at], tuple(ranks.pairs())) for what, (at, _) in places.items()}
