"""This module finds the saved parts that make up one tensor.

Each rank saves the part of a `DTensor` that it holds, under a key that names the whole tensor, its shape, and the place
of the part. Parts belong together if the name, the dtype and the shape of the whole are the same. `Wholes` finds the
parts of every tensor in the records of all ranks, `wholes_of` in the keys of one rank. `Whole.regions` says which
regions of the parts fill the part that a rank holds now.

Replicas of a part are saved once. Ranks may have saved different contents of one part. If the stages of a pipeline give
their layers the same names, the parts of the ranks of one mesh belong together. If replicas drifted apart, nothing says
which parts belong together: each rank gets back what it had itself, divided as it was, and nothing else.

The module never reads storage, changes nothing, and never imports torch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import Ranks, holds, joined
from lakeckpt.checkpoint.format.parts import PART_MARK, SHARING, PartRecord, TensorRecord, TreeRecord
from lakeckpt.checkpoint.format.sharing import Sharing, say_ranks, sharing_from_bytes
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, WireError

__all__ = ["Part", "Place", "Region", "Whole", "Wholes", "is_part_key", "part_key", "place_of", "untiled", "wholes_of"]

_KEY = re.compile(rf"(.*){PART_MARK}([0-9,]*) of ([0-9,]*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the key of a part says: the whole tensor's name and shape, and where the part begins."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole."""


def part_key(key: str, offsets: Sequence[int], shape: Sequence[int]) -> str:
    """Return the key of the part of ``key`` that begins at ``offsets``.

    >>> part_key("model/weight", (4, 0), (7, 10))
    'model/weight::at 4,0 of 7,10'
    """
    return f"{key}{PART_MARK}{','.join(map(str, offsets))} of {','.join(map(str, shape))}"


def is_part_key(key: str) -> bool:
    """Return whether a key is that of a part."""
    return _KEY.fullmatch(key) is not None


def place_of(key: str) -> Place | None:
    """Return what the key of a part says; None for another key. `CheckpointDamaged` if its numbers make no sense."""
    match = _KEY.fullmatch(key) if PART_MARK in key else None
    return None if match is None else Place(name=match[1], offsets=_numbers(match[2]), shape=_numbers(match[3]))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in text.split(",")) if text else ()
    except ValueError:
        raise CheckpointDamaged(f"{text!r:.80} are no sizes") from None


