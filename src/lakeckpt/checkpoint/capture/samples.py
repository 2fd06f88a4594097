"""This module samples tensors at a cut, and notices changes before the fence that torch does not count.

torch counts changes in place in a version number. It does not count a change through ``.data``, a replay of a CUDA
graph, or a change of a rank's part of a DTensor. So up to 64 spots of 64 bytes, the first and last bytes of slices, are
copied at the cut, and later compared with the same bytes of the capture. A swap of all weights changes nearly all
spots, and is noticed even if it is undone before the fence. A change between the spots is not noticed. The first bytes
of each frozen tensor are a spot, too, as captures skip the tensor.

Of tensors that replicas divide, each replica captures a part, and samples 64 bytes from the middle of each whole one.
The sums of these bytes are equal on replicas that have not drifted apart (`lakeckpt.checkpoint.arena.drift`). The
module starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lakeckpt.checkpoint.capture.links import Link
from lakeckpt.checkpoint.capture.moves import Links, Moves, flat_bytes, link_of, wait_all
from lakeckpt.checkpoint.capture.plan import CapturePlan
from lakeckpt.checkpoint.state.tensors import as_bytes

__all__ = ["Sample", "Samples"]

_BYTES = 64
_SPOTS = 64
_WEIGHTS = np.arange(1, 2 * _BYTES // 8, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
"""Odd numbers: a change of any one word changes the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The spots of one cut: ``moves`` from copies on devices, ``here`` the rows of spots in host memory, and
    ``middles`` the spots of divided tensors, by device, which are there when the moves were made."""

    moves: Moves
    here: torch.Tensor
    middles: list[torch.Tensor]


class Samples:
    """The spots of a plan's late tensors, of which those named in ``frozen`` may be skipped, and of the whole tensors
    that replicas have ``divided``.

    The training thread calls `take` at a cut. The copier calls `changed` later, in the order of cuts.
    """

    def __init__(
        self,
        plan: CapturePlan,
        links: Links,
        frozen: Iterable[str] = (),
        divided: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._plan, self._frozen = plan, frozenset(frozen)
        self._spots = [*_spots(plan), *_spots_of(plan, sorted(self._frozen))]
        self.divided = tuple(sorted(divided or {}))
        """The keys of the tensors that are divided, in the order of `sums`."""
        self._middles = _Middles([divided[key] for key in self.divided] if divided else [], links)
        self._rows = torch.zeros(len(self._spots), _BYTES, dtype=torch.uint8)
        self._moves = Moves()
        self._linked: list[bool] = []
        flats: dict[str, torch.Tensor | None] = {}
        for row, (key, start, stop, _) in zip(self._rows, self._spots, strict=True):
            tensor = plan.late[key]
            if key not in flats:
                flats[key] = flat_bytes(tensor)
            flat = flats[key]
            link = link_of(tensor, links)
            self._linked.append(link is not None)
            if flat is not None:
                self._moves.add(row[: stop - start], flat[start:stop], link)
        self._known = {key for key, flat in flats.items() if flat is not None}

    def are_of(self, plan: CapturePlan, frozen: Iterable[str] = ()) -> bool:
        """Return whether the spots belong to the late tensors of ``plan``, in the same places, and to those that are
        ``frozen``."""
        is_same = self._plan.late is plan.late and self._plan.slices is plan.slices
        return is_same and self._frozen.issuperset(frozen)

    def take(self) -> Sample:
        """Copy the spots as they are now; on a device, after all work that this thread has queued."""
        moves = self._moves.kept()
        return Sample(moves=moves, here=self._rows.clone(), middles=self._middles.take(moves))

    def changed(self, sample: Sample, data: memoryview) -> frozenset[str]:
        """Return the keys of tensors whose bytes in ``data``, a filled generation, differ from the sample."""
        wait_all(sample.moves.make())
        # Rows of a device arrived just now. Rows of host memory are the sample's own, because another cut may have
        # taken a new sample since.
        arrived, here = self._rows.numpy(), sample.here.numpy()
        return frozenset(
            key
            for number, (key, start, stop, at) in enumerate(self._spots)
            if key in self._known
            and (arrived if self._linked[number] else here)[number, : stop - start].tobytes()
            != data[at : at + stop - start]
        )

    def sums(self, sample: Sample) -> bytes:
        """Return 8 bytes of each divided tensor, the sum of its spot. Call it after `changed`, with the same sample."""
        return self._middles.sums(sample.middles)


class _Middles:
    """64 bytes from the middle of each of these contiguous tensors. One call of torch takes those of a device."""

    def __init__(self, tensors: Sequence[torch.Tensor], links: Links) -> None:
        self._count = len(tensors)
        self._devices: dict[torch.device, tuple[Link | None, list[torch.Tensor], list[npt.NDArray[np.int64]]]] = {}
        for number, one in enumerate(tensors):
            start = one.nbytes // 2 // _BYTES * _BYTES
            view = as_bytes(one)[start : start + _BYTES]
            _, views, places = self._devices.setdefault(one.device, (link_of(one, links), [], []))
            views.append(view)
            places.append(np.arange(number * _BYTES, number * _BYTES + len(view)))
        self._places = [np.concatenate(places) for _, _, places in self._devices.values()]

    def take(self, moves: Moves) -> list[torch.Tensor]:
        """Copy them as they are now, and return host memory in which they lie when ``moves`` were made."""
        found = []
        for link, views, _ in self._devices.values():
            together = torch.cat(views)
            if link is None:
                together = together.cpu()
            else:
                link.order()
                source, together = together, torch.empty(together.shape, dtype=torch.uint8)
                moves.add(together, source, link)
            found.append(together)
        return found

    def sums(self, taken: Sequence[torch.Tensor]) -> bytes:
        """Return the sum of each, 8 bytes."""
        rows = np.zeros(self._count * _BYTES, np.uint8)
        for places, one in zip(self._places, taken, strict=True):
            rows[places] = one.numpy()
        words = rows.view(np.uint64).reshape(self._count, _BYTES // 8)
        sums: bytes = (words * _WEIGHTS).sum(axis=1, dtype=np.uint64).tobytes()
        return sums


def _spots_of(plan: CapturePlan, keys: Iterable[str]) -> list[tuple[str, int, int, int]]:
    """Return the first bytes of each of these late tensors, as `_spots` does."""
    places = ((key, plan.table.places[key]) for key in keys)
    return [(key, 0, min(_BYTES, one.spec.size_bytes), one.start) for key, one in places if one.spec.size_bytes]


def _spots(plan: CapturePlan) -> list[tuple[str, int, int, int]]:
    """Return (key, start, stop, place in the data) of the first and last late bytes of some slices. The last slice,
    which is copied last, is always among them."""
    slices = [late for one in plan.slices.slices if (late := [piece for piece in one if piece.key in plan.late])]
    step = -(-2 * len(slices) // _SPOTS) or 1
    found = []
    for pieces in reversed(slices[::-1][::step]):
        first, last = pieces[0], pieces[-1]
        found.append((first.key, first.start, min(first.stop, first.start + _BYTES), first.at))
        start = max(last.start, last.stop - _BYTES)
        found.append((last.key, start, last.stop, last.at + start - last.start))
    return found
