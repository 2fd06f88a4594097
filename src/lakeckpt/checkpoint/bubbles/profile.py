"""This module saves the idle windows and the copied slices of a rank's last iterations.

Each rank of an attempt has one document beside the checkpoints of its run: ``bubbles/{attempt}/{rank}.lkc``. The
document is for people (``lakeckpt report``): no decision depends on it, and a run is complete without it. Times are
seconds of the rank's own monotonic clock. Intervals are half-open. A slice that was copied partly inside windows counts
by its share of time.

`ProfileKeeper` has one thread, which the manager starts and stops. The module never imports torch.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.bubbles.policy import IdleWindow, Kind
from lakeckpt.errors import SaveWarning, StorageError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.wire.documents import Count, Positive, as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "BUBBLES",
    "BubbleProfile",
    "IterationRecord",
    "MovedSlice",
    "ProfileKeeper",
    "Shares",
    "profile_path",
    "read_profiles",
    "save_profile",
    "shares",
    "windows_by_site",
]

BUBBLES = "bubbles"
_KIND = "bubbles"
_VERSION = (1, 0)
_EVERY_S = 60.0


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class MovedSlice:
    """A slice of ``size_bytes`` that was copied in [begin_s, end_s); ``urgent`` if the fence waited for it."""

    size_bytes: Count
    begin_s: float
    end_s: float
    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """One rank's iteration: from the cut of step ``step`` to the next cut."""

    step: Count
    begin_s: float
    end_s: float
    windows: tuple[IdleWindow, ...]
    slices: tuple[MovedSlice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleProfile:
    """The last iterations of ``rank`` in ``attempt``, the oldest first."""

    attempt: Count
    rank: Count
    world_size: Positive
    records: tuple[IterationRecord, ...]

    def to_bytes(self) -> bytes:
        """Return the document."""
        return dumps(to_plain(self), kind=_KIND, version=_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> BubbleProfile:
        """Return the profile that `to_bytes` returned. `WireError` if ``data`` is no such document."""
        plain = loads(data, kind=_KIND, supported=_VERSION)
        profile: BubbleProfile = from_plain(cls, plain, "a profile of bubbles")
        return profile


def profile_path(attempt: int, rank: int) -> str:
    """Return the path of a rank's profile in the run."""
    return f"{BUBBLES}/{attempt:010d}/{rank:05d}.lkc"


def save_profile(storage: Storage, profile: BubbleProfile) -> None:
    """Write ``profile`` to the run at ``storage``, in place of an older one of the same rank and attempt."""
    storage.put(profile_path(profile.attempt, profile.rank), [profile.to_bytes()])


def read_profiles(storage: Storage, attempt: int | None = None) -> list[BubbleProfile]:
    """Return the profiles of ``attempt`` by rank (None: of the newest attempt that has any).

    `WireError` if one is damaged.
    """
    paths = [info.path for info in storage.list(BUBBLES)]
    attempts = {path.split("/")[1] for path in paths}
    if attempt is not None:
        attempts &= {f"{attempt:010d}"}
    chosen = [path for path in paths if attempts and path.startswith(f"{BUBBLES}/{max(attempts)}/")]
    return sorted((BubbleProfile.from_bytes(storage.read(path)) for path in chosen), key=lambda one: one.rank)


class ProfileKeeper:
    """A thread that calls ``write`` once a minute, so that a crash leaves a profile.

    ``who`` names the rank in the warning of `end`: a profile that cannot be written does not end a job.
    """

    def __init__(self, write: Callable[[], None], who: str, *, every_s: float = _EVERY_S) -> None:
        self._write, self._who, self._every_s = write, who, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lakeckpt-profile", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Join the thread, and write a last time."""
        self._over.set()
        self._thread.join()
        try:
            self._write()
        except StorageError as error:
            warnings.warn(f"the idle windows of {self._who} could not be written: {error}", SaveWarning, stacklevel=5)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            with contextlib.suppress(StorageError):  # `end` warns if the last attempt fails, too
                self._write()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Sums over iterations."""

    iterations: int
    seconds: float
    bubble_s: float
    """Seconds inside bubbles."""
    moved_bytes: int
    bubble_bytes: float
    """Bytes that moved in bubbles, by time."""
    free_bytes: float
    """Bytes that moved in free time, and not in bubbles."""
    urgent_bytes: int
    """Bytes for which the fence waited, inside or outside of windows."""

    @property
    def bubble_share(self) -> float:
        """The part of the bytes that moved in bubbles; 1 if nothing moved."""
        return self.bubble_bytes / self.moved_bytes if self.moved_bytes else 1.0

    @property
    def outside_bytes(self) -> float:
        """Bytes that moved while the rank computed, outside of free time."""
        return max(0.0, self.moved_bytes - self.bubble_bytes - self.free_bytes)


def shares(records: Iterable[IterationRecord]) -> Shares:
    """Return the idle time and the moved bytes, summed over ``records`` of one rank."""
    records = list(records)
    bubble_s = in_bubbles = in_free = 0.0
    for record in records:
        bubbles, either = _spans(record.windows, "bubble"), _spans(record.windows, "bubble", "free")
        bubble_s += sum(end - begin for begin, end in bubbles)
        for one in record.slices:
            inside = one.size_bytes * _part_within(one, bubbles)
            in_bubbles += inside
            in_free += one.size_bytes * _part_within(one, either) - inside
    slices = [one for record in records for one in record.slices]
    return Shares(
        iterations=len(records),
        seconds=sum(record.end_s - record.begin_s for record in records),
        bubble_s=bubble_s,
        moved_bytes=sum(one.size_bytes for one in slices),
        bubble_bytes=in_bubbles,
        free_bytes=in_free,
        urgent_bytes=sum(one.size_bytes for one in slices if one.urgent),
    )


def windows_by_site(records: Iterable[IterationRecord]) -> dict[tuple[str, Kind], tuple[int, float, float]]:
    """Return (site, kind) → how many windows there were, their seconds in all, and the bytes that moved in them."""
    found: dict[tuple[str, Kind], tuple[int, float, float]] = {}
    for record in records:
        for window in record.windows:
            times, seconds, moved = found.get((window.site, window.kind), (0, 0.0, 0.0))
            span = [(window.begin_s, window.end_s)]
            inside = sum(one.size_bytes * _part_within(one, span) for one in record.slices)
            found[window.site, window.kind] = (times + 1, seconds + window.end_s - window.begin_s, moved + inside)
    return found


def _spans(windows: Sequence[IdleWindow], *kinds: Kind) -> list[tuple[float, float]]:
    """Return the windows of ``kinds`` as disjoint spans in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted((one.begin_s, one.end_s) for one in windows if one.kind in kinds):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _part_within(one: MovedSlice, spans: Sequence[tuple[float, float]]) -> float:
    """Return the part of the slice's time that lies within ``spans``; for a slice that took no time, 1 or 0."""
    length = one.end_s - one.begin_s
    if length <= 0:
        return float(any(begin <= one.begin_s < end for begin, end in spans))
    return sum(max(0.0, min(end, one.end_s) - max(begin, one.begin_s)) for begin, end in spans) / length
