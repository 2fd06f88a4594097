"""This module defines what crosses torch's queue from a loader's worker: a group of micro-batches, by their slots.

The micro-batches themselves lie in slots of shared memory. A `Group` is pickled as numbers: where each micro-batch
lies, and where its pickle begins. When the main process unpickles a group, the group takes a lease of each slot. So a
slot is free again as soon as nobody refers to its bytes, also if torch drops a group that nobody wants any more. The
module starts no threads; torch's pinning thread calls `Group.pin_memory`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lakeckpt.data.workers.slots import SlotMemory

__all__ = ["Arrived", "Group", "pinned_copy"]


@dataclass(slots=True)
class Arrived:
    """One micro-batch in the main process. ``slab`` is uint8: an array over a slot, or a tensor in pinned memory."""

    step: int
    slab: npt.NDArray[np.uint8] | torch.Tensor
    pickle_at: int


@dataclass(slots=True)
class Group:
    """Micro-batches of one worker, in order."""

    memory: int
    """The number of the slot memory (`SlotMemory.numbered`)."""
    over: bool = False
    """True if the worker gives no more micro-batches in this iteration: all are read, or there was an error."""
    error: Any = None
    """The error that ended the reading behind these micro-batches: an exception, or an `ExceptionWrapper`."""
    size_bytes: int = 0
    written: list[tuple[int, int, int, int]] = field(default_factory=list)
    """In the worker: (step, offset, bytes, where the pickle begins) of each micro-batch."""
    stores: list[tuple[str, int, int]] = field(default_factory=list)
    """The reads of the worker from stores since its last group (`lakeckpt.counters.take_stores`)."""
    arrived: deque[Arrived] = field(default_factory=deque)
    """In the main process: the micro-batches."""

    def add(self, step: int, offset: int, size_bytes: int, pickle_at: int) -> None:
        """Note one more micro-batch, which the worker has written at ``offset``."""
        self.written.append((step, offset, size_bytes, pickle_at))
        self.size_bytes += size_bytes

    def pin_memory(self, device: Any = None) -> Group:
        """Copy the micro-batches into pinned memory, which frees their slots."""
        for one in self.arrived:
            one.slab = pinned_copy(one.slab)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.memory, self.over, self.error, self.size_bytes, self.written, self.stores)


def pinned_copy(slab: Any) -> torch.Tensor:
    """Return the bytes of ``slab`` in pinned memory."""
    return torch.empty(len(slab), dtype=torch.uint8, pin_memory=True).copy_(torch.from_numpy(slab))


def _arrive(
    number: int,
    over: bool,
    error: Any,
    size_bytes: int,
    written: list[tuple[int, int, int, int]],
    stores: list[tuple[str, int, int]],
) -> Group:
    memory = SlotMemory.numbered(number)
    arrived = deque(Arrived(step, memory.lease(offset, size), at) for step, offset, size, at in written)
    return Group(number, over, error, size_bytes, stores=stores, arrived=arrived)
