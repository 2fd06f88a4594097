"""What do captures take of a rank's core, and when?  Gates for ``benchmarks.bubbles`` that keep account of it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.core.bubble_policy import Kind
from lakeckpt.core.bubble_record import shares


class Accounted(BubbleGate):
    """Knows what processor time each slice took."""

    def __init__(self) -> None:
        super().__init__(iterations=100_000)
        self.cpu_s: dict[tuple[float, float], float] = {}
        self._since_s = 0.0

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        """See `BubbleGate`."""
        self.let(size_bytes, urgent)
        self._since_s = time.thread_time()

    def let(self, size_bytes: int, urgent: threading.Event) -> None:
        """Wait for a bubble."""
        super().admit(size_bytes, urgent)

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """See `BubbleGate`."""
        self.cpu_s[begin_s, end_s] = time.thread_time() - self._since_s
        super().moved(size_bytes, begin_s, end_s)

    def in_bubbles_s(self, warm_up: int) -> float:
        """The processor time of slices that lay in bubbles, each by its share, from iteration ``warm_up`` on."""
        found = 0.0
        for record in self.records()[warm_up:]:
            for one in record.slices:
                alone = dataclasses.replace(record, slices=(one,))
                found += self.cpu_s.get((one.begin_s, one.end_s), 0.0) * shares([alone]).bubble_share
        return found


class Observed(Accounted):
    """Knows the windows, and lets everything through at once."""

    def let(self, size_bytes: int, urgent: threading.Event) -> None:
        """Return."""


class Switch:
    """The gate of the way whose turn it is: for what watches the training thread, and for the engine."""

    clock = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.gate: BubbleGate | None = None
        self.cpu_s = 0.0  # in what tells the gate of windows

    def begin(self, site: str, kind: Kind = "bubble") -> None:
        """The training thread waits."""
        if self.gate is not None:
            begin_s = time.thread_time()
            self.gate.begin(site, kind)
            self.cpu_s += time.thread_time() - begin_s

    def end(self, kind: Kind = "bubble") -> None:
        """It goes on."""
        if self.gate is not None:
            begin_s = time.thread_time()
            self.gate.end(kind)
            self.cpu_s += time.thread_time() - begin_s

    @contextmanager
    def idle(self, site: str, kind: Kind = "bubble") -> Iterator[None]:
        """It waits while the block runs."""
        self.begin(site, kind)
        try:
            yield
        finally:
            self.end(kind)

    def predict(self, site: str, length_s: float) -> None:
        """How long a window will be."""
        if self.gate is not None:
            self.gate.predict(site, length_s)

    def __getattr__(self, name: str) -> Any:
        """What the engine calls; it does so only while a way with captures has its turn."""
        return getattr(self.gate, name)
