"""How do many tensors leave a device without a call for each?  Small ones are gathered there, and all go in one call.

A model has hundreds of tensors of a few bytes (biases, norms, their moments), and a copy of each off a device costs the
host more than all of them together take on the link. Those that lie one behind the other in the arena are gathered by
one kernel into memory of the device that is laid out like that stretch of the arena, and moved in one copy. Only the
few bytes that align them may lie between two: whatever else lies there would be overwritten.

What is left is queued by one call of torch, which lets go of the interpreter's lock for all of it: a call for each
would take that lock as often from the thread that trains, which has it to itself while it queues kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Batch", "Pair", "Queue", "packed"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""(to, from): of one dtype and shape, or bytes of one length."""
_SMALL_BYTES = 64 * 2**10
_ALIGNMENT = 64
_FEWEST = 3


@dataclass(slots=True)
class Batch:
    """Copies that are queued together, time and again; ``ready`` is whatever its link has made ready for it."""

    pairs: list[Pair]
    ready: Queue | None = None


@dataclass(slots=True)
class Queue:
    """Copies off a device, made ready."""

    gathers: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)
    """(parts of a source below, what is gathered into them)."""
    to: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    lazy: list[Pair] = field(default_factory=list)
    """What is conjugated or negated lazily."""

    def add(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` as it is."""
        if source.is_conj() or source.is_neg():
            self.lazy.append((to, source))
        else:
            self.to.append(to)
            self.sources.append(source)

    def make(self) -> None:
        """Queue all of it on the current stream."""
        for parts, gathered in self.gathers:
            torch._foreach_copy_(parts, gathered)
        if self.to:
            torch._foreach_copy_(self.to, self.sources, non_blocking=True)
        for to, source in self.lazy:
            # It would be conjugated on the host, when the call has returned: have it done on the device.
            to.copy_(source.resolve_conj().resolve_neg(), non_blocking=True)


def packed(batch: Batch) -> Queue:
    """The copies of a batch, made ready once. Those of small tensors gather into memory that they keep."""
    if batch.ready is None:
        ready = Queue()
        try:
            for run in _runs(batch.pairs):
                _gather(run, ready)
        except torch.OutOfMemoryError:  # then each for itself, which only takes longer
            ready = Queue()
            for to, source in batch.pairs:
                ready.add(to, source)
        batch.ready = ready
    return batch.ready


def _runs(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """``pairs`` in their order, those together that can be gathered."""
    run: list[Pair] = []
    end = 0
    for pair in pairs:
        to = pair[0]
        small = to.dtype == torch.uint8 and to.dim() == 1 and to.nbytes <= _SMALL_BYTES
        if run and not (small and 0 <= to.data_ptr() - end < _ALIGNMENT):
            yield run
            run = []
        if small:
            run.append(pair)
            end = to.data_ptr() + to.nbytes
        else:
            yield [pair]
    if run:
        yield run


def _gather(run: list[Pair], ready: Queue) -> None:
    if len(run) < _FEWEST:
        for to, source in run:
            ready.add(to, source)
        return
    first = run[0][0]
    low = first.data_ptr()
    size_bytes = run[-1][0].data_ptr() + run[-1][0].nbytes - low
    memory = torch.zeros(size_bytes, dtype=torch.uint8, device=run[0][1].device)
    parts = [memory[to.data_ptr() - low : to.data_ptr() - low + to.nbytes] for to, _ in run]
    ready.gathers.append((parts, [source for _, source in run]))
    ready.add(first.as_strided((size_bytes,), (1,), first.storage_offset()), memory)
