"""This module records the idle windows and the copied slices of a rank's iterations, and sums them up by site.

Times are seconds of the rank's own monotonic clock. Intervals are half-open. A slice that was copied partly inside of a
window counts by its share of time. The module never imports torch, and starts no threads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lakeckpt.checkpoint.bubbles.policy import IdleWindow, Kind
from lakeckpt.checkpoint.format.parts import SiteWaits

__all__ = ["IterationRecord", "MovedSlice", "waits_of", "waits_of_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedSlice:
    """A slice of ``size_bytes`` that was copied in [begin_s, end_s); ``urgent`` if the fence waited for it."""

    size_bytes: int
    begin_s: float
    end_s: float
    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """One rank's iteration: from the cut of step ``step`` to the next cut."""

    step: int
    begin_s: float
    end_s: float
    windows: tuple[IdleWindow, ...]
    slices: tuple[MovedSlice, ...]


def waits_of(records: Iterable[IterationRecord]) -> tuple[SiteWaits, ...]:
    """Return the waits of one rank by site, whatever the number of a window in its iteration.

    Bytes that moved in a bubble inside of free time count for the bubble.
    """
    lengths: defaultdict[tuple[str, Kind], list[float]] = defaultdict(list)
    moved: defaultdict[tuple[str, Kind], float] = defaultdict(float)
    total = 0
    for record in records:
        for window in record.windows:
            lengths[_key(window)].append(window.end_s - window.begin_s)
        total += sum(one.size_bytes for one in record.slices)
        bubbles, free = (_in_order(record.windows, kind) for kind in ("bubble", "free"))
        for one in record.slices:
            left = 1.0
            for window, part in [*_parts_within(one, bubbles), *_parts_within(one, free)]:
                moved[_key(window)] += one.size_bytes * min(part, left)
                left -= min(part, left)
    return tuple(
        SiteWaits(site=site, kind=kind, median_s=median(some), share=moved[site, kind] / total if total else 0.0)
        for (site, kind), some in sorted(lengths.items())
    )


def waits_of_job(every: Sequence[Sequence[SiteWaits]]) -> tuple[SiteWaits, ...]:
    """Return the waits of a job from those of ``every`` rank: the median of the ranks that have the site, and the mean
    share of all ranks. The site in which most bytes moved comes first."""
    found: defaultdict[tuple[str, Kind], list[SiteWaits]] = defaultdict(list)
    for one in (one for waits in every for one in waits):
        found[one.site, one.kind].append(one)
    waits = [
        SiteWaits(
            site=site,
            kind=kind,
            median_s=median(one.median_s for one in some),
            share=fmean([*(one.share for one in some), *[0.0] * (len(every) - len(some))]),
        )
        for (site, kind), some in found.items()
    ]
    return tuple(sorted(waits, key=lambda one: (-one.share, one.site)))


def _key(window: IdleWindow) -> tuple[str, Kind]:
    return window.site.rpartition(" ")[0], window.kind


def _in_order(windows: Iterable[IdleWindow], kind: Kind) -> list[IdleWindow]:
    return sorted((one for one in windows if one.kind == kind), key=lambda one: one.begin_s)


def _parts_within(one: MovedSlice, windows: Sequence[IdleWindow]) -> Iterator[tuple[IdleWindow, float]]:
    """Yield the windows of one kind, which are in order, in which the slice moved, and the part of its time there."""
    length_s = one.end_s - one.begin_s
    at = bisect_right(windows, one.begin_s, key=lambda window: window.begin_s)
    for window in windows[max(at - 1, 0) :]:
        if window.begin_s > one.end_s:
            break
        inside_s = min(window.end_s, one.end_s) - max(window.begin_s, one.begin_s)
        if length_s > 0 and inside_s > 0:
            yield window, inside_s / length_s
        elif length_s <= 0 and window.begin_s <= one.begin_s < window.end_s:
            yield window, 1.0
