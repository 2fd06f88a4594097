"""Which parts of a checkpoint make up one tensor, for one rank?

Parts belong together where they are of one name, dtype and shape, and the same ranks shared them (``sharing``). They
are put together in such a group alone: what another group has under that name is another tensor, however much alike.
Checkpoints of parts before version 3.1 do not say who shared what: there the parts of one name, dtype and shape are one
group, and where two different ones are in one place, nobody knows which belongs to which.

Where a group is not known to be one whole, a rank has what it had itself, and no more: it is restored on the same
ranks, divided as it was, or not at all. Reads and writes nothing. Imports without torch.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import Ranks, joined, ranges
from lakeckpt.checkpoint.format.parts import PART_MARK, SHARING, PartRecord, TensorRecord
from lakeckpt.checkpoint.format.sharing import Sharing, say_ranks, sharing_from_bytes
from lakeckpt.checkpoint.state.tiling import untiled
from lakeckpt.errors import CheckpointDamaged, WireError

__all__ = ["Composed", "Place", "Wholes", "is_part_key", "part_key", "place_of", "whole_of"]

_KEY = re.compile(rf"(.*){PART_MARK}([0-9,]*) of ([0-9,]*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the key of a part says: of what it is a part, and where it begins."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole."""


def part_key(key: str, offsets: Sequence[int], shape: Sequence[int]) -> str:
    """The key of the part of ``key`` that begins at ``offsets``.

    >>> part_key("model/weight", (4, 0), (7, 10))
    'model/weight::at 4,0 of 7,10'
    """
    return f"{key}{PART_MARK}{','.join(map(str, offsets))} of {','.join(map(str, shape))}"


def is_part_key(key: str) -> bool:
    """Whether a key is that of a part."""
    return _KEY.fullmatch(key) is not None


def place_of(key: str) -> Place | None:
    """What the key of a part says; None for another key. `CheckpointDamaged` where it is no sense."""
    match = _KEY.fullmatch(key) if PART_MARK in key else None
    return None if match is None else Place(name=match[1], offsets=_numbers(match[2]), shape=_numbers(match[3]))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in text.split(",")) if text else ()
    except ValueError:
        raise CheckpointDamaged(f"{text!r:.80} are no sizes") from None


def whole_of(place: Place, part: TensorSpec) -> TensorSpec:
    """The spec of the tensor that ``part`` is a part of. `CheckpointDamaged` where it cannot be."""
    try:
        whole = TensorSpec(key=place.name, dtype=part.dtype, shape=place.shape)
    except WireError as error:
        raise CheckpointDamaged(str(error)) from error
    if not len(place.offsets) == len(place.shape) == len(part.shape):
        raise CheckpointDamaged(f"{part.key!r:.200} is no part of a {whole.dtype} tensor of {list(whole.shape)}")
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """What there is of a tensor for one rank."""

    spec: TensorSpec
    pieces: tuple[_Piece, ...]
    """Where each part begins, and the part."""
    sharing: Sharing | None
    """How it was shared; None where that was not saved."""
    several: bool
    """Whether other ranks had another tensor of this name."""
    lacking: str
    """Why ``pieces`` are not the whole; empty where they are."""