def _whole_spec(place: Place, part: TensorSpec) -> TensorSpec:
    """Return the spec of the tensor that ``part`` is a part of. `CheckpointDamaged` if there is none such."""
    try:
        whole = TensorSpec(key=place.name, dtype=part.dtype, shape=place.shape)
    except WireError as error:
        raise CheckpointDamaged(str(error)) from error
    if not len(place.offsets) == len(place.shape) == len(part.shape):
        raise CheckpointDamaged(f"{part.key!r:.200} is no part of a {whole.dtype} tensor of {list(whole.shape)}")
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
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
    parts: tuple[Part, ...]
    sharing: Sharing | None = None
    """How the rank shared it; None: the rank had it whole."""
    several: str = ""
    """Says so if other ranks had another tensor of this name."""
    lacking: str = ""
    """Why ``parts`` are not the whole tensor, where they are not."""

    @classmethod
    def plain(cls, spec: TensorSpec) -> Whole:
        """Return a tensor that was saved as one."""
        return cls(spec=spec, parts=(Part(key=spec.key, offsets=(0,) * len(spec.shape), sizes=spec.shape),))

    def part_at(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Part | None:
        """Return the saved part with exactly this extent."""
        return next((part for part in self.parts if (part.offsets, part.sizes) == (offsets, sizes)), None)

    def regions(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Region]:
        """Return the regions that make up the part at ``offsets`` of ``sizes``.

        `CheckpointDamaged` if some of it was not saved; `CheckpointMismatch` if this is because only the parts of this
        rank are known to belong together.
        """
        found = [one for part in self.parts if (one := _common(part, offsets, sizes)) is not None]
        if sum(prod(region.sizes) for region in found) != prod(sizes):
            if self.lacking:
                raise CheckpointMismatch(
                    f"the tensor {self.spec.key!r} cannot be read at {offsets} of {sizes}: {self.lacking}. Restore it "
                    "on the ranks that saved it, divided as it was"
                )
            raise CheckpointDamaged(f"of the tensor {self.spec.key!r}, not all of {sizes} at {offsets} was saved once")
        return found


def _common(part: Part, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Region | None:
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
    """Return, by name, the tensors of which there are parts among ``specs``: the parts of one rank.

    ``shared`` says how each tensor was divided. `CheckpointDamaged` if parts do not fit one another.
    """
    found: dict[str, tuple[TensorSpec, list[Part]]] = {}
    for key, spec in specs.items():
        place = place_of(key)
        if place is None:
            continue
        whole, parts = found.setdefault(place.name, (_whole_spec(place, spec), []))
        if whole != _whole_spec(place, spec):
            raise CheckpointDamaged(f"{key!r:.200} is no part of a {whole.dtype} tensor of {list(whole.shape)}")
        parts.append(Part(key=key, offsets=place.offsets, sizes=spec.shape))
    return {
        name: Whole(spec=spec, parts=tuple(parts), sharing=shared.get(name)) for name, (spec, parts) in found.items()
    }


_Piece = tuple[tuple[int, ...], TensorRecord]
"""Where a part begins, and the part."""


class Wholes:
    """The tensors that the ranks of ``parts`` saved in parts. `CheckpointDamaged` if what they say makes no sense."""

    def __init__(self, parts: Sequence[PartRecord]) -> None:
        self._shared = [_shared(tree) for part in parts for tree in part.trees if tree.item == SHARING]
        self._pieces: defaultdict[str, defaultdict[TensorSpec, list[_Piece]]] = defaultdict(lambda: defaultdict(list))
        for record in (record for part in parts for record in part.tensors):
            place = place_of(record.spec.key)
            if place is not None:
                self._pieces[place.name][_whole_spec(place, record.spec)].append((place.offsets, record))

    def several(self) -> dict[str, tuple[Ranks, ...]]:
        """Return the names under which ranks saved different tensors: name → the ranks of each tensor."""
        return {
            name: tuple(ranks for pieces in groups.values() for ranks in _ranks_of(pieces))
            for name, groups in self._pieces.items()
            if len(groups) > 1 or any(_torn_at(pieces) is not None for pieces in groups.values())
        }

    def check(self) -> str:
        """Return why the checkpoint fits the same ranks only, each with its own parts; empty if it fits any ranks.

        `CheckpointDamaged` if parts of a tensor are missing or overlap.
        """
        for groups in self._pieces.values():
            for spec, pieces in groups.items():
                _lacking(spec, pieces)
        several = self.several()
        more = f", and {len(several) - 1} more tensors" if len(several) > 1 else ""
        return next((f"{name!r}: {_different_on(ranks)}{more}" for name, ranks in several.items()), "")

    def of(self, rank: int) -> dict[str, tuple[Whole, list[TensorRecord]]]:
        """Return, by name, the tensors that ``rank`` shared, with the records of their parts.

        `CheckpointDamaged` if parts of such a tensor are missing or overlap.
        """
        shared = next((found for ranks, found in self._shared if holds(ranks, rank)), {})
        found = {}
        for name, groups in self._pieces.items():
            for spec, pieces in groups.items():
                own = [piece for piece in pieces if holds(piece[1].ranks, rank)]
                if not own and not self._of_mesh(name, shared, pieces):
                    continue
                several = _lacking(spec, pieces)
                if several and name in shared:
                    pieces = self._of_mesh(name, shared, pieces)
                lacking = _lacking(spec, pieces)
                chosen = own if lacking else _distinct(pieces)
                parts = tuple(Part(key=one.spec.key, offsets=at, sizes=one.spec.shape) for at, one in chosen)
                whole = Whole(spec=spec, parts=parts, sharing=shared.get(name), several=several, lacking=lacking)
                found[name] = whole, [record for _, record in chosen]
        return found

    def _of_mesh(self, name: str, shared: Mapping[str, Sharing], pieces: list[_Piece]) -> list[_Piece]:
        """Return the pieces of the ranks that say, as ``shared`` does, which mesh they share the tensor with."""
        mesh = shared[name].ranks if name in shared else None
        mates = joined(ranks for ranks, other in self._shared if name in other and other[name].ranks == mesh)
        return [(at, one) for at, one in pieces if any(holds(mates, rank) for rank in _numbers_in(one.ranks))]


def _numbers_in(ranks: Ranks) -> Iterator[int]:
    return chain.from_iterable(range(start, stop) for start, stop in ranks)


def _shared(record: TreeRecord) -> tuple[Ranks, dict[str, Sharing]]:
    try:
        return record.ranks, sharing_from_bytes(record.document)
    except WireError as error:
        raise CheckpointDamaged(f"how {say_ranks(record.ranks)} shared tensors: {error}") from error


def _distinct(pieces: list[_Piece]) -> list[_Piece]:
    """Return each content of each part once: ranks may have written the same part."""
    found: dict[object, _Piece] = {}
    for offsets, one in pieces:
        found.setdefault((offsets, one.spec.shape, one.digest), (offsets, one))
    return list(found.values())


def _torn_at(pieces: list[_Piece]) -> tuple[int, ...] | None:
    """Return where ranks had different contents of a part: where there are most; None if they had the same."""
    contents = Counter(offsets for offsets, _ in _distinct(pieces))
    offsets, count = contents.most_common(1)[0]
    return offsets if count > 1 else None


def _ranks_of(pieces: list[_Piece]) -> list[Ranks]:
    """Return the ranks that had a part; if ranks had different contents of a part, the ranks of each content."""
    torn = _torn_at(pieces)
    ranks: defaultdict[bytes, list[Ranks]] = defaultdict(list)
    for offsets, one in pieces:
        if torn is None or offsets == torn:
            ranks[b"" if torn is None else one.digest].append(one.ranks)
    return [joined(several) for several in ranks.values()]


def _different_on(ranks: Sequence[Ranks]) -> str:
    return f"ranks had different tensors of this name, on {' and on '.join(map(say_ranks, ranks))}"


def _lacking(spec: TensorSpec, pieces: list[_Piece]) -> str:
    """Return why the pieces are not one tensor; empty if they are. `CheckpointDamaged` if some are missing."""
    if _torn_at(pieces) is not None:
        return _different_on(_ranks_of(pieces))
    wrong = untiled(spec.shape, [(offsets, one.spec.shape) for offsets, one in _distinct(pieces)])
    if wrong is not None:
        raise CheckpointDamaged(f"tensor {spec.key!r}: {wrong}")
    return ""


_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a part, of as many dimensions as the whole."""


def untiled(shape: tuple[int, ...], boxes: Iterable[_Box]) -> str | None:
    """Return what is wrong with the parts of a whole of ``shape``; None if every element is in one part, none in two.

    >>> untiled((4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))])
    >>> untiled((4, 2), [((0, 0), (3, 2)), ((2, 0), (1, 2))])
    'parts at (0, 0) and (2, 0) overlap'
    >>> untiled((4, 2), [((0, 0), (3, 2))])
    'its parts have 6 of 8 elements'
    """
    every = list(boxes)
    for offsets, sizes in every:
        if not len(offsets) == len(sizes) == len(shape):
            return f"a part at {offsets} of {sizes} has other dimensions than {shape}"
        if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
            return f"a part at {offsets} of {sizes} is not inside of {shape}"
    overlap = _overlap([one for one in every if prod(one[1])])
    if overlap is not None:
        return overlap
    held = sum(prod(sizes) for _, sizes in every)
    return None if held == prod(shape) else f"its parts have {held} of {prod(shape)} elements"


def _overlap(boxes: list[_Box]) -> str | None:
    """Return which boxes overlap: the edges of all boxes cut the space into cells, and no cell is in two of them."""
    dims = len(boxes[0][0]) if boxes else 0
    edges = [np.unique([(at[dim], at[dim] + size[dim]) for at, size in boxes]) for dim in range(dims)]
    owners = np.full([len(known) for known in edges], -1)
    for box, (offsets, sizes) in enumerate(boxes):
        ends = ((at, at + size) for at, size in zip(offsets, sizes, strict=True))
        cells = tuple(slice(*known.searchsorted(pair)) for known, pair in zip(edges, ends, strict=True))
        other = int(owners[cells].max())
        if other >= 0:
            return f"parts at {boxes[other][0]} and {offsets} overlap"
        owners[cells] = box
    return None
