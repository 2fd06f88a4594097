"""This module defines the register of a checkpoint: the digests of its parts, and what its rule keeps of the history.

The register lies beside the parts and goes with them; the manifest has its digest. So the log stays small however many
ranks a job has, and one object says all that a later commit must know of the history: which checkpoints keep their
data, and which files of earlier saves they refer to. `kept_of` applies the rule. The class is the format.

The module never touches storage, and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal, Protocol, TypeVar

from lakeckpt.checkpoint.format.digests import DIGEST_BYTES
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.core.intervals import Intervals
from lakeckpt.wire.documents import Count, as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["KeptCheckpoint", "Register", "best_first", "kept_of"]

_KIND, _VERSION = "register", (1, 0)
_NONE = Intervals.empty()


class _Rated(Protocol):
    """A checkpoint that may have a metric."""

    @property
    def slot(self) -> int: ...
    @property
    def metric(self) -> float | None: ...


_One = TypeVar("_One", bound=_Rated)


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint that keeps its data."""

    slot: Count
    attempt: Count
    step: Count
    number: Count
    metric: float | None = None

    @property
    def save(self) -> SaveId:
        """The save that wrote its parts and objects."""
        return SaveId(attempt=self.attempt, step=self.step, number=self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """The parts of a checkpoint, and what is kept with it."""

    digests: bytes
    """`short_digest` of each rank's part, one behind the other."""
    kept: tuple[KeptCheckpoint, ...]
    """The checkpoints of the history that keep their data, oldest first; the last one is this checkpoint."""
    needed: Mapping[str, Intervals]
    """A file of an earlier save → the slots of the kept checkpoints that refer to it."""
    unread: Intervals = _NONE
    """Slots whose checkpoints keep their data because nothing says which files they refer to."""

    def digest(self, rank: int) -> bytes:
        """Return the digest of the part of ``rank``."""
        return self.digests[rank * DIGEST_BYTES : (rank + 1) * DIGEST_BYTES]

    @property
    def slots(self) -> Intervals:
        """The slots of all checkpoints that keep their data."""
        return _slots(one.slot for one in self.kept).union(self.unread)

    def followed_by(
        self, one: KeptCheckpoint, digests: bytes, refers_to: Iterable[str], keep: Keep, left: Intervals | None = None
    ) -> Register:
        """Return the register of a commit after this one.

        ``refers_to``: the files of earlier saves that its parts name. ``left``: the slots whose data may still be
        there; None: all that are kept.
        """
        there = self.slots if left is None else left
        inside = {slot for start, stop in there.pairs() for slot in range(start, stop)}
        before = [old for old in self.kept if old.slot in inside]
        kept = kept_of([*before, one], keep)
        slots = _slots(kept)
        refers = dict.fromkeys(refers_to, _slots([one.slot]))
        needed = {
            path: some
            for path in {**self.needed, **refers}
            if (some := self.needed.get(path, _NONE).union(refers.get(path, _NONE)).intersection(slots))
        }
        unread = self.unread if keep.looks_back or len(kept) < keep.last else _NONE
        return Register(
            digests=digests,
            kept=tuple(old for old in (*before, one) if old.slot in kept),
            needed=needed,
            unread=unread.intersection(there),
        )

    def to_bytes(self) -> bytes:
        """Return the document of the register."""
        return dumps(to_plain(self), kind=_KIND, version=_VERSION, compress=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> Register:
        """Return the register in a document of `to_bytes`. `WireError`."""
        found: Register = from_plain(cls, loads(data, kind=_KIND, supported=_VERSION), "a register")
        return found


def _slots(slots: Iterable[int]) -> Intervals:
    return Intervals.of([(slot, slot + 1) for slot in sorted(slots)])


def kept_of(chain: Sequence[KeptCheckpoint], keep: Keep) -> frozenset[int]:
    """Return the slots of the checkpoints in ``chain`` (the oldest first) that keep their data.

    The rule selects the same checkpoints after the others have been removed. So a removal that was interrupted can be
    continued later, and is not mistaken for damage.

    >>> from types import SimpleNamespace as One
    >>> chain = [One(slot=n, step=40 * n, metric=abs(n - 2.0)) for n in range(1, 8)]
    >>> sorted(kept_of(chain, Keep(last=1, every=100, best=1)))
    [2, 3, 5, 7]
    """
    kept = {one.slot for one in chain[-keep.last :]}
    if keep.every is not None:
        firsts: dict[int, int] = {}
        for one in chain:
            if one.step >= keep.every:
                firsts.setdefault(one.step // keep.every, one.slot)
        kept |= set(firsts.values())
    return frozenset(kept | {one.slot for one in best_first(chain, keep.best_is)[: keep.best]})


def best_first(checkpoints: Iterable[_One], best_is: Literal["lowest", "highest"]) -> list[_One]:
    """Return the ``checkpoints`` that have a metric other than NaN, the best first; of equal ones the newest first."""
    sign = 1.0 if best_is == "lowest" else -1.0
    rated = [
        (sign * one.metric, -one.slot, one) for one in checkpoints if one.metric is not None and not isnan(one.metric)
    ]
    return [one for _, _, one in sorted(rated, key=lambda row: row[:2])]
