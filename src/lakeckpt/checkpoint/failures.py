"""This module tells the other ranks of a save that one of them gives it up, and why.

A rank that fails leaves a note. Every rank leaves it in storage, beside the parts of the save: agents and committers
look there while they wait. Trainers leave it in their exchange as well: a disk that is full may not take the note
either. A rank that finds a note raises the error that the failing rank raises, with the same text.

Imports without torch. It starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.errors import (
    CheckpointError,
    ConfigError,
    LakeckptError,
    MissingRanksError,
    ObjectMissing,
    SaveFailed,
    StateError,
    TrackingError,
    UnsupportedValue,
    error_of,
)
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.waiting import Waiter

__all__ = [
    "ListeningWaiter",
    "Notes",
    "error_said",
    "failure_noted",
    "failure_published",
    "gave_up",
    "leave_note",
    "leave_word",
    "publish_failure",
    "said_of",
    "word_left",
]

_SLICE_S = 0.25
"""How long a rank waits at the most before it looks for notes of the exchange again."""
_MOST_BYTES = 4000


class Notes(Protocol):
    """Where trainers leave notes for each other: a `lakeckpt.tracking.exchange.Exchange` is one."""

    def publish(self, key: str, data: bytes, /) -> None:
        """Leave a note; never waits for anyone."""
        ...

    def peek(self, key: str, /) -> bytes | None:
        """The note of that key; None where there is none yet."""
        ...


def said_of(error: BaseException) -> str:
    """The kind of an error and its text, for `error_said` in another process.

    An error of a user's code stops the rank that it is raised on, whatever ``on_save_failure`` says. The other ranks
    raise `CheckpointError` for it, which stops them as well.
    """
    if isinstance(error, LakeckptError):
        return f"{error.kind}\n{error}"
    kind = SaveFailed.kind if isinstance(error, OSError) else CheckpointError.kind
    return f"{kind}\n{type(error).__name__}: {error}"


def error_said(said: str, *, prefix: str = "") -> LakeckptError:
    """The error that another process has said (`said_of`), of a class that a trainer handles as it does its own."""
    kind, _, text = said.partition("\n")
    found = error_of(kind, prefix + text, otherwise=SaveFailed)
    if isinstance(found, MissingRanksError):
        return SaveFailed(str(found))
    if isinstance(found, (CheckpointError, TrackingError, StateError, UnsupportedValue, ConfigError)):
        return found
    return SaveFailed(str(found))


# --- notes in storage


def publish_failure(storage: Storage, save: SaveId, rank: int, error: Exception) -> bool:
    """Leave a note in storage. False where the store does not take it: then the note of the exchange, or the deadline,
    tells the other ranks."""
    try:
        storage.put(save.failure_path(rank), [_note_of(error)])
    except Exception:
        return False
    return True


def failure_published(storage: Storage, save: SaveId, rank: int) -> LakeckptError | None:
    """Return the error of the note that ``rank`` has left of ``save`` in storage, or None. One request."""
    try:
        return _error_of(rank, storage.read(save.failure_path(rank)))
    except ObjectMissing:
        return None


def gave_up(storage: Storage, path: str, rank: int) -> LakeckptError:
    """The error of the note at ``path``, which ``rank`` has left in storage."""
    try:
        return _error_of(rank, storage.read(path))
    except OSError as error:
        return SaveFailed(f"rank {rank} gave the checkpoint up: its note cannot be read: {error}")


def _note_of(error: BaseException) -> bytes:
    return said_of(error).encode("utf-8", "replace")[:_MOST_BYTES]


def _error_of(rank: int, note: bytes) -> LakeckptError:
    said = note.decode("utf-8", "replace")
    names_rank = said.partition("\n")[2].startswith("rank ")
    return error_said(said, prefix="" if names_rank else f"rank {rank} gave the checkpoint up: ")


# --- notes of the exchange


def leave_note(notes: Notes, save: SaveId, rank: int, error: Exception) -> None:
    """Leave a note in the exchange, unless another rank has left one of this save: the first cause counts."""
    with suppress(RuntimeError):  # the store of the exchange is gone, and the ranks with it
        if notes.peek(_key(save)) is None:
            notes.publish(_key(save), b"%d\n%s" % (rank, _note_of(error)))


def failure_noted(notes: Notes, save: SaveId) -> LakeckptError | None:
    """The error of the note that a rank has left of ``save`` in the exchange; None where there is none."""
    found = notes.peek(_key(save))
    if found is None:
        return None
    rank, _, note = found.partition(b"\n")
    return _error_of(int(rank), note)


def _key(save: SaveId) -> str:
    return f"failed/{save.folder}"


def leave_word(notes: Notes, attempt: int, rank: int, error: BaseException, *, first: int) -> None:
    """Say in the exchange that this rank stops for ``error``, and takes part in no save from the ``first`` on."""
    with suppress(RuntimeError):
        if notes.peek(f"stopped/{attempt}") is None:
            notes.publish(f"stopped/{attempt}", b"%d %d\n%s" % (rank, first, _note_of(error)))


def word_left(notes: Notes, attempt: int) -> tuple[int, LakeckptError] | None:
    """The number of the first save in which a rank that has stopped takes no part, and why it stopped."""
    found = notes.peek(f"stopped/{attempt}")
    if found is None:
        return None
    numbers, _, note = found.partition(b"\n")
    rank, first = map(int, numbers.split())
    return first, error_said(note.decode("utf-8", "replace"), prefix=f"rank {rank} has stopped: ")


class ListeningWaiter:
    """A `Waiter` that calls ``listen`` while it waits, at least every 0.25 s; what ``listen`` raises goes through."""

    def __init__(self, inner: Waiter, listen: Callable[[], None]) -> None:
        self._inner, self._listen = inner, listen

    def now(self) -> float:
        """See `Waiter`."""
        return self._inner.now()

    def wait(self, seconds: float) -> None:
        """See `Waiter`. It returns early where ``inner`` does."""
        left_s = seconds
        while left_s > 0:
            slice_s, before_s = min(left_s, _SLICE_S), self.now()
            self._inner.wait(slice_s)
            self._listen()
            if self.now() - before_s < slice_s / 2:
                return
            left_s -= slice_s
