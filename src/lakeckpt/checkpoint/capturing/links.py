"""How do bytes leave a device, ordered after what it has been told to do, without the host waiting?

A `Link` is the way from one device into host memory: a queue of copies beside the device's queue of work. An event
orders the copies after all the work that was queued when `order` was called, and `hold` orders the work that is queued
from then on after the copies: the device waits, the host does not. Host memory has no link: there a copy is done when
the call returns.

`CudaLink` is a stream and pinned memory. Pinned is the arena itself, where CUDA can register it (not on every file
system); else copies are correct, and block whoever makes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from lakeckpt.checkpoint.capturing.packing import Batch, packed

__all__ = ["CudaLink", "Link", "Ticket", "link_cuda"]

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""


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
        """Queue copies into host memory. The caller keeps ``batch``, and so its tensors, until they are done."""
        ...

    def hold(self, ticket: Ticket, /) -> None:
        """What this thread gives the device to do from now on comes after the copies of ``ticket``."""
        ...

    def kept(self, tensors: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Copies on the device, as of all that this thread has given it to do."""
        ...

    def pin(self, memory: torch.Tensor, /) -> Callable[[], None] | None:
        """Make copies into ``memory`` fast; returns what undoes it, or None where it cannot be done."""
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
            packed(batch).make()
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # whoever waits sleeps
            event.record(self._stream)
        return _CudaTicket(event, self._device)

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

    def pin(self, memory: torch.Tensor, /) -> Callable[[], None] | None:
        """See `Link`. Memory that is pinned already (for another device of this process) stays as it is."""
        if memory.is_pinned():
            return lambda: None
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = memory.data_ptr()
        with torch.cuda.device(self._device):
            if int(runtime.cudaHostRegister(address, memory.numel(), _PORTABLE)) != 0:
                self._forget_error()
                return None

        def unpin() -> None:
            with torch.cuda.device(self._device):  # else a thread that has none begins to use the first one
                if int(runtime.cudaHostUnregister(address)) != 0:
                    self._forget_error()

        return unpin

    def _forget_error(self) -> None:
        """What CUDA's runtime remembers of a call that failed, it tells whoever asks next: have that be ourselves."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)


def link_cuda(tensors: Iterable[torch.Tensor], links: dict[torch.device, Link]) -> None:
    """Have in ``links`` a link of each CUDA device on which one of ``tensors`` lies."""
    for device in {one.device for one in tensors}:
        if device.type == "cuda" and device not in links:
            links[device] = CudaLink(device)


class _CudaTicket:
    """An event behind the copies."""

    __slots__ = ("_device", "event")

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self._device = event, device

    def wait(self) -> None:
        """See `Ticket`."""
        with torch.cuda.device(self._device):  # else a thread that has none begins to use the first one
            self.event.synchronize()
