"""This module plans the place of each tensor in a generation, and which tensors are copied at the cut.

::

    0              early_bytes                                      data_bytes
    | copied at the cut | copied beside training, before the fence: parameters, moments … |

*Early* tensors may change before the next optimizer step: buffers, learning rates that are tensors, tensors of objects
that hold neither modules nor optimizers. They come first, in a zone with spare room, so that early tensors can be added
and removed without a new arena. *Late* tensors change in optimizer steps. They lie in slices, which are admitted one by
one.

A `Planner` makes a new plan only if tensors, memory or sizes have changed. Only the training thread calls it. The
module copies nothing and starts no threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lakeckpt.checkpoint.arena.contents import TensorPlace, TensorTable
from lakeckpt.checkpoint.arena.slices import SlicePlan, aligned, fitting_slice_bytes, plan_slices
from lakeckpt.checkpoint.capture.sources import Renewed, Sources
from lakeckpt.checkpoint.state.tensors import refuse_overlaps, spec_of
from lakeckpt.errors import CaptureWarning

__all__ = ["CapturePlan", "Planner", "plan_capture"]

_ROOM_BYTES = 64 * 2**10
_SMALL_BYTES = 64 * 2**10
_EARLY = ""  # no key of a tensor is empty
_MOST_EARLY = 0.01
"""A larger share of early bytes raises a warning, if they are at least `_MUCH_BYTES`."""
_MUCH_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """The places of all tensors. ``slices`` divide the whole data; their pieces with the key "" are the early zone."""

    early: Mapping[str, torch.Tensor]
    late: Mapping[str, torch.Tensor]
    slices: SlicePlan
    early_bytes: int
    starts: Mapping[str, int]
    """key of an early tensor → its first byte in the data."""
    table: TensorTable
    late_bytes: int


class Planner:
    """Plans the state of ``objects``, in slices of ``slice_bytes`` (None: a size that fits the size of the state)."""

    __slots__ = ("_objects", "_plan", "_slice_bytes", "_sources", "_warned")

    def __init__(self, objects: Mapping[str, Any], *, slice_bytes: int | None) -> None:
        self._objects, self._slice_bytes = objects, slice_bytes
        self._sources: Sources | None = None
        self._plan: CapturePlan | None = None
        self._warned = False

    @property
    def late(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the last plan copies beside training."""
        return {} if self._plan is None else self._plan.late

    def unchanged(self) -> dict[str, int]:
        """Return how often each frozen tensor of the last plan was changed, by its key, as torch counts it."""
        frozen = {} if self._sources is None else self._sources.frozen
        return {
            key: parameter._version
            for key, parameter in frozen.items()
            if not parameter.requires_grad and not parameter.is_inference()
        }

    def renewed(self) -> CapturePlan:
        """Return the plan for the state as it is now: the plan before, if it still fits."""
        before, sources, renewed = self._plan, self._sources, Renewed.LATE
        self._plan = self._sources = None  # after an error here, the next call takes everything apart again
        if sources is None:
            sources = Sources(self._objects)
        else:
            renewed = sources.renew()
        self._sources = sources
        if before is not None and renewed is Renewed.NOTHING:
            self._plan = before
            return before
        if before is None:
            refuse_overlaps({**sources.early, **sources.late})
        # The same mapping object means that the copies of late tensors need not be prepared again.
        is_same = before is not None and renewed is Renewed.EARLY
        late = before.late if before is not None and is_same else _together(sources.late, sources.frozen)
        self._plan = plan_capture(sources.early, late, before=before, slice_bytes=self._slice_bytes)
        self._warn_of_early(self._plan)
        return self._plan

    def _warn_of_early(self, plan: CapturePlan) -> None:
        early_bytes = sum(one.nbytes for one in plan.early.values())
        all_bytes = early_bytes + plan.late_bytes
        if self._warned or early_bytes < max(_MUCH_BYTES, _MOST_EARLY * all_bytes):
            return
        self._warned = True
        largest = max(plan.early, key=lambda key: plan.early[key].nbytes)
        warnings.warn(
            f"captures copy {early_bytes / all_bytes:.0%} of the state ({early_bytes / 2**20:.0f} MiB) at each cut, "
            f"while training waits; the largest tensor of it is {largest!r}. Parameters of modules and states of "
            "optimizers are copied beside training: put the module and the optimizer themselves into the state, or "
            "keep them in attributes of the object that wraps them",
            CaptureWarning,
            stacklevel=5,
        )

    def trees(self) -> dict[str, Callable[[], bytes]]:
        """Return for each object a function that makes the document of its present tree. Any thread may call the
        functions, at any later time."""
        assert self._sources is not None
        return self._sources.documents()


def _together(late: Mapping[str, torch.Tensor], frozen: Container[str]) -> dict[str, torch.Tensor]:
    """Return the late tensors, sorted by device, frozen ones last: captures skip what lies there. Small ones come
    first: tensors that are gathered must be adjacent."""
    return dict(
        sorted(late.items(), key=lambda one: (str(one[1].device), one[0] in frozen, one[1].nbytes > _SMALL_BYTES))
    )


def plan_capture(
    early: Mapping[str, torch.Tensor],
    late: Mapping[str, torch.Tensor],
    *,
    before: CapturePlan | None = None,
    slice_bytes: int | None = None,
) -> CapturePlan:
    """Return the plan for these tensors. The early zone keeps its size in the plan ``before`` if the early tensors fit.

    ``slice_bytes``: the size of slices; None for a size that fits the size of the state (`fitting_slice_bytes`).
    """
    same_late = before is not None and before.late is late
    specs = {key: spec_of(key, tensor) for key, tensor in early.items()}
    if before is not None and same_late:
        specs |= {key: before.table.places[key].spec for key in late}
    else:
        specs |= {key: spec_of(key, tensor) for key, tensor in late.items()}
    starts, end = {}, 0
    for key in early:
        starts[key] = aligned(end, specs[key].size_bytes)
        end = starts[key] + specs[key].size_bytes
    fits = before is not None and end <= before.early_bytes
    early_bytes = before.early_bytes if before is not None and fits else _with_room(end)
    if before is not None and same_late and fits:
        slices = before.slices
    else:
        sizes = {_EARLY: early_bytes, **{key: specs[key].size_bytes for key in late}}
        slices = plan_slices(sizes, slice_bytes=slice_bytes or _fitting(sizes, late))
    places = {key: TensorPlace(spec=specs[key], start=starts[key]) for key in early}
    places |= {key: TensorPlace(spec=specs[key], start=slices.places[key][0]) for key in late}
    same = before is not None and before.table.places == places
    return CapturePlan(
        early=early,
        late=late,
        slices=slices,
        early_bytes=early_bytes,
        starts=starts,
        table=before.table if before is not None and same else TensorTable(places=places),
        late_bytes=sum(specs[key].size_bytes for key in late),
    )


def _fitting(sizes: Mapping[str, int], late: Mapping[str, torch.Tensor]) -> int:
    """Return the size of slices that fits ``sizes``; it is larger if a tensor comes from a device."""
    linked = any(one.device.type != "cpu" for one in late.values())
    return fitting_slice_bytes(sum(sizes.values()), linked=linked)


def _with_room(size_bytes: int) -> int:
    """Return a size with room for a quarter more, rounded up to full steps: early tensors may grow a little."""
    return -(-(size_bytes + size_bytes // 4 + 1) // _ROOM_BYTES) * _ROOM_BYTES
