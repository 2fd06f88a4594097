"""This module holds the state that one rank loads, and reads its tensors from the source on request.

A tensor is read whole into new memory, or in part into the memory of a live object. The parts in which ranks saved the
tensor do not matter. The source verifies every byte that it reads. The module starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import Ranks
from lakeckpt.checkpoint.format.parts import SHARING
from lakeckpt.checkpoint.format.sharing import sharing_from_bytes
from lakeckpt.checkpoint.state.random_states import RANDOM, check_random
from lakeckpt.checkpoint.state.rank_differences import Unlike
from lakeckpt.checkpoint.state.tensors import empty_for, in_dim_order
from lakeckpt.checkpoint.state.tree import references, tree_from_bytes, union_of
from lakeckpt.checkpoint.state.wholes import Whole, wholes_of
from lakeckpt.errors import CheckpointDamaged, UnsupportedValue, WireDamaged

__all__ = ["Loaded", "TensorSource", "counted", "loaded_of", "tree_of"]

_BLOCK_BYTES = 64 * 2**20
"""How many bytes of a saved part are read at a time, if they are copied into a tensor of another shape."""


class TensorSource(Protocol):
    """Reads the tensors of a state."""

    def fill(self, into: Mapping[str, memoryview]) -> None:
        """Read each tensor in ``into`` to its buffer (uint8, of the tensor's size), and verify it. `CheckpointDamaged`;
        after an error the buffers may hold anything."""
        ...

    def fill_range(self, key: str, start: int, into: memoryview) -> None:
        """Read and verify the bytes of one tensor from ``start`` on, as many as ``into`` takes."""
        ...

    def unit_bytes(self, key: str) -> int:
        """Return how many bytes of a tensor are verified together. A range that ends inside such a unit reads all of
        the unit."""
        ...

    def same(self, one: str, other: str) -> bool:
        """Return whether two tensors hold the same bytes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The state of one rank. Its tensors are not read yet."""

    trees: Mapping[str, Any]
    """item → its tree, with a ``TensorRef`` for each tensor; random states not among them."""
    kinds: Mapping[str, str]
    """item → the class of the optimizer whose state it is, or a mark for a module; empty for other items."""
    specs: Mapping[str, TensorSpec]
    """key → what the tensor is; of a tensor in parts, what the whole is."""
    wholes: Mapping[str, Whole]
    """key → the parts of each tensor that was saved in parts."""
    source: TensorSource
    random: dict[str, Any] | None
    """The random states of this rank; None if the rank is new."""
    per_rank: tuple[str, ...]
    """The units whose contents differed between ranks."""
    of_all: Callable[[], Loaded] | None = None
    """Loads the same state with the parts of all ranks, if ``wholes`` have this rank's own parts alone."""
    merged: frozenset[str] = frozenset()
    """The modules and optimizers that differed between ranks, as the stages of a pipeline do, and whose states were
    merged. A rank may need less than they hold."""
    unlike: Unlike | None = None
    """After a change of the world size: the tensors whose contents differed between ranks."""
    check: Callable[[], None] = lambda: None
    """Verifies the heads and sizes of the files that this rank will read."""

    def whole(self, key: str) -> Whole:
        """Return the parts in which a tensor was saved. A plain tensor is its own single part."""
        return self.wholes[key] if key in self.wholes else Whole.plain(self.specs[key])

    def with_part(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], *, ranks: Ranks | None = None
    ) -> Loaded:
        """Return the loaded state that can read a part of a tensor: this one if the rank held exactly this part and the
        same ``ranks`` share the tensor, else the one with the parts of all ranks."""
        if self.of_all is None or key not in self.wholes:
            return self
        known = self.wholes[key]
        is_alike = ranks is None or (known.sharing is not None and known.sharing.ranks == ranks)
        return self if is_alike and known.part_at(offsets, sizes) else self.of_all()

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read whole tensors into new host memory, verified and contiguous. `CheckpointDamaged`."""
        made = {key: empty_for(self.specs[key]) for key in keys}
        self.source.fill({key: view for key, (_, view) in made.items() if key not in self.wholes})
        for key, (tensor, _) in made.items():
            if key in self.wholes:
                self.read_part(key, (0,) * tensor.dim(), tensor)
        return {key: tensor for key, (tensor, _) in made.items()}

    def read_as_saved(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read as `read` does, with the dimensions in memory in the order in which they were saved."""
        orders = {one.key: one.dim_order for tree in self.trees.values() for one in references(tree)}
        return {key: in_dim_order(tensor, orders.get(key)) for key, tensor in self.read(keys).items()}

    def read_part(self, key: str, offsets: tuple[int, ...], into: torch.Tensor) -> None:
        """Fill ``into`` with the part of a tensor that begins at ``offsets``, from one saved part after the other.

        Every byte is verified. Only the rows that ``into`` needs are read, a block at a time: the memory taken beside
        ``into`` is bounded by a block, or by one row.
        """
        knowing = self.with_part(key, offsets, tuple(into.shape))
        if knowing is not self:
            return knowing.read_part(key, offsets, into)
        whole = self.whole(key)
        shapes = {part.key: part.sizes for part in whole.parts}
        for region in whole.regions(offsets, tuple(into.shape)):
            target = into
            for dim, size in enumerate(region.sizes):
                target = target.narrow(dim, region.target[dim], size)
            spec = TensorSpec(key=region.key, dtype=whole.spec.dtype, shape=shapes[region.key])
            if not spec.shape:
                rows, view = empty_for(spec)
                self.source.fill({region.key: view})
                _copy(rows, target)
                continue
            first, stop = region.source[0], region.source[0] + region.sizes[0]
            for low, rows in self._rows(spec, first, stop):
                for dim in range(1, len(spec.shape)):
                    rows = rows.narrow(dim, region.source[dim], region.sizes[dim])
                _copy(rows, target.narrow(0, low - first, len(rows)))

    def _rows(self, spec: TensorSpec, first: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield rows [first, stop) of a tensor as it was saved, in blocks: (number of the first row, block)."""
        row_bytes = spec.size_bytes // spec.shape[0]
        block = max(1, max(_BLOCK_BYTES, self.source.unit_bytes(spec.key)) // row_bytes)
        for low in range(first, stop, block):
            count = min(block, stop - low)
            rows, view = empty_for(TensorSpec(key=spec.key, dtype=spec.dtype, shape=(count, *spec.shape[1:])))
            self.source.fill_range(spec.key, low * row_bytes, view)
            yield low, rows


class _Counted:
    """A source whose bytes are counted."""

    __slots__ = ("_count", "_source", "same", "unit_bytes")

    def __init__(self, source: TensorSource, count: Callable[[int], None]) -> None:
        self._source, self._count = source, count
        self.same, self.unit_bytes = source.same, source.unit_bytes

    def fill(self, into: Mapping[str, memoryview]) -> None:
        self._source.fill(into)
        self._count(sum(map(len, into.values())))

    def fill_range(self, key: str, start: int, into: memoryview) -> None:
        self._source.fill_range(key, start, into)
        self._count(len(into))


def counted(loaded: Loaded, count: Callable[[int], None]) -> Loaded:
    """Return the same state, which calls ``count`` with the number of bytes that were read from its source."""
    of_all = loaded.of_all
    return replace(
        loaded,
        source=_Counted(loaded.source, count),
        of_all=None if of_all is None else lambda: counted(of_all(), count),
    )


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def loaded_of(
    documents: Mapping[str, bytes],
    *,
    specs: Mapping[str, TensorSpec],
    source: TensorSource,
    what: str,
    wholes: Mapping[str, Whole] | None = None,
    per_rank: tuple[str, ...] = (),
    divided: Mapping[str, Sequence[bytes]] = MappingProxyType({}),
) -> Loaded:
    """Return the state that the ``documents`` of trees (random states among them) and ``source`` make up.

    ``wholes``: the tensors in parts; None: those of which there are parts among ``specs``, of this rank alone.
    ``divided``: the documents of all ranks for items whose states are merged. ``what`` names the state in errors.
    `CheckpointDamaged` if documents and tensors do not match.
    """
    if wholes is None:
        wholes = wholes_of(specs, sharing_from_bytes(documents[SHARING]) if SHARING in documents else {})
    read = {item: tree_of(item, document) for item, document in documents.items() if item != SHARING}
    for item, more in divided.items():
        for tree, kind in (tree_of(item, document) for document in more):
            read[item] = (union_of(read[item][0], tree) if item in read else tree), kind
    trees = {item: tree for item, (tree, _) in read.items()}
    specs = {**specs, **{key: whole.spec for key, whole in wholes.items()}}
    if RANDOM not in trees:
        raise CheckpointDamaged(f"{what} has no random states")
    for item, tree in trees.items():
        for one in references(tree):
            if one.key not in specs:
                raise CheckpointDamaged(f"the state of {item!r} refers to the tensor {one.key!r}, which no part holds")
    random = check_random(trees.pop(RANDOM))
    return Loaded(
        trees=trees,
        kinds={item: kind for item, (_, kind) in read.items()},
        merged=frozenset(divided),
        specs=specs,
        wholes=wholes,
        source=source,
        random=random,
        per_rank=per_rank,
    )


def tree_of(item: str, document: bytes) -> tuple[Any, str]:
    """Return the tree of an item and its kind (`lakeckpt.checkpoint.state.tree.Flat`). `CheckpointDamaged`."""
    try:
        return tree_from_bytes(document)
    except (WireDamaged, UnsupportedValue) as error:
        raise CheckpointDamaged(f"the state of {item!r}: {error}") from error
