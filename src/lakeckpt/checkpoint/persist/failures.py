"""This module lets an agent tell the agents of other ranks, through storage, that a save fails on it, and why.

An agent that fails leaves a note beside the parts of the save, and the others look for notes while they wait. Rank 0
looks for those of all ranks and passes one on in its own name; the other ranks look for the note of rank 0. An agent
that finds a note raises the error of the failing rank, with the same text. A full disk may not take a note: trainers
share obstacles over the store of their job, and pass them on to their agents (`lakeckpt.tracking.obstacles`).

The module imports without torch and starts no threads.
"""

from __future__ import annotations

from contextlib import suppress

from lakeckpt.checkpoint.format.parts import PARTS, SaveId
from lakeckpt.errors import LakeckptError, ObjectMissing, SaveFailed, SaveRefused, StorageError
from lakeckpt.lake.storage.base import Storage, is_lasting
from lakeckpt.tracking.notes import error_to_text
from lakeckpt.tracking.obstacles import FAILED, Obstacle

__all__ = ["publish_failure", "refuse_failed", "save_failed"]


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


def refuse_failed(storage: Storage, save: SaveId, rank: int) -> None:
    """Raise the error of the note that another rank has left of ``save``, if ``rank`` looks for this note and finds
    it. A store that fails shows no note: what the caller waits for shows that."""
    with suppress(StorageError):
        others = [0]
        if rank == 0:
            listed = {info.path.rpartition("/")[2] for info in storage.list(f"{PARTS}/{save.folder}")}
            others = sorted(int(name[:5]) for name in listed - {f"{rank:05d}.failed"} if name.endswith(".failed"))
        for other in others:
            if (failure := _failure_of(storage, save, other)) is not None:
                if rank == 0:
                    publish_failure(storage, save, rank, failure)
                raise failure


def _failure_of(storage: Storage, save: SaveId, rank: int) -> LakeckptError | None:
    try:
        return Obstacle.from_bytes(storage.read(save.failure_path(rank))).to_error()
    except ObjectMissing:
        return None
    except ValueError:
        return SaveFailed(f"rank {rank} dropped the save, and its note is damaged: see its log")
