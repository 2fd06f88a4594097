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
from torch.nn.parallel import DistributedDataParallel as DDP

from lakeckpt.checkpoint.arena.contents import TensorPlace, TensorTable
from lakeckpt.checkpoint.arena.dividing import Division, RowBox
from lakeckpt.checkpoint.arena.slices import SlicePlan, aligned, fitting_slice_bytes, plan_slices
from lakeckpt.checkpoint.capture.sources import Renewed, Sources
from lakeckpt.checkpoint.capture.state_watch import parts_of
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.parts import SHARING
from lakeckpt.checkpoint.format.sharing import is_part_key, sharing_to_bytes
from lakeckpt.checkpoint.state.tensors import refuse_overlaps, spec_of, sums_of
from lakeckpt.errors import CaptureWarning

__all__ = ["CapturePlan", "Planner", "kept_alike", "plan_capture"]

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

    __slots__ = ("_divided", "_division", "_names", "_objects", "_plan", "_slice_bytes", "_sources", "_warned")

    def __init__(self, objects: Mapping[str, Any], *, slice_bytes: int | None) -> None:
        self._objects, self._slice_bytes = objects, slice_bytes
        self._sources: Sources | None = None
        self._plan: CapturePlan | None = None
        self._warned = False
        self._division: Division | None = None
        self._names: Mapping[str, str] = {}  # the key of a box of a divided tensor → the tensor's
        self._divided: Mapping[str, torch.Tensor] = {}  # all tensors that are divided

    def divide(self, division: Division | None) -> None:
        """Plan this rank's share of the state from now on; None: all of it."""
        self._division, self._plan, self._sources = division, None, None
        self._names, self._divided = {}, {}

    def divisible(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the state as it is now that replicas could divide; none if ranks divide tensors of the
        state already, by a mesh, or if nothing keeps them alike."""
        if not kept_alike(self._objects):
            return {}
        sources = Sources(self._objects)
        late = {} if sources.shared else sources.late
        return {key: one for key, one in late.items() if _can_be_divided(key, one)}

    def replica(self) -> bytes:
        """Return a digest of the tensors that replicas could divide, equal on ranks that are alike; empty if there are
        no such tensors. Raises as `renewed`."""
        divisible = self.divisible()
        parts = [part for key, one in sorted(sums_of(divisible).items()) for part in (key.encode(), one)]
        return short_digest(*parts) if divisible else b""

    @property
    def divided(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the replicas of this node divide, by the keys of the whole tensors."""
        return self._divided

    def _share(self, late: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return what this rank captures of the late tensors. Parts of DTensors are its own."""
        division = self._division
        if division is None:
            return late
        divided = {key: one for key, one in late.items() if _can_be_divided(key, one)}
        boxes = division.boxes({key: spec_of(key, divided[key]) for key in sorted(divided)})
        self._divided, self._names = divided, {one.key: one.name for one in boxes}
        own = {key: one for key, one in late.items() if key not in divided}
        return own | {one.key: _rows(divided[one.name], one) for one in boxes}

    @property
    def late(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the last plan copies beside training."""
        return {} if self._plan is None else self._plan.late

    def unchanged(self) -> dict[str, int]:
        """Return how often each frozen tensor of the last plan was changed, by its key, as torch counts it."""
        frozen = {} if self._sources is None else self._sources.frozen
        return {
            key: parameter._version
            for key in self.late
            if (parameter := frozen.get(self._names.get(key, key))) is not None
            and not (parameter.requires_grad or parameter.is_inference())
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
        if before is not None and is_same:
            late = before.late
        else:
            share = self._share(sources.late)
            late = _together(share, {key for key in share if self._names.get(key, key) in sources.frozen})
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
        documents = self._sources.documents()
        if self._division is not None:
            document = sharing_to_bytes(self._sources.shared | dict.fromkeys(self._divided, self._division.sharing))
            documents[SHARING] = lambda: document
        return documents


def kept_alike(objects: Mapping[str, Any]) -> bool:
    """Return whether DistributedDataParallel keeps all parameters that the state's optimizers train alike on all ranks.
    Without an optimizer in the state, all that need a gradient count."""
    parts = [part for one in objects.values() for part in parts_of(one)]
    tops = [part for part in parts if isinstance(part, torch.nn.Module)]
    kept = {id(p) for top in tops for one in top.modules() if isinstance(one, DDP) for p in one.parameters()}
    groups = [group for part in parts if isinstance(part, torch.optim.Optimizer) for group in part.param_groups]
    trained = {id(p) for group in groups for p in group["params"]}
    trained = trained or {id(p) for top in tops for p in top.parameters() if p.requires_grad}
    return bool(trained) and trained <= kept


def _can_be_divided(key: str, tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and tensor.is_contiguous() and not is_part_key(key)


def _rows(tensor: torch.Tensor, box: RowBox) -> torch.Tensor:
    return tensor if not tensor.dim() else tensor.detach()[box.first : box.stop]


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
