"""How do bytes leave a device, ordered after what it has been told to do, without the host waiting?

A `Link` is the way from one device into host memory: a queue of copies beside the device's queue of work. An event
orders the copies after all the work that was queued when `order` was called, and `hold` orders the work that is queued
from then on after the copies: the device waits, the host does not. Host memory has no link: there a copy is done when
the call returns.

`CudaLink` is a stream and pinned memory. Pinned is the arena itself, where CUDA can register it; else
copies are correct, and block whoever makes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from lakeckpt.checkpoint.capturing.packing import Batch, packed

__all__ = ["CudaLink", "Link", "Ticket"]


class Ticket(Protocol):
    """Copies that were queued together."""

    def wait(self) -> None:
        """Return when they are done. Any thread; lets go of the interpreter's lock."""
        ...


class Link(Protocol):
    """The way from a device into host memory. `copy` is called by any thread, the rest by the one that trains."""

    def order(self) -> None:
        """Copies that are queued from now on come after all that this thread has given the device to do."""
        ...

    def copy(self, batch: Batch, /) -> Ticket:
        """Queue copies into host memory."""
        ...

    def hold(self, ticket: Ticket, /) -> None:
        """What this thread gives the device to do from now on comes after the copies of ``ticket``."""
        ...

    def kept(self, tensors: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Copies on the device, as of all that this thread has given it to do."""
        ...

    def pin(self, memory: torch.Tensor, /) -> Callable[[], None]:
        """Make copies into ``memory`` fast; returns what undoes it."""
        ...


class CudaLink:
    """The link of a CUDA device."""

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
        """See `Link`."""
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())

    def copy(self, batch: Batch, /) -> Ticket:
        """See `Link`."""
        with self._copying(), torch.no_grad():
            for one in packed(batch):
                one.make()
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # whoever waits sleeps
            event.record(self._stream)
        return _CudaTicket(event)

    def hold(self, ticket: Ticket, /) -> None:
        """See `Link`."""
        assert isinstance(ticket, _CudaTicket)
        torch.cuda.current_stream(self._device).wait_event(ticket.event)

    def kept(self, tensors: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """See `Link`."""
        with torch.cuda.device(self._device), torch.no_grad():
            copies = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in tensors]
            if copies:
                torch._foreach_copy_(copies, list(tensors))
        return copies

    def pin(self, memory: torch.Tensor, /) -> Callable[[], None]:
        """See `Link`."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = memory.data_ptr()
        with torch.cuda.device(self._device):
            if int(runtime.cudaHostRegister(address, memory.numel(), 0)) != 0:
                return lambda: None
        return lambda: runtime.cudaHostUnregister(address)


class _CudaTicket:
    """An event behind the copies."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """See `Ticket`."""
        self.event.synchronize()
