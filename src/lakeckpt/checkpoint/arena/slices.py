"""This module plans where each tensor lies in an arena, and in which slices it is copied.

Tensors lie one behind the other, in the order in which they were named, each at a multiple of 64 bytes. Large tensors
lie at whole pages, so that they can be written to a disk from there. The largest lie at whole leaves of digests
(`lakeckpt.checkpoint.format.digests`), so that the checksums of the memory are those of their contents. The whole is
cut into slices of one size (the last may be shorter), whatever tensors they hold: many small tensors are one slice, a
large tensor is many. A slice is admitted into a bubble and copied as a whole, and has a checksum.

The module is pure: it needs no tensors, no memory and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lakeckpt.checkpoint.format.digests import LEAF_BYTES, short_digest
from lakeckpt.lake.storage.direct import PAGE_BYTES, STRAIGHT_BYTES

__all__ = ["SlicePiece", "SlicePlan", "aligned", "fitting_slice_bytes", "plan_slices"]

_MOST_SLICE_BYTES = 16 * 2**20
_FEW = 256
_LEAST_LINK_BYTES = 4 * 2**20
"""Smaller slices do not use all of the bandwidth from a device into host memory."""
_MOST_LINK_BYTES = 64 * 2**20
_FEW_OF_LINK = 64
_ALIGNMENT = 64
_LEAVES_FROM_BYTES = 8 * LEAF_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePiece:
    """Bytes [start, stop) of the tensor ``key``, which are copied to ``at`` in the arena's data."""

    key: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """``places``: key → (where its bytes begin, how many they are). ``slices[n]``: the pieces of tensors in slice n."""

    places: Mapping[str, tuple[int, int]]
    slice_bytes: int
    slices: tuple[tuple[SlicePiece, ...], ...]
    digest: bytes = field(init=False)
    """The digest of the places and the size of slices: arenas of equal digest are laid out alike."""

    def __post_init__(self) -> None:
        parts = [self.slice_bytes.to_bytes(8, "big")]
        for key, (at, size) in self.places.items():
            parts += [key.encode("utf-8", "surrogatepass"), at.to_bytes(8, "big"), size.to_bytes(8, "big")]
        object.__setattr__(self, "digest", short_digest(*parts))

    @property
    def data_bytes(self) -> int:
        """The size of one generation: up to the end of the last tensor."""
        return max((at + size for at, size in self.places.values()), default=0)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return where slice ``number`` begins and ends."""
        return number * self.slice_bytes, min((number + 1) * self.slice_bytes, self.data_bytes)


def fitting_slice_bytes(size_bytes: int, *, linked: bool = False) -> int:
    """Return the size of slices if ``size_bytes`` are to be copied: a power of two that makes 256 slices or more,
    from a leaf of digests (1 MiB) to 16 MiB; ``linked``, from a device, 64 or more, from 4 MiB to 64 MiB.

    When a bubble ends, most of a slice lies outside of it. So the number of slices counts: with 256 slices, the ends
    of five bubbles cost less than 2 % of the bytes. On the link of a GPU, 64 MiB take a millisecond, and to queue the
    copy costs the thread that trains a tenth of that.

    >>> [fitting_slice_bytes(size) >> 20 for size in (10**6, 300 * 2**20, 2_400_000_000, 10**11)]
    [1, 1, 8, 16]
    >>> [fitting_slice_bytes(size, linked=True) >> 20 for size in (10**6, 300 * 2**20, 2_400_000_000, 10**11)]
    [4, 4, 32, 64]
    """
    found, least, few = _MOST_SLICE_BYTES, LEAF_BYTES, _FEW
    if linked:
        found, least, few = _MOST_LINK_BYTES, _LEAST_LINK_BYTES, _FEW_OF_LINK
    while found > least and size_bytes < few * found:
        found //= 2
    return found


def plan_slices(sizes: Mapping[str, int], *, slice_bytes: int) -> SlicePlan:
    """Return the plan for tensors of ``sizes`` (key → bytes). ``slice_bytes`` is a multiple of 64.

    >>> plan = plan_slices({"weight": 100, "bias": 8}, slice_bytes=64)
    >>> plan.places["bias"], [[piece.key for piece in one] for one in plan.slices]
    ((128, 8), [['weight'], ['weight'], ['bias']])
    """
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for key, size in sizes.items():
        begin = aligned(end, size)
        places[key] = (begin, size)
        end = begin + size
    return SlicePlan(places=places, slice_bytes=slice_bytes, slices=_slices(places, slice_bytes, end))


def aligned(end: int, size_bytes: int) -> int:
    """Return where a tensor of ``size_bytes`` begins, after a tensor that ends at ``end``."""
    alignment = PAGE_BYTES if size_bytes >= STRAIGHT_BYTES else _ALIGNMENT
    if size_bytes >= _LEAVES_FROM_BYTES or (size_bytes % LEAF_BYTES == 0 and 2 * size_bytes >= _LEAVES_FROM_BYTES):
        alignment = LEAF_BYTES  # at most an eighth of it is lost
    return -(-end // alignment) * alignment


def _slices(places: Mapping[str, tuple[int, int]], slice_bytes: int, end: int) -> tuple[tuple[SlicePiece, ...], ...]:
    found: list[list[SlicePiece]] = [[] for _ in range(0, end, slice_bytes)]
    for key, (at, size) in places.items():
        for number in range(at // slice_bytes, -(-(at + size) // slice_bytes) if size else 0):
            start, stop = max(number * slice_bytes, at), min((number + 1) * slice_bytes, at + size)
            found[number].append(SlicePiece(key=key, start=start - at, stop=stop - at, at=start))
    return tuple(map(tuple, found))
