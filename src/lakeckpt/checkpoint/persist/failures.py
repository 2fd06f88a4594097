"""This module lets a rank tell the other ranks of a save, through storage, that the save fails on it, and why.

A rank that fails leaves a note beside the parts of the save: agents and committers look there while they wait. A rank
that finds a note raises the error of the failing rank, with the same text. A full disk may not take a note; trainers
share the same obstacles over the store of their job (`lakeckpt.tracking.obstacles`).

The module imports without torch and starts no threads.
"""

from __future__ import annotations

from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.errors import LakeckptError, ObjectMissing, SaveFailed, SaveRefused
from lakeckpt.lake.storage.base import Storage, is_lasting
from lakeckpt.tracking.notes import error_to_text
from lakeckpt.tracking.obstacles import FAILED, Obstacle

__all__ = ["publish_failure", "published_failure", "save_failed"]


def save_failed(text: str, cause: Exception) -> SaveFailed:
    """Return the error of a save that fails for ``cause``, a store's error: `SaveRefused` if no retry mends it."""
    refused = isinstance(cause, SaveRefused) or is_lasting(cause)
    failure = (SaveRefused if refused else SaveFailed)(text)
    failure.__cause__ = cause
    return failure


def publish_failure(storage: Storage, save: SaveId, rank: int, error: Exception) -> bool:
    """Leave a note in storage. Return False if the store does not take it: then the trainers, or the timeout, tell the
    other ranks."""
    note = Obstacle(kind=FAILED, rank=rank, error=error_to_text(error), first=save.number)
    try:
        storage.put(save.failure_path(rank), [note.to_bytes()])
    except Exception:
        return False
    return True


def published_failure(storage: Storage, save: SaveId, rank: int) -> LakeckptError | None:
    """Return the error of the note that ``rank`` has left of ``save`` in storage, or None. One request."""
    try:
        return Obstacle.from_bytes(storage.read(save.failure_path(rank))).to_error()
    except ObjectMissing:
        return None
    except ValueError:
        return SaveFailed(f"rank {rank} dropped the save, and its note is damaged: see its log")
