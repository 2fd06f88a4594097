"""May the next slice of a capture move now?  The seam between what copies and what knows when copying costs nothing.

The copier asks before each slice and tells afterwards. `OpenGate` lets everything through at once. A gate never
copies, and never decides what is copied.

Imports without torch. It starts no threads.
"""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["Gate", "OpenGate"]


class Gate(Protocol):
    """Admits slices. `start`, `hurry` and `fenced` are called by the training thread, and return at once.

    `admit` and `moved` are called by one copier at a time, from its own thread. `moved` follows each `admit`, unless
    the capture is given up: `start` comes next then.
    """

    @property
    def paces(self) -> bool:
        """Whether slices may have to wait: else those that come from a device may as well move together."""
        ...

    def start(self, size_bytes: int, /) -> None:
        """A capture begins: so many bytes are to be moved before its fence."""
        ...

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> bool:
        """Wait until a slice of ``size_bytes`` may move, or ``urgent`` is set: the state is about to change. Returns
        whether there is time to copy it gently, more slowly than one could, for the sake of other ranks' memory.

        Must return soon after ``urgent`` is set, whatever else it waits for, and must not raise.
        """
        ...

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /, *, gently: bool) -> None:
        """The slice that was admitted last moved between two times of ``time.perf_counter``, ``gently`` or not.

        No bytes: it did not, since something else took the time, or the fence took the slice.
        """
        ...

    def hurry(self) -> None:
        """The fence has come, and ``urgent`` is set: who waits in `admit` is to look. The fence calls it."""
        ...

    def fenced(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """The fence copied a slice itself, or queued its copy, because it was not admitted in time."""
        ...


class OpenGate:
    """Lets every slice through at once."""

    __slots__ = ()

    paces = False

    def start(self, size_bytes: int, /) -> None:
        """Expect nothing."""

    def admit(self, size_bytes: int, urgent: threading.Event, /) -> bool:
        """At once, and as fast as can be."""
        return False

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /, *, gently: bool) -> None:
        """Keep nothing."""

    def hurry(self) -> None:
        """Nobody waits."""

    def fenced(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        """Keep nothing."""
