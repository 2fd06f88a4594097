"""What do captures take of a rank's core, and when?  Gates for ``benchmarks.bubbles`` that keep account of it."""

from __future__ import annotations

import dataclasses
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.checkpoint.bubbles.policy import BubblePolicy, Kind
from lakeckpt.checkpoint.bubbles.record import MovedSlice, waits_of


class _Account:
    """What processor time the copier's thread took, and when: spans that follow each other."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float, float]] = []  # begin, end, processor time
        self._last: tuple[float, float] | None = None

    def pause(self) -> None:
        """What comes before the next mark is of no span."""
        self._last = None

    def mark(self, *, slept: bool = False) -> None:
        """A span ends here, and the next one begins. ``slept``: the thread has waited, and worked at its end alone."""
        now, cpu_s = time.perf_counter(), time.thread_time()
        if self._last is not None:
            begin, took = self._last[0], cpu_s - self._last[1]
            self.spans.append((max(begin, now - took) if slept else begin, now, took))
        self._last = now, cpu_s


class _Looks(BubblePolicy):
    """Tells when the copier wakes up to look at it, and when it has seen enough."""

    def __init__(self, account: _Account) -> None:
        super().__init__()
        self._account = account

    def admits_at(self, size_bytes: int, at_s: float) -> float | None:
        """See `BubblePolicy`."""
        self._account.mark(slept=True)
        found = super().admits_at(size_bytes, at_s)
        self._account.mark()
        return found


class Accounted(BubbleGate):
    """Knows what processor time the copier took from its first look to its last slice, and when."""

    def __init__(self) -> None:
        self._account = _Account()
        super().__init__(iterations=100_000, policy=_Looks(self._account))

    def start(self, size_bytes: int, /) -> None:
        """See `BubbleGate`."""
        self._account.pause()
        super().start(size_bytes)

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        """See `BubbleGate`."""
        self._account.mark()
        self.let(size_bytes, urgent)
        self._account.mark()

    def let(self, size_bytes: int, urgent: threading.Event) -> None:
        """Wait for a bubble."""
        super().admit(size_bytes, urgent)

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """See `BubbleGate`."""
        self._account.mark()
        super().moved(size_bytes, begin_s, end_s)
        self._account.mark()

    def rest(self) -> None:
        """The iteration is over, and the next one is another gate's: to the policy, the next of its own follows it."""
        with self._changed:
            self._keep(self._policy.close("bubble", self.clock()))
            self._records.append(self._record(self.clock()))
            self._step = None

    def in_bubbles_s(self, step: int) -> float:
        """The processor time that lay in bubbles, of each span by its share, from iteration ``step`` on."""
        spans = sorted(self._account.spans)
        found = 0.0
        for record in self.records():
            if record.step < step:
                continue
            mine = spans[bisect_left(spans, (record.begin_s,)) : bisect_left(spans, (record.end_s,))]
            took = [
                MovedSlice(size_bytes=round(1e9 * cpu_s), begin_s=begin_s, end_s=max(begin_s, end_s))
                for begin_s, end_s, cpu_s in mine
            ]
            waits = waits_of([dataclasses.replace(record, slices=tuple(took))])
            share = sum(one.share for one in waits if one.kind == "bubble")
            found += share * sum(one.size_bytes for one in took) / 1e9
        return found


class Observed(Accounted):
    """Knows the windows, and lets everything through at once."""

    def let(self, size_bytes: int, urgent: threading.Event) -> None:
        """At once."""


class Switch:
    """The gate of the way whose turn it is: for what watches the training thread, and for the engine."""

    paces = True

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
    def idle(self, site: str) -> Iterator[None]:
        """It waits while the block runs."""
        self.begin(site)
        try:
            yield
        finally:
            self.end()

    def __getattr__(self, name: str) -> Any:
        """What the engine calls; it does so only while a way with captures has its turn."""
        return getattr(self.gate, name)
