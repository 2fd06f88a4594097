"""This module finds the saved parts that make up one tensor.

Each rank saves the part of a `DTensor` that it holds, under a key that names the whole tensor, its shape, and the place
of the part. Parts belong together if the name, the dtype and the shape of the whole are the same. `Wholes` finds the
parts of every tensor in the records of all ranks, `wholes_of` in the keys of one rank. `Whole.regions` says which
regions of the parts fill the part that a rank holds now.

Replicas of a part are saved once, and replicas inside of one mesh are alike (`lakeckpt.checkpoint.persist.agreement`
refuses others). If the stages of a pipeline give their layers the same names, the parts of the ranks of one mesh belong
together.

The module never reads storage, changes nothing, and never imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import Ranks, holds, joined
from lakeckpt.checkpoint.format.parts import SHARING, PartRecord, TensorRecord, TreeRecord
from lakeckpt.checkpoint.format.sharing import PartPlace, Sharing, place_of, say_ranks, sharing_from_bytes, untiled
from lakeckpt.errors import CheckpointDamaged, WireError

__all__ = ["Region", "SavedPart", "Whole", "Wholes", "wholes_of"]


def _whole_spec(place: PartPlace, part: TensorSpec) -> TensorSpec:
    """Return the spec of the tensor that ``part`` is a part of. `CheckpointDamaged` if there is no such tensor."""
    try:
        whole = TensorSpec(key=place.name, dtype=part.dtype, shape=place.shape)
    except WireError as error:
        raise CheckpointDamaged(str(error)) from error
    if not len(place.offsets) == len(place.shape) == len(part.shape):
        raise CheckpointDamaged(f"{part.key!r:.200} is no part of a {whole.dtype} tensor of {list(whole.shape)}")
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """A saved part: its key, and where it begins in the whole."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A region of a saved part: ``sizes`` elements from ``source`` on go to ``target`` in the destination."""

    key: str
    source: tuple[int, ...]
    target: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A tensor and the parts in which it was saved. A plain tensor is its own single part."""

    spec: TensorSpec
    parts: tuple[SavedPart, ...]
    sharing: Sharing | None = None
    """How the rank shared it; None: the rank had it whole."""
    is_several: bool = False
    """True if other ranks had another tensor of this name."""

    @classmethod
    def plain(cls, spec: TensorSpec) -> Whole:
        """Return a tensor that was saved as one."""
        return cls(spec=spec, parts=(SavedPart(key=spec.key, offsets=(0,) * len(spec.shape), sizes=spec.shape),))

    def part_at(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> SavedPart | None:
        """Return the saved part with exactly this extent."""
        return next((part for part in self.parts if (part.offsets, part.sizes) == (offsets, sizes)), None)

    def regions(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Region]:
        """Return the regions that make up the part at ``offsets`` of ``sizes``.

        `CheckpointDamaged` if some of it was not saved.
        """
        found = [one for part in self.parts if (one := _common(part, offsets, sizes)) is not None]
        if sum(prod(region.sizes) for region in found) != prod(sizes):
            raise CheckpointDamaged(f"of the tensor {self.spec.key!r}, not all of {sizes} at {offsets} was saved once")
        return found


def _common(part: SavedPart, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Region | None:
    """Return the region of ``part`` that lies in the box at ``offsets`` of ``sizes``; None if there is none."""
    lows = tuple(map(max, part.offsets, offsets))
    stops = [
        min(first + size, other + extent)
        for first, size, other, extent in zip(part.offsets, part.sizes, offsets, sizes, strict=True)
    ]
    common = tuple(stop - low for low, stop in zip(lows, stops, strict=True))
    if any(size <= 0 for size in common):
        return None
    source = tuple(low - first for low, first in zip(lows, part.offsets, strict=True))
    target = tuple(low - first for low, first in zip(lows, offsets, strict=True))
    return Region(key=part.key, source=source, target=target, sizes=common)


def wholes_of(specs: Mapping[str, TensorSpec], shared: Mapping[str, Sharing]) -> dict[str, Whole]:
    """Return, by name, the tensors that have parts among ``specs``: the parts of one rank.

    ``shared`` says how each tensor was divided. `CheckpointDamaged` if parts do not fit one another.
    """
    found: dict[str, tuple[TensorSpec, list[SavedPart]]] = {}
    for key, spec in specs.items():
        place = place_of(key)
        if place is None:
            continue
        whole, parts = found.setdefault(place.name, (_whole_spec(place, spec), []))
        if whole != _whole_spec(place, spec):
            raise CheckpointDamaged(f"{key!r:.200} is no part of a {whole.dtype} tensor of {list(whole.shape)}")
        parts.append(SavedPart(key=key, offsets=place.offsets, sizes=spec.shape))
    return {
        name: Whole(spec=spec, parts=tuple(parts), sharing=shared.get(name)) for name, (spec, parts) in found.items()
    }


_Piece = tuple[tuple[int, ...], TensorRecord]
"""Where a part begins, and the part."""


class Wholes:
    """The tensors that the ranks of ``parts`` saved in parts. `CheckpointDamaged` if what they say makes no sense."""

    def __init__(self, parts: Sequence[PartRecord]) -> None:
        self._shared = [_shared(tree) for part in parts for tree in part.trees if tree.item == SHARING]
        self._pieces: defaultdict[str, list[_Piece]] = defaultdict(list)
        for record in (record for part in parts for record in part.tensors):
            place = place_of(record.spec.key)
            if place is not None:
                self._pieces[place.name].append((place.offsets, record))

    def several(self) -> dict[str, tuple[Ranks, ...]]:
        """Return the names under which ranks saved different tensors: name → the ranks of each tensor."""
        return {
            name: tuple(joined(one.ranks for _, one in pieces) for pieces in groups)
            for name in self._pieces
            if len(groups := self._groups(name)) > 1
        }

    def check(self) -> str:
        """Return why the checkpoint fits the same ranks only, each with its own parts; empty if it fits any ranks.

        `CheckpointDamaged` if parts of a tensor are missing or overlap.
        """
        for name in self._pieces:
            for pieces in self._groups(name):
                _whole_of(pieces)
        several = self.several()
        more = f", and {len(several) - 1} more tensors" if len(several) > 1 else ""
        return next((f"{name!r}: {_different_on(ranks)}{more}" for name, ranks in several.items()), "")

    def of(self, rank: int) -> dict[str, tuple[Whole, list[TensorRecord]]]:
        """Return, by name, the tensors that ``rank`` shared, with the records of their parts.

        `CheckpointDamaged` if parts of such a tensor are missing or overlap.
        """
        shared = next((found for ranks, found in self._shared if holds(ranks, rank)), {})
        found = {}
        for name, sharing in shared.items():
            pieces = self._of_mesh(name, sharing)
            if not pieces:
                continue
            whole = Whole(
                spec=_whole_of(pieces),
                parts=tuple(SavedPart(key=one.spec.key, offsets=at, sizes=one.spec.shape) for at, one in pieces),
                sharing=sharing,
                is_several=len(self._groups(name)) > 1,
            )
            found[name] = whole, [record for _, record in pieces]
        return found

    def _of_mesh(self, name: str, sharing: Sharing) -> list[_Piece]:
        """Return the pieces of the ranks that share the tensor ``name`` as ``sharing`` says."""
        mates = joined(ranks for ranks, other in self._shared if other.get(name) == sharing)
        return [(at, one) for at, one in self._pieces[name] if _overlap_of(one.ranks, mates)]

    def _groups(self, name: str) -> list[list[_Piece]]:
        """Return the pieces of each tensor that ranks saved under ``name``."""
        meshes = dict.fromkeys(found[name] for _, found in self._shared if name in found)
        groups = {
            tuple(id(one) for _, one in pieces): pieces for pieces in (self._of_mesh(name, one) for one in meshes)
        }
        return [pieces for pieces in groups.values() if pieces]


def _overlap_of(some: Ranks, others: Ranks) -> bool:
    return any(start < end and first < stop for start, stop in some for first, end in others)


def _shared(record: TreeRecord) -> tuple[Ranks, dict[str, Sharing]]:
    try:
        return record.ranks, sharing_from_bytes(record.document)
    except WireError as error:
        raise CheckpointDamaged(f"how {say_ranks(record.ranks)} shared tensors: {error}") from error


def _different_on(ranks: Sequence[Ranks]) -> str:
    return f"ranks had different tensors of this name, on {' and on '.join(map(say_ranks, ranks))}"


def _whole_of(pieces: Sequence[_Piece]) -> TensorSpec:
    """Return what ``pieces`` are the parts of. `CheckpointDamaged` if some are missing, overlap, or do not fit."""
    specs: dict[TensorSpec, None] = {}
    for _, one in pieces:
        place = place_of(one.spec.key)
        assert place is not None
        specs[_whole_spec(place, one.spec)] = None
    spec = next(iter(specs))
    if len(specs) > 1:
        raise CheckpointDamaged(f"tensor {spec.key!r}: its parts are of {len(specs)} shapes or dtypes")
    wrong = untiled(spec.shape, dict.fromkeys((offsets, one.spec.shape) for offsets, one in pieces))
    if wrong is not None:
        raise CheckpointDamaged(f"tensor {spec.key!r}: {wrong}")
    return spec
