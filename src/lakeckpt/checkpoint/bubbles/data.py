"""When does a rank wait for data?  While ``next`` of what it iterates over runs.

`watch_data(gate, loader)` gives the same batches. It decides nothing and reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from lakeckpt.checkpoint.bubbles.gate import BubbleGate

__all__ = ["watch_data"]

T = TypeVar("T")


def watch_data(gate: BubbleGate, batches: Iterable[T], *, site: str = "data") -> Iterator[T]:
    """Yield what ``batches`` gives; while it is waited for, ``gate`` knows of a bubble at ``site``."""
    iterator = iter(batches)
    while True:
        with gate.idle(site):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch
