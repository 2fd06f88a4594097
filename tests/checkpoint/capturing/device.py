"""A device that does its work later, on two queues, as a GPU does: what captures of devices are tested on without one.

Its tensors lie in host memory. Work is queued by whoever trains, copies by a `SimulatedLink`; nothing runs until a
ticket is waited for, or `run` is called, and then the two queues advance in whatever turns ``random`` takes, as far as
their events allow.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.capture.links import CopyBatch, Link

__all__ = ["Device", "LinkedEngine", "SimulatedLink"]


class Event:
    """Recorded in one queue, waited for in another."""

    def __init__(self) -> None:
        self.done = False


class Device:
    """Two queues of small pieces of work."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.queues: tuple[deque[Callable[[], bool]], deque[Callable[[], bool]]] = (deque(), deque())
        self.waited_by: set[int] = set()

    def queue(self, number: int, work: Callable[[], object]) -> None:
        """Queue work; number 0 is what trains, 1 what copies."""

        def do() -> bool:
            work()
            return True

        with self.lock:
            self.queues[number].append(do)

    def record(self, number: int) -> Event:
        event = Event()
        self.queue(number, lambda: setattr(event, "done", True))
        return event

    def wait(self, number: int, event: Event) -> None:
        with self.lock:
            self.queues[number].append(lambda: event.done)

    def run(self, until: Event | None = None, at_most: int = 10**9) -> None:
        """Do work until an event is done, or so many pieces of it, or all."""
        with self.lock:
            while at_most > 0 and not (until is not None and until.done):
                turns = [number for number in (0, 1) if self.queues[number]]
                self.random.shuffle(turns)
                if not any(self._advance(number) for number in turns):
                    break
                at_most -= 1
            assert until is None or until.done or not at_most, "the queues wait for each other"

    def _advance(self, number: int) -> bool:
        work = self.queues[number][0]
        if not work():
            return False
        self.queues[number].popleft()
        return True


class Ticket:
    def __init__(self, device: Device, event: Event) -> None:
        self.device, self.event = device, event

    def wait(self) -> None:
        self.device.waited_by.add(threading.get_ident())
        self.device.run(self.event)


class SimulatedLink:
    """The link of a `Device`. ``orders`` and ``holds`` can be left out: tests must notice. ``full``: no memory."""

    full = False

    def __init__(self, device: Device, *, orders: bool = True, holds: bool = True) -> None:
        self.device, self.orders, self.holds = device, orders, holds

    def order(self) -> None:
        if self.orders:
            self.device.wait(1, self.device.record(0))

    def copy(self, batch: CopyBatch, /) -> Ticket:
        with self.device.lock:
            for to, source in batch.pairs:
                for part in (slice(None, None, 2), slice(1, None, 2)):
                    self._queue_part(weakref.ref(to), weakref.ref(source), part)
            return Ticket(self.device, self.device.record(1))

    def _queue_part(
        self, to: weakref.ref[torch.Tensor], source: weakref.ref[torch.Tensor], part: slice[None, None, int]
    ) -> None:
        def copy() -> None:
            there, here = to(), source()
            assert there is not None and here is not None, "memory was let go of before it was copied"
            there.reshape(-1)[part].copy_(here.detach().reshape(-1)[part])

        self.device.queue(1, copy)

    def hold(self, ticket: object, /) -> None:
        assert isinstance(ticket, Ticket)
        if self.holds:
            self.device.wait(0, ticket.event)

    def kept(self, tensors: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        if self.full:
            raise torch.OutOfMemoryError("the device is full")
        copies = [torch.empty_like(one) for one in tensors]
        for copy, one in zip(copies, tensors, strict=True):
            self._keep(copy, one.detach())
        return copies

    def _keep(self, copy: torch.Tensor, source: torch.Tensor) -> None:
        self.device.queue(0, lambda: copy.copy_(source))

    def pin(self, memory: torch.Tensor, /) -> Callable[[], None]:
        return lambda: None


class LinkedEngine(CaptureEngine):
    """An engine that takes ``links`` for the links of devices."""

    def __init__(self, *args: Any, links: Mapping[torch.device, Link], **options: Any) -> None:
        super().__init__(*args, **options)
        self.open_link = links.get
