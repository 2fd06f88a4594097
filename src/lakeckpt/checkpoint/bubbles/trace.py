"""How do idle windows and copies look on a line of time?  As a trace in Chrome's format, which Perfetto shows, too.

One process for each rank, with a line for its iterations, one for its bubbles, one for free time, and one for the
slices that were copied; in their arguments, sizes, rates, and how much of a slice lay in a bubble. Times are
microseconds from the first event. Format: the "Trace Event Format" of the Chromium project, complete events ("X") and
metadata ("M").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lakeckpt.checkpoint.bubbles.profile import BubbleProfile
from lakeckpt.core.bubble_record import IterationRecord, shares

__all__ = ["trace_of"]

_LINES = {"iterations": 0, "bubble": 1, "free": 2, "slices": 3}
_NAMES = {0: "iterations", 1: "bubbles", 2: "free time", 3: "slices copied"}


def trace_of(profiles: Sequence[BubbleProfile]) -> dict[str, Any]:
    """A JSON-able trace of all ranks in ``profiles``."""
    begins = [profile.epoch_s + one.begin_s for profile in profiles for one in profile.records]
    origin_s = min(begins, default=0.0)
    events = [event for profile in profiles for event in _of_rank(profile, origin_s)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_rank(profile: BubbleProfile, origin_s: float) -> Iterator[dict[str, Any]]:
    about = {"ph": "M", "pid": profile.rank}
    yield about | {"name": "process_name", "args": {"name": f"rank {profile.rank}"}}
    for line, name in _NAMES.items():
        yield about | {"name": "thread_name", "tid": line, "args": {"name": name}}
    for record in profile.records:
        yield from _of_iteration(record, profile.rank, profile.epoch_s - origin_s)


def _of_iteration(record: IterationRecord, rank: int, shift_s: float) -> Iterator[dict[str, Any]]:
    def event(name: str, line: str, begin_s: float, end_s: float, **args: object) -> dict[str, Any]:
        return {
            "name": name,
            "cat": line,
            "ph": "X",
            "pid": rank,
            "tid": _LINES[line],
            "ts": round((begin_s + shift_s) * 1e6, 3),
            "dur": round((end_s - begin_s) * 1e6, 3),
            "args": args,
        }

    yield event(f"after step {record.step}", "iterations", record.begin_s, record.end_s)
    for window in record.windows:
        yield event(window.site, window.kind, window.begin_s, window.end_s)
    for number, one in enumerate(record.slices):
        alone = IterationRecord(
            step=record.step, begin_s=record.begin_s, end_s=record.end_s, windows=record.windows, slices=(one,)
        )
        seconds = one.end_s - one.begin_s
        yield event(
            f"slice {number}",
            "slices",
            one.begin_s,
            one.end_s,
            size_bytes=one.size_bytes,
            bytes_per_s=round(one.size_bytes / seconds) if seconds > 0 else None,
            in_bubbles=round(shares([alone]).bubble_share, 4),
            at_the_fence=one.urgent,
        )
