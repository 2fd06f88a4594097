"""This module defines the interface by which a copier asks when the next slice of a capture may move.

The copier asks a `Gate` before each slice, and reports to it afterwards. `OpenGate` admits every slice at once. A gate
never copies, and never decides which bytes are copied.

The module starts no threads and never imports torch.
"""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["Gate", "OpenGate"]


class Gate(Protocol):
    """Admits slices. The training thread calls `start`, `hurry` and `fenced`, which return at once.

    One copier at a time calls `admit` and `moved`, from its own thread. `moved` follows each `admit`, unless the
    capture is aborted: then `start` follows.
    """

    @property
    def paces(self) -> bool:
        """Whether slices may have to wait. If they never wait, slices from a device may move together."""
        ...

    def start(self, size_bytes: int, /) -> None:
        """Begin a capture, which moves ``size_bytes`` before its fence."""
        ...

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        """Wait until a slice of ``size_bytes`` may move, or until ``urgent`` is set because the state will change.

        Must return soon after ``urgent`` is set, and must not raise.
        """
        ...

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """Record that the slice admitted last was copied between two times of ``time.perf_counter``.

        With no bytes, it was not copied: other work took the time, or the fence took the slice.
        """
        ...

    def hurry(self) -> None:
        """Wake the copier that waits in `admit`. The fence calls it after ``urgent`` is set."""
        ...

    def fenced(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """Record that the fence copied a slice itself, or queued its copy, because it was not admitted in time."""
        ...


class OpenGate:
    """Admits every slice at once, and records nothing."""

    __slots__ = ()

    paces = False

    def start(self, size_bytes: int, /) -> None:
        """Do nothing."""

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> None:
        """Return at once."""

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """Do nothing."""

    def hurry(self) -> None:
        """Do nothing: no copier waits."""

    def fenced(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """Do nothing."""
