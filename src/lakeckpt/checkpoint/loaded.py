"""What did a rank have?  Its state, of which the tensors are still where they were saved.

They are read when it is known where to: whole, into new memory, or a part of one into that of a live object, whoever
saved it in which parts. Every byte is verified on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.fields import Ranks
from lakeckpt.checkpoint.shards import Whole
from lakeckpt.checkpoint.tensors import empty_for, in_dim_order
from lakeckpt.checkpoint.unlike import Unlike

__all__ = ["Loaded", "TensorSource"]

_BLOCK_BYTES = 64 * 2**20
"""Of a part of a tensor, so many are read at a time on their way to another shape."""


def _nothing() -> None:
    """There is nothing to verify before tensors are read."""


class TensorSource(Protocol):
    """Where the tensors of a state are."""

    def fill(self, into: Mapping[str, memoryview]) -> None:
        """Put the tensors named into these buffers (uint8, of their sizes), verified. `CheckpointDamaged`: the buffers
        may hold anything then."""
        ...

    def fill_range(self, key: str, start: int, into: memoryview) -> None:
        """The same with the bytes of one tensor from ``start`` on."""
        ...

    def unit_bytes(self, key: str) -> int:
        """Of a tensor, how many bytes are verified together: a range that is not made of such takes more than that."""
        ...

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same bytes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The state of one rank, of which the tensors are still where they were saved."""

    trees: Mapping[str, Any]
    """item → its tree, with a ``TensorRef`` for each tensor; random states not among them."""
    specs: Mapping[str, TensorSpec]
    """key → the spec of each tensor: of wholes, where they were saved in parts."""
    wholes: Mapping[str, Whole]
    """key → the parts of each tensor that was saved in parts."""
    source: TensorSource
    random: dict[str, Any] | None
    """The random states of this rank; None where it is new."""
    per_rank: tuple[str, ...]
    """The units of which ranks had different contents."""
    is_own: bool = False
    """Whether it is what this rank of several had, and nobody knows what the others have."""
    of_all: Callable[[], Loaded] | None = None
    """Where ``wholes`` have this rank's own parts alone: gives the same with those of all ranks."""
    dim_orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """key → how a tensor lay in memory, of those that did not lie row by row."""
    unlike: Unlike | None = None
    """After a change of the world size: which tensors ranks had different contents of."""
    check: Callable[[], None] = _nothing
    """Verifies the heads and sizes of the files that this rank will read, and its share of what no rank reads."""

    def whole(self, key: str) -> Whole:
        """In which parts a tensor was saved: a plain one in one."""
        return self.wholes[key] if key in self.wholes else Whole.plain(self.specs[key])

    def with_part(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], *, ranks: Ranks | None = None
    ) -> Loaded:
        """What knows where a part of a tensor is: this, unless the rank did not hold just that part, or other ``ranks``
        share it now."""
        if self.of_all is None or key not in self.wholes:
            return self
        known = self.wholes[key]
        is_alike = ranks is None or (known.sharing is not None and known.sharing.ranks == ranks)
        return self if is_alike and known.has(offsets, sizes) else self.of_all()

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors in new host memory, whole, verified and contiguous."""
        made = {key: empty_for(self.specs[key]) for key in keys}
        self.source.fill({key: view for key, (_, view) in made.items() if key not in self.wholes})
        for key, (tensor, _) in made.items():
            if key in self.wholes:
                self.read_part(key, (0,) * tensor.dim(), tensor)
        return {key: tensor for key, (tensor, _) in made.items()}

    def read_as_saved(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """What `read` gives, laid out in memory as the tensors were that were saved."""
        found = self.read(keys)
        for key in found.keys() & self.dim_orders.keys():
            found[key] = in_dim_order(found[key], self.dim_orders[key])
        return found

    def read_part(self, key: str, offsets: tuple[int, ...], into: torch.Tensor) -> None:
        """Fill ``into`` with what begins at ``offsets`` in a tensor, from one saved part after the other; verified.

        Of a part, those rows are read that are wanted, some at a time: beside ``into``, a bounded number of bytes is
        taken (or one row).
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
        """Rows [first, stop) of a tensor as it was saved: the number of the first one of each block, and the block."""
        row_bytes = spec.size_bytes // spec.shape[0]
        block = max(1, max(_BLOCK_BYTES, self.source.unit_bytes(spec.key)) // row_bytes)
        for low in range(first, stop, block):
            count = min(block, stop - low)
            rows, view = empty_for(TensorSpec(key=spec.key, dtype=spec.dtype, shape=(count, *spec.shape[1:])))
            self.source.fill_range(spec.key, low * row_bytes, view)
            yield low, rows


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
