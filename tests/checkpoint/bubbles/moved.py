"""Where bytes moved, summed over iterations."""

from __future__ import annotations

from collections.abc import Iterable

from lakeckpt.checkpoint.bubbles.record import IterationRecord, waits_of

__all__ = ["bubble_share", "moved_bytes", "urgent_bytes"]


def bubble_share(records: Iterable[IterationRecord]) -> float:
    """The part of the bytes that moved in bubbles; 1 if nothing moved."""
    records = list(records)
    return sum(one.share for one in waits_of(records) if one.kind == "bubble") if moved_bytes(records) else 1.0


def moved_bytes(records: Iterable[IterationRecord]) -> int:
    """How many bytes moved."""
    return sum(one.size_bytes for record in records for one in record.slices)


def urgent_bytes(records: Iterable[IterationRecord]) -> int:
    """How many bytes moved while a fence waited."""
    return sum(one.size_bytes for record in records for one in record.slices if one.urgent)
