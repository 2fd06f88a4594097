"""How do many small tensors leave a device without a call for each?  Gathered there first, and moved as one run.

A model has hundreds of tensors of a few bytes (biases, norms, their moments), and a copy of each off a device costs the
host more than all of them together take on the link. Those that lie one behind the other in the arena are gathered by
one kernel into memory of the device that is laid out like that stretch of the arena, and moved in one copy. Only the
few bytes that align them may lie between two: whatever else lies there would be overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Batch", "Pair", "packed"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""(to, from): of one dtype and shape, or bytes of one length."""
_SMALL_BYTES = 64 * 2**10
_ALIGNMENT = 64
_FEWEST = 3


@dataclass(slots=True)
class Batch:
    """Copies that are queued together, time and again; ``ready`` is whatever its link has made ready for it."""

    pairs: list[Pair]
    ready: list[_Copy] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """One copy off the device, of what was gathered, or as it is."""

    to: torch.Tensor
    source: torch.Tensor
    gathered: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
    """(parts of ``source``, what is gathered into them)."""

    def make(self) -> None:
        """Queue it on the current stream."""
        if self.gathered is not None:
            torch._foreach_copy_(*self.gathered)
        # What is conjugated lazily would be so on the host, when the call has returned: have it done on the device.
        self.to.copy_(self.source.resolve_conj().resolve_neg(), non_blocking=True)


def packed(batch: Batch) -> list[_Copy]:
    """The copies of a batch, made ready once. Those of small tensors gather into memory that they keep."""
    if batch.ready is None:
        try:
            batch.ready = [one for run in _runs(batch.pairs) for one in _copies(run)]
        except torch.OutOfMemoryError:  # then each for itself, which only takes longer
            batch.ready = [_Copy(to=to, source=source) for to, source in batch.pairs]
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


def _copies(run: list[Pair]) -> Iterator[_Copy]:
    if len(run) < _FEWEST:
        for to, source in run:
            yield _Copy(to=to, source=source)
        return
    first = run[0][0]
    low = first.data_ptr()
    size_bytes = run[-1][0].data_ptr() + run[-1][0].nbytes - low
    memory = torch.zeros(size_bytes, dtype=torch.uint8, device=run[0][1].device)
    parts = [memory[to.data_ptr() - low : to.data_ptr() - low + to.nbytes] for to, _ in run]
    yield _Copy(
        to=first.as_strided((size_bytes,), (1,), first.storage_offset()),
        source=memory,
        gathered=(parts, [source for _, source in run]),
    )
