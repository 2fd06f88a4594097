"""Which idle windows had a rank, and what was copied in them?  A document beside the checkpoints of a run, and back.

One document for each rank of an attempt, of its last iterations: ``bubbles/{attempt}/{rank}.lkc``. It is for people:
nothing is decided by it, it may be written anew at any time, and a run is whole without it. A rank's times are of its
own monotonic clock; ``epoch_s`` says when that clock was 0, so that ranks can be shown side by side.

Imports without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lakeckpt.checkpoint.fields import fields_of, number, taken
from lakeckpt.core.bubble_record import IterationRecord
from lakeckpt.errors import WireDamaged
from lakeckpt.lake.storage import Storage
from lakeckpt.wire.codec import dumps, loads

__all__ = ["BUBBLES", "BubbleProfile", "profile_path", "read_profiles", "save_profile"]

BUBBLES = "bubbles"
_KIND = "bubbles"
_VERSION = (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleProfile:
    """The last iterations of ``rank`` in ``attempt``, the oldest first."""

    attempt: int
    rank: int
    world_size: int
    epoch_s: float
    """Seconds since 1970 when the clock of ``records`` was 0."""
    records: tuple[IterationRecord, ...]

    def __post_init__(self) -> None:
        if self.attempt < 0 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"a profile of rank {self.rank} of {self.world_size} in attempt {self.attempt}")

    def to_bytes(self) -> bytes:
        """The document."""
        plain = {
            "attempt": self.attempt,
            "rank": self.rank,
            "world_size": self.world_size,
            "epoch_s": self.epoch_s,
            "records": [one.to_plain() for one in self.records],
        }
        return dumps(plain, kind=_KIND, version=_VERSION)

    @classmethod
    def from_bytes(cls, data: bytes) -> BubbleProfile:
        """What `to_bytes` gave. `WireError` where it is not that."""
        plain = fields_of(loads(data, kind=_KIND, supported=_VERSION).value, "a profile of bubbles")
        try:
            return cls(
                attempt=number(plain, "attempt"),
                rank=number(plain, "rank"),
                world_size=number(plain, "world_size", least=1),
                epoch_s=taken(plain, "epoch_s", float),
                records=tuple(IterationRecord.from_plain(one) for one in taken(plain, "records", list)),
            )
        except WireDamaged:
            raise
        except ValueError as error:
            raise WireDamaged(f"a profile of bubbles does not hold: {error}") from error


def profile_path(attempt: int, rank: int) -> str:
    """Where the profile of a rank lies."""
    return f"{BUBBLES}/{attempt:010d}/{rank:05d}.lkc"


def save_profile(storage: Storage, profile: BubbleProfile) -> None:
    """Write ``profile`` to the run at ``storage``; an older one of the same rank and attempt is replaced."""
    storage.put(profile_path(profile.attempt, profile.rank), [profile.to_bytes()])


def read_profiles(storage: Storage, attempt: int | None = None) -> list[BubbleProfile]:
    """The profiles of ``attempt`` (None: of the newest that has any), by rank. `WireError` where one is damaged."""
    paths = [info.path for info in storage.list(BUBBLES)]
    attempts = {path.split("/")[1] for path in paths}
    if attempt is not None:
        attempts &= {f"{attempt:010d}"}
    if not attempts:
        return []
    chosen = f"{BUBBLES}/{max(attempts)}/"
    return _by_rank(BubbleProfile.from_bytes(storage.read(path)) for path in paths if path.startswith(chosen))


def _by_rank(profiles: Iterable[BubbleProfile]) -> list[BubbleProfile]:
    return sorted(profiles, key=lambda one: one.rank)
