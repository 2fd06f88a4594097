"""Which bytes of the state go where in a generation, and which of them may wait?  Planned once, reused while they hold.

::

    0                early_bytes                                            data_bytes
    | taken at the cut | may wait until the next update: parameters, moments … |

What may change before the next update (buffers, learning rates that are tensors, whatever is no module and no
optimizer, parameters that no optimizer of ours updates) is *early*: it lies in front, in a zone with room to spare, so
that it may come and go without another arena. The rest is *late*, in slices that are admitted one by one. A parameter
that asks for no gradient and that no optimizer updates is late, too, and *still*: each copy is compared with the last.

A plan holds the live tensors. It reads no clock and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lakeckpt.checkpoint.arena.contents import TensorPlace, TensorTable
from lakeckpt.checkpoint.arena.slices import SlicePlan, aligned, fitting_slice_bytes, plan_slices
from lakeckpt.checkpoint.capturing.sources import Source
from lakeckpt.checkpoint.tensors import spec_of

__all__ = ["CapturePlan", "Parted", "part", "plan_capture"]

_ROOM_BYTES = 64 * 2**10
_SMALL_BYTES = 64 * 2**10
_EARLY = ""  # no key of a tensor is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """The tensors of the state, by when they have to be taken."""

    early: Mapping[str, torch.Tensor]
    late: Mapping[str, torch.Tensor]
    still: frozenset[str]
    """Those late ones that nothing is known to change."""

    def parts_as(self, other: Parted) -> bool:
        """Whether the same keys are late and still: an optimizer may have been given more parameters."""
        return self.late.keys() == other.late.keys() and self.still == other.still


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """Where everything lies. ``slices`` are of the whole data; its pieces of the key "" are the early zone."""

    parted: Parted
    slices: SlicePlan
    early_bytes: int
    early: Mapping[str, int]
    """key → where it begins."""
    table: TensorTable
    late_bytes: int
    """What is copied in slices."""


def part(
    sources: Sequence[Source], optimizers: Iterable[torch.optim.Optimizer], *, moving: frozenset[str] = frozenset()
) -> Parted:
    """Part the tensors of ``sources``. ``moving``: late ones that change unannounced, and are early then."""
    owned = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    early: dict[str, torch.Tensor] = {}
    late: dict[str, torch.Tensor] = {}
    still: dict[str, torch.Tensor] = {}
    for source in sources:
        for key, tensor in source.tensors.items():
            known = source.known_as(key)
            if key in source.changing or key in moving:
                early[key] = tensor
            elif not isinstance(known, torch.nn.Parameter) or id(known) in owned:
                late[key] = tensor
            elif known.requires_grad:
                early[key] = tensor
            else:
                still[key] = tensor
    return Parted(early=early, late=_together({**late, **still}), still=frozenset(still))


def _together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of a device together, the small ones of each first: what is gathered there must lie side by side."""
    return dict(sorted(tensors.items(), key=lambda one: (str(one[1].device), one[1].nbytes > _SMALL_BYTES)))


def plan_capture(parted: Parted, *, before: CapturePlan | None = None, slice_bytes: int | None = None) -> CapturePlan:
    """Plan for ``parted``. The early zone keeps the size that it had ``before`` where what is early fits into it.

    ``slice_bytes``: None for what fits the size of the state (`fitting_slice_bytes`).
    """
    same_late = before is not None and before.parted.late is parted.late
    specs = {key: spec_of(key, tensor) for key, tensor in parted.early.items()}
    if before is not None and same_late:
        specs |= {key: before.table.places[key].spec for key in parted.late}
    else:
        specs |= {key: spec_of(key, tensor) for key, tensor in parted.late.items()}
    starts, end = {}, 0
    for key in parted.early:
        starts[key] = aligned(end, specs[key].size_bytes)
        end = starts[key] + specs[key].size_bytes
    fits = before is not None and end <= before.early_bytes
    early_bytes = before.early_bytes if before is not None and fits else _with_room(end)
    if before is not None and same_late and fits:
        slices = before.slices
    else:
        sizes = {_EARLY: early_bytes, **{key: specs[key].size_bytes for key in parted.late}}
        slices = plan_slices(sizes, slice_bytes=slice_bytes or _fitting(sizes, parted))
    places = {key: TensorPlace(spec=specs[key], start=starts[key]) for key in parted.early}
    places |= {key: TensorPlace(spec=specs[key], start=slices.places[key][0]) for key in parted.late}
    same = before is not None and before.table.places == places
    table = before.table if before is not None and same else TensorTable(places=places)
    late_bytes = sum(specs[key].size_bytes for key in parted.late)
    return CapturePlan(
        parted=parted, slices=slices, early_bytes=early_bytes, early=starts, table=table, late_bytes=late_bytes
    )


def _fitting(sizes: Mapping[str, int], parted: Parted) -> int:
    """For ``sizes``; larger where something of it comes from a device."""
    linked = any(one.device.type != "cpu" for one in parted.late.values())
    return fitting_slice_bytes(sum(sizes.values()), linked=linked)


def _with_room(size_bytes: int) -> int:
    """A quarter more, in full steps: what is early may grow a little."""
    return -(-(size_bytes + size_bytes // 4 + 1) // _ROOM_BYTES) * _ROOM_BYTES
