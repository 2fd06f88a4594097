"""This module copies bytes off a device, ordered after the work that is queued on the device. The host does not wait.

A `Link` is the way from one device into host memory: a queue of copies beside the device's queue of work. `order` makes
the following copies wait for all work queued so far. `hold` makes the following work wait for copies: the device waits,
and the host does not. Host memory has no link: a copy there is done when the call returns.

A link uses a stream of its own and pinned memory. The arena itself is pinned if CUDA can register its memory,
which not every file system allows. Otherwise copies are correct, and block the caller.

Small tensors are copied together. A model has hundreds of tensors of a few bytes, and a copy of each would cost the
host more than all of them take on the link. One kernel gathers tensors that are adjacent in the arena, and one copy
moves them. One call of torch queues all other copies of a `CopyBatch`, and releases the interpreter's lock once.

The module starts no threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["CopyBatch", "Link", "Ticket", "open_link"]

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""


Pair = tuple[torch.Tensor, torch.Tensor]
"""(to, from): of one dtype and shape, or bytes of one length."""
_SMALL_BYTES = 64 * 2**10
_ALIGNMENT = 64
_FEWEST = 3


@dataclass(slots=True)
class CopyBatch:
    """Copies that are queued together, at many cuts. The first `queue` prepares them."""

    pairs: list[Pair]
    gathers: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)
    """(parts of one of ``sources``, the tensors that are gathered into them)."""
    to: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    lazy: list[Pair] = field(default_factory=list)
    """Copies of tensors that are conjugated or negated lazily."""
    _is_ready: bool = False

    def queue(self) -> None:
        """Queue the copies on the current stream."""
        if not self._is_ready:
            self._prepare()
        for parts, gathered in self.gathers:
            torch._foreach_copy_(parts, gathered)
        if self.to:
            torch._foreach_copy_(self.to, self.sources, non_blocking=True)
        for to, source in self.lazy:
            # torch would conjugate it on the host, after the call has returned: this does it on the device.
            to.copy_(source.resolve_conj().resolve_neg(), non_blocking=True)

    def _prepare(self) -> None:
        """Prepare the copies once. Gathers keep their memory on the device."""
        try:
            for run in _runs(self.pairs):
                self._gather(run)
        except torch.OutOfMemoryError:  # single copies take longer and need no memory
            self.gathers, self.to, self.sources, self.lazy = [], [], [], []
            self._add(self.pairs)
        self._is_ready = True

    def _add(self, pairs: Sequence[Pair]) -> None:
        for to, source in pairs:
            if source.is_conj() or source.is_neg():
                self.lazy.append((to, source))
            else:
                self.to.append(to)
                self.sources.append(source)

    def _gather(self, run: list[Pair]) -> None:
        if len(run) < _FEWEST:
            self._add(run)
            return
        first = run[0][0]
        low = first.data_ptr()
        size_bytes = run[-1][0].data_ptr() + run[-1][0].nbytes - low
        memory = torch.zeros(size_bytes, dtype=torch.uint8, device=run[0][1].device)
        parts = [memory[to.data_ptr() - low : to.data_ptr() - low + to.nbytes] for to, _ in run]
        self.gathers.append((parts, [source for _, source in run]))
        self._add([(first.as_strided((size_bytes,), (1,), first.storage_offset()), memory)])


def _runs(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield ``pairs`` in their order, in runs that can be gathered."""
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


class Link:
    """The way from a CUDA device into host memory. Any thread calls `copy`; the training thread calls the rest."""

    __slots__ = ("_device", "_stream")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def order(self) -> None:
        """Make the following copies wait for all work that this thread has queued on the device."""
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())

    def copy(self, batch: CopyBatch, /) -> Ticket:
        """Queue copies into host memory. The caller keeps ``batch``, and so its tensors, until they are done."""
        with self._copying(), torch.no_grad():
            batch.queue()
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # wait() sleeps
            event.record(self._stream)
        return Ticket(event, self._device)

    def hold(self, ticket: Ticket, /) -> None:
        """Make the work that this thread queues from now on wait for the copies of ``ticket``."""
        torch.cuda.current_stream(self._device).wait_event(ticket.event)

    def kept(self, tensors: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Return copies on the device, made after all work that this thread has queued."""
        with torch.cuda.device(self._device), torch.no_grad():
            copies = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in tensors]
            if copies:
                torch._foreach_copy_(copies, list(tensors))
        return copies

    def pin(self, memory: torch.Tensor, /) -> Callable[[], None] | None:
        """Pin ``memory``, so that copies into it are fast. Returns a function that unpins it; None if it cannot be
        pinned. Memory that is pinned already (for another device of this process) stays as it is."""
        if memory.is_pinned():
            return lambda: None
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = memory.data_ptr()
        with torch.cuda.device(self._device):
            if int(runtime.cudaHostRegister(address, memory.numel(), _PORTABLE)) != 0:
                self._forget_error()
                return None

        def unpin() -> None:
            with torch.cuda.device(self._device):  # a thread without a current device would use the first one
                if int(runtime.cudaHostUnregister(address)) != 0:
                    self._forget_error()

        return unpin

    def _forget_error(self) -> None:
        """Clear CUDA's last error, which CUDA would raise in the next call of any code."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)


class Ticket:
    """An event behind copies that were queued together."""

    __slots__ = ("_device", "event")

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self._device = event, device

    def wait(self) -> None:
        """Return when the copies are done. Any thread may call this; it releases the interpreter's lock."""
        with torch.cuda.device(self._device):  # a thread without a current device would use the first one
            self.event.synchronize()


def open_link(device: torch.device) -> Link | None:
    """Return a new link of ``device``; None for host memory and for devices other than CUDA devices."""
    return Link(device) if device.type == "cuda" else None
