"""Notes of deaths, as ranks leave them."""

from __future__ import annotations

from typing import Any

from lakeckpt.recovery.faults import BatchAt, FaultNote, explained


def batch_at(step: int, rank: int = 0) -> BatchAt:
    return BatchAt(reader="reader", epoch=0, step=step, rank=rank, world=2)


def died(step: int = 8, what: str = "ValueError", **fields: Any) -> FaultNote:
    """A rank that had finished ``step`` optimizer steps died at its next micro-batch."""
    cause = "signal" if what.startswith("SIG") else "exception"
    given = {"attempt": 0, "rank": 1, "world": 2, "node": "a", "at_s": 10.0, "cause": cause, "batch": batch_at(step)}
    return explained(FaultNote(**{**given, "what": what, "step": step, **fields}))
