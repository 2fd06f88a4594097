"""How long will a slice take to copy?  From how long the last ones took.

The upper quartile of the last slices' seconds per byte: a slice that takes longer than its window delays what comes
after it, one that takes less leaves a little of the window unused. Pure: times are arguments.
"""

from __future__ import annotations

from collections import deque

__all__ = ["SliceRate"]

_KEEP = 32
_QUANTILE = 0.75
_GUESS_BYTES_PER_S = 1e9
"""Before anything was measured: slower than any memory or link that is worth scheduling on."""


class SliceRate:
    """The rate at which slices are copied on one rank."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_KEEP)
        self.seconds_per_byte = 1 / _GUESS_BYTES_PER_S
        """What a byte of the slower slices took."""

    def record(self, size_bytes: int, seconds: float) -> None:
        """A slice of ``size_bytes`` took ``seconds``."""
        if size_bytes > 0 and seconds >= 0:
            self._last.append(seconds / size_bytes)
            ordered = sorted(self._last)
            self.seconds_per_byte = ordered[min(int(len(ordered) * _QUANTILE), len(ordered) - 1)]

    def seconds(self, size_bytes: int) -> float:
        """What a slice of ``size_bytes`` will take, or less."""
        return size_bytes * self.seconds_per_byte