_Piece = tuple[tuple[int, ...], TensorRecord]
_Id = tuple[str, tuple[int, ...], Ranks | None]
"""dtype, shape, and the ranks that share it (None: not said)."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """Parts that belong together."""

    spec: TensorSpec
    shared: Ranks | None
    holders: int
    """How many of the ranks that share it are ranks of the checkpoint."""
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def different(self) -> list[_Piece]:
        """Its pieces, but of those that are the same in one place, the first: ranks that hold replicas of some parts,
        and others of other parts, each wrote all of theirs."""
        found: dict[object, _Piece] = {}
        for offsets, one in self.pieces:
            found.setdefault((offsets, one.spec.shape, one.digest), (offsets, one))
        return list(found.values())

    @property
    def is_torn(self) -> bool:
        """Whether different parts are in one place."""
        different = self.different
        return len({offsets for offsets, _ in different}) < len(different)

    @property
    def contents(self) -> frozenset[object]:
        return frozenset((offsets, one.spec.shape, one.digest) for offsets, one in self.pieces)

    @property
    def of_ranks(self) -> list[Ranks]:
        """The ranks that had a part of it; where different parts are in one place, those of each there."""
        if self.is_torn:
            times = Counter(offsets for offsets, _ in self.different)
            there = [one for offsets, one in self.pieces if offsets == times.most_common(1)[0][0]]
            digests = dict.fromkeys(one.digest for one in there)
            return [joined(one.ranks for one in there if one.digest == digest) for digest in digests]
        return [joined(one.ranks for _, one in self.pieces)]

    def lacking(self) -> str:
        """Why it is not one whole; empty where it is. `CheckpointDamaged` where it ought to be."""
        wrong = untiled(self.spec.shape, [(offsets, one.spec.shape) for offsets, one in self.different])
        if wrong is None:
            return ""
        if self.is_torn:
            return "ranks had different parts of it in one place, and which belong together was not saved"
        size = sum(stop - start for start, stop in self.shared or ())
        if self.holders < size:
            return f"{size} ranks shared it, and {self.holders} of them saved this run (group=): {wrong}"
        raise CheckpointDamaged(f"tensor {self.spec.key!r}: {wrong}")


class Wholes:
    """The tensors that were saved in parts, by the ranks of all ``parts``.

    `CheckpointDamaged` where what is said of them makes no sense.
    """

    def __init__(self, parts: Sequence[PartRecord]) -> None:
        self._said = _said(parts)
        spans = ((start, stop, number) for number, (ranks, _) in enumerate(self._said) for start, stop in ranks)
        self._spans = sorted(spans)  # which rank says what: no two say for one rank
        self._holders: Counter[tuple[str, Ranks | None]] = Counter()  # of each tensor and mesh: how many ranks say so
        for ranks, said in self._said:
            size = sum(stop - start for start, stop in ranks)
            self._holders.update({(name, sharing.ranks): size for name, sharing in said.items()})
        self._groups: defaultdict[str, dict[_Id, _Group]] = defaultdict(dict)
        sayers = cache(self._sayers)
        for record in (record for part in parts for record in part.tensors):
            place = place_of(record.spec.key)
            if place is not None:
                self._add(place, record, sayers(record.ranks))

    def _add(self, place: Place, record: TensorRecord, sayers: list[int]) -> None:
        groups = self._groups[place.name]
        for number in sayers:
            sharing = self._said[number][1].get(place.name)
            which = record.spec.dtype, place.shape, None if sharing is None else sharing.ranks
            if which not in groups or not len(record.spec.shape) == len(place.offsets) == len(place.shape):
                whole = whole_of(place, record.spec)  # says what is wrong
                groups[which] = _Group(spec=whole, shared=which[2], holders=self._holders[place.name, which[2]])
            pieces = groups[which].pieces
            if not pieces or pieces[-1][1] is not record:
                pieces.append((place.offsets, record))

    def _sayers(self, ranks: Ranks) -> list[int]:
        """What of all that is said the ``ranks`` say."""
        found = set()
        for start, stop in ranks:
            at = bisect.bisect_right(self._spans, start, key=lambda span: span[1])
            while at < len(self._spans) and self._spans[at][0] < stop:
                found.add(self._spans[at][2])
                at += 1
        return sorted(found)

    def several(self) -> dict[str, tuple[Ranks, ...]]:
        """The names that more than one tensor has, and the ranks that had a part of each."""
        return {
            name: tuple(chain(*(one.of_ranks for one in groups.values())))
            for name, groups in self._groups.items()
            if _differ(groups)
        }

    def check(self) -> str:
        """Why it can only be restored on the same ranks, divided as it was; empty where that is not so.

        `CheckpointDamaged` where parts do not make up a whole that they ought to.
        """
        found = {}
        for name, groups in self._groups.items():
            texts = [text for one in groups.values() if (text := one.lacking())]
            if texts or _differ(groups):
                found[name] = texts[0] if texts else "ranks had different tensors of this name"
        more = f", and {len(found) - 1} more tensors" if len(found) > 1 else ""
        return next((f"{name!r}: {text}{more}" for name, text in found.items()), "")

    def of(self, rank: int) -> dict[str, Composed]:
        """The tensors that ``rank`` had a share in. `CheckpointDamaged` where one is not whole that ought to be."""
        shared = next((said for ranks, said in self._said if _meet(ranks, ((rank, rank + 1),))), {})
        found = {}
        for name, groups in self._groups.items():
            sharing = shared.get(name)
            group = _chosen(groups, rank, None if sharing is None else sharing.ranks)
            if group is None:
                continue
            lacking = group.lacking()
            pieces = _own(group, rank) if group.is_torn else group.different
            found[name] = Composed(
                spec=group.spec, pieces=tuple(pieces), sharing=sharing, several=_differ(groups), lacking=lacking
            )
        return found


def _said(parts: Sequence[PartRecord]) -> list[tuple[Ranks, dict[str, Sharing]]]:
    """What ranks say of what they share; nothing, where they share nothing, or an older lakeckpt saved them."""
    found: list[tuple[Ranks, dict[str, Sharing]]] = []
    for record in (tree for part in parts for tree in part.trees if tree.item == SHARING):
        try:
            found.append((record.ranks, sharing_from_bytes(record.document)))
        except WireError as error:
            raise CheckpointDamaged(f"what {say_ranks(record.ranks)} shared: {error}") from error
    said = {rank for ranks, _ in found for start, stop in ranks for rank in range(start, stop)}
    rest = ranges(set(range(max((part.world_size for part in parts), default=0))) - said)
    return [*found, (rest, {})] if rest else found


def _chosen(groups: Mapping[_Id, _Group], rank: int, shared: Ranks | None) -> _Group | None:
    """The group that ``rank`` is of; None where it is of none, or that cannot be told."""
    alike = [group for (_, _, ranks), group in groups.items() if ranks == shared]
    if len(alike) == 1:
        return alike[0]
    return next((group for group in alike if _own(group, rank)), None)


def _own(group: _Group, rank: int) -> list[_Piece]:
    return [piece for piece in group.pieces if _meet(piece[1].ranks, ((rank, rank + 1),))]


def _differ(groups: Mapping[_Id, _Group]) -> bool:
    return len({one.contents for one in groups.values()}) > 1 or any(one.is_torn for one in groups.values())


def _meet(some: Ranks, others: Ranks) -> bool:
    """Whether they have a rank in common."""
    return any(first < end and begin < last for first, last in some for begin, end in others)
