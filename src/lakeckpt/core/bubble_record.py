"""What was idle in an iteration, and what was copied when?  Values that say it, and the shares computed from them.

Times are seconds of one monotonic clock of one rank; intervals are half-open. A slice that was copied partly inside of
windows counts by its share of time. Nothing here decides or measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lakeckpt.core.bubble_policy import IdleWindow, Kind

__all__ = ["IterationRecord", "MovedSlice", "Shares", "shares", "windows_by_site"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedSlice:
    """``size_bytes`` that were copied in [begin_s, end_s); ``urgent`` where the fence waited for them."""

    size_bytes: int
    begin_s: float
    end_s: float
    urgent: bool = False

    def __post_init__(self) -> None:
        if self.size_bytes < 0 or not self.begin_s <= self.end_s:
            raise ValueError(f"{self.size_bytes} bytes moved from {self.begin_s} to {self.end_s} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """One rank's iteration: from the cut of step ``step`` to the next cut."""

    step: int
    begin_s: float
    end_s: float
    windows: tuple[IdleWindow, ...]
    slices: tuple[MovedSlice, ...]

    def __post_init__(self) -> None:
        if self.step < 0 or not self.begin_s <= self.end_s:
            raise ValueError(f"the iteration after step {self.step} from {self.begin_s} to {self.end_s} s")

    def to_plain(self) -> dict[str, Any]:
        """As lists and numbers."""
        return {
            "step": self.step,
            "begin_s": self.begin_s,
            "end_s": self.end_s,
            "windows": [[one.site, one.kind, one.begin_s, one.end_s] for one in self.windows],
            "slices": [[one.size_bytes, one.begin_s, one.end_s, one.urgent] for one in self.slices],
        }

    @classmethod
    def from_plain(cls, plain: Any) -> IterationRecord:
        """What `to_plain` gave. `ValueError` saying what is wrong."""
        try:
            windows, slices = plain["windows"], plain["slices"]
            return cls(
                step=_whole(plain["step"]),
                begin_s=_number(plain["begin_s"]),
                end_s=_number(plain["end_s"]),
                windows=tuple(
                    IdleWindow(site=_text(site), kind=_kind(kind), begin_s=_number(begin), end_s=_number(end))
                    for site, kind, begin, end in windows
                ),
                slices=tuple(
                    MovedSlice(
                        size_bytes=_whole(size), begin_s=_number(begin), end_s=_number(end), urgent=urgent is True
                    )
                    for size, begin, end, urgent in slices
                ),
            )
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"no record of an iteration: {error!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Sums over iterations."""

    iterations: int
    seconds: float
    bubble_s: float
    """Seconds inside bubbles."""
    moved_bytes: int
    bubble_bytes: float
    """Of these, by time, inside bubbles."""
    free_bytes: float
    """Not in bubbles, but in free time."""
    urgent_bytes: int
    """What the fence waited for, wherever it moved."""

    @property
    def bubble_share(self) -> float:
        """Of the bytes, the part that moved in bubbles; 1 where nothing moved."""
        return self.bubble_bytes / self.moved_bytes if self.moved_bytes else 1.0

    @property
    def outside_bytes(self) -> float:
        """What moved while the rank computed and nothing was free."""
        return max(0.0, self.moved_bytes - self.bubble_bytes - self.free_bytes)


def shares(records: Iterable[IterationRecord]) -> Shares:
    """What was idle and what was moved, over ``records`` of one rank."""
    iterations, seconds, bubble_s, moved, in_bubbles, in_free, urgent = 0, 0.0, 0.0, 0, 0.0, 0.0, 0
    for record in records:
        bubbles = _spans(record.windows, "bubble")
        either = _spans(record.windows, "bubble", "free")
        iterations += 1
        seconds += record.end_s - record.begin_s
        bubble_s += sum(end - begin for begin, end in bubbles)
        for one in record.slices:
            moved += one.size_bytes
            urgent += one.size_bytes if one.urgent else 0
            inside = one.size_bytes * _part_within(one, bubbles)
            in_bubbles += inside
            in_free += one.size_bytes * _part_within(one, either) - inside
    return Shares(
        iterations=iterations,
        seconds=seconds,
        bubble_s=bubble_s,
        moved_bytes=moved,
        bubble_bytes=in_bubbles,
        free_bytes=in_free,
        urgent_bytes=urgent,
    )


def windows_by_site(records: Iterable[IterationRecord]) -> dict[tuple[str, Kind], tuple[int, float, float]]:
    """(site, kind) → how many windows there were, their seconds in all, and the bytes that moved in them."""
    found: dict[tuple[str, Kind], tuple[int, float, float]] = {}
    for record in records:
        for window in record.windows:
            times, seconds, moved = found.get((window.site, window.kind), (0, 0.0, 0.0))
            span = [(window.begin_s, window.end_s)]
            inside = sum(one.size_bytes * _part_within(one, span) for one in record.slices)
            found[window.site, window.kind] = (times + 1, seconds + window.end_s - window.begin_s, moved + inside)
    return found


def _spans(windows: Sequence[IdleWindow], *kinds: Kind) -> list[tuple[float, float]]:
    """The windows of ``kinds`` as disjoint spans in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted((one.begin_s, one.end_s) for one in windows if one.kind in kinds):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _part_within(one: MovedSlice, spans: Sequence[tuple[float, float]]) -> float:
    """Which part of the slice's time lies within ``spans``; of a slice that took no time, whether its instant does."""
    length = one.end_s - one.begin_s
    if length <= 0:
        return float(any(begin <= one.begin_s < end for begin, end in spans))
    return sum(max(0.0, min(end, one.end_s) - max(begin, one.begin_s)) for begin, end in spans) / length


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no text")
    return value


def _kind(value: Any) -> Kind:
    if value == "bubble":
        return "bubble"
    if value == "free":
        return "free"
    raise TypeError(f"{value!r} is no kind of window")
