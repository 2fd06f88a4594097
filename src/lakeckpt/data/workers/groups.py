"""This module defines what crosses torch's queue from a loader's worker: a group of micro-batches, by slots and forms.

The micro-batches themselves lie in slots of shared memory. A `Group` is pickled as numbers: where each micro-batch
lies, how large its arrays are, and which form it has. When the main process unpickles a group, the group takes a lease
of each slot. So a slot is free again as soon as nobody refers to its bytes, also where torch drops a group that nobody
wants any more. The module starts no threads; torch's pinning thread calls `Group.pin_memory`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lakeckpt.core.receipts import Receipt
from lakeckpt.data.workers.packing import Form
from lakeckpt.data.workers.slots import SlotMemory

__all__ = ["Arrived", "Group", "pinned_copy"]

Written = tuple[int, int, int, list[int], int]
"""Where a micro-batch lies: (step, offset, bytes, sizes of its arrays, number of its form in the group)."""
_NOTHING = np.empty(0, np.uint8)


@dataclass(slots=True)
class Arrived:
    """One micro-batch in the main process. ``slab`` is uint8: an array over a slot, or a tensor in pinned memory."""

    step: int
    form: Form
    sizes: list[int]
    slab: npt.NDArray[np.uint8] | torch.Tensor


@dataclass(slots=True)
class Group:
    """Micro-batches of one worker, in order."""

    worker: int
    memory: int
    """The number of the slot memory (`SlotMemory.numbered`)."""
    over: bool = False
    """Whether the worker gives no more micro-batches in this iteration: all are read, or there was an error."""
    error: Any = None
    """Why the worker ended its reading behind these micro-batches: an exception, or an `ExceptionWrapper`."""
    size_bytes: int = 0
    written: list[Written] = field(default_factory=list)
    """In the worker: the micro-batches."""
    arrived: deque[Arrived] = field(default_factory=deque)
    """In the main process: the micro-batches."""
    forms: dict[Form, int] = field(default_factory=dict)

    def add(self, receipt: Receipt, form: Form, offset: int, size_bytes: int, sizes: list[int]) -> None:
        """Note one more micro-batch, which the worker has written at ``offset``."""
        number = self.forms.setdefault(form, len(self.forms))
        self.written.append((receipt.step, offset, size_bytes, sizes, number))
        self.size_bytes += size_bytes

    def pin_memory(self, device: Any = None) -> Group:
        """Copy the micro-batches into pinned memory, which frees their slots."""
        for one in self.arrived:
            if len(one.slab):
                one.slab = pinned_copy(one.slab)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        about = (self.worker, self.memory, self.over, self.error, self.size_bytes)
        return _arrive, (about, list(self.forms), self.written)


def pinned_copy(slab: Any) -> torch.Tensor:
    """Return the bytes of ``slab`` in pinned memory."""
    return torch.empty(len(slab), dtype=torch.uint8, pin_memory=True).copy_(torch.from_numpy(slab))


def _arrive(about: tuple[Any, ...], forms: list[Form], written: list[Written]) -> Group:
    group = Group(*about)
    memory = SlotMemory.numbered(group.memory)
    for step, offset, size, sizes, form in written:
        slab = memory.lease(offset, size) if size else _NOTHING
        group.arrived.append(Arrived(step, forms[form], sizes, slab))
    return group
