"""This module encodes the errors that ranks, their agents and their workers send to each other: as a kind and a text.

It is the only such encoding: answers of rounds, notes of failed saves, votes of a restore, and the orders and outcomes
of an agent contain it. It imports without torch and starts no threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from lakeckpt.errors import CheckpointError, LakeckptError, StorageError, TrackingError, error_of

__all__ = ["LEFT", "STOPPED", "Note", "error_from_text", "error_to_text"]

STOPPED = "stopped"
"""The key of the note of a rank that takes part in no further round: ranks that wait for it stop waiting."""
LEFT = "left"
"""As `STOPPED`, of a rank that has closed its manager well: its process may end, and nothing has failed."""
_MOST_BYTES = 4000


def error_to_text(error: BaseException) -> str:
    """Return the kind of ``error`` and its text, for `error_from_text` in another process.

    An error of a user's code becomes a `CheckpointError`, and an error of the system a `StorageError`.

    >>> error_to_text(StorageError("the disk is full")), error_to_text(KeyError("loss"))
    ('storage: the disk is full', "checkpoint: KeyError: 'loss'")
    """
    if isinstance(error, LakeckptError):
        return f"{error.kind}: {error}"
    kind = StorageError.kind if isinstance(error, OSError) else CheckpointError.kind
    return f"{kind}: {type(error).__name__}: {error}"


def error_from_text(text: str, *, prefix: str = "", otherwise: type[LakeckptError] = TrackingError) -> LakeckptError:
    """Return the error that `error_to_text` made ``text`` of, with ``prefix`` before its message.

    ``otherwise`` is its class if this version of lakeckpt does not know the kind.
    """
    kind, _, message = text.partition(": ")
    return error_of(kind, prefix + message, otherwise=otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note of a rank that a save fails on it, or that it stops."""

    rank: int
    error: str
    """The cause, as `error_to_text` returns it."""
    first: int = 0
    """The number of the first save that the note is about."""

    @property
    def cause(self) -> str:
        """The message of the error."""
        return self.error.partition(": ")[2]

    def to_bytes(self) -> bytes:
        """Return the note as bytes; a long text is cut off."""
        return f"{self.rank} {self.first}\n{self.error}".encode("utf-8", "replace")[:_MOST_BYTES]

    @classmethod
    def from_bytes(cls, data: bytes) -> Note:
        """Return the note that `to_bytes` made ``data`` of. Raises ValueError for other bytes."""
        numbers, _, error = data.decode("utf-8", "replace").partition("\n")
        rank, first = map(int, numbers.split())
        return cls(rank=rank, first=first, error=error)
