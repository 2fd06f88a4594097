"""This module lets a rank tell the other ranks of a save that the save fails on it, and why.

A rank that fails leaves a note. Every rank leaves the note in storage, beside the parts of the save: agents and
committers look there while they wait. Trainers leave the note in their exchange as well, because a full disk may not
take it. A rank that finds a note raises the error of the failing rank, with the same text.

The module imports without torch and starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.errors import (
    CheckpointError,
    ConfigError,
    LakeckptError,
    MissingRanksError,
    ObjectMissing,
    SaveFailed,
    SaveRefused,
    StateError,
    TrackingError,
    UnsupportedValue,
)
from lakeckpt.lake.storage.base import Storage, is_lasting
from lakeckpt.tracking.notes import LEFT, STOPPED, Note, error_from_text, error_to_text
from lakeckpt.tracking.waiting import Waiter

if TYPE_CHECKING:
    from lakeckpt.tracking.exchange import Exchange

__all__ = [
    "ListeningWaiter",
    "leave_note",
    "note_left",
    "note_stop",
    "noted_failure",
    "noted_stop",
    "publish_failure",
    "published_failure",
    "save_error",
    "save_failed",
]

_SLICE_S = 0.25
"""How long a rank waits at the most before it looks for notes of the exchange again."""


def save_error(text: str, *, prefix: str = "") -> LakeckptError:
    """Return the error of a save of which another process has sent ``text`` (`error_to_text`), of a class that a
    trainer handles as it handles its own."""
    found = error_from_text(text, prefix=prefix, otherwise=SaveFailed)
    if isinstance(found, MissingRanksError):
        return SaveFailed(str(found))
    if isinstance(found, (CheckpointError, TrackingError, StateError, UnsupportedValue, ConfigError)):
        return found
    return SaveFailed(str(found))


def save_failed(text: str, cause: Exception) -> SaveFailed:
    """Return the error of a save that fails for ``cause``, a store's error: `SaveRefused` if no retry mends it."""
    refused = isinstance(cause, SaveRefused) or is_lasting(cause)
    failure = (SaveRefused if refused else SaveFailed)(text)
    failure.__cause__ = cause
    return failure


def _error_of(note: Note) -> LakeckptError:
    names_rank = note.cause.startswith("rank ")
    return save_error(note.error, prefix="" if names_rank else f"rank {note.rank} dropped the save: ")


# --- notes in storage


def publish_failure(storage: Storage, save: SaveId, rank: int, error: Exception) -> bool:
    """Leave a note in storage. Return False if the store does not take it: then the note in the exchange, or the
    timeout, tells the other ranks."""
    try:
        storage.put(save.failure_path(rank), [Note(rank=rank, error=error_to_text(error)).to_bytes()])
    except Exception:
        return False
    return True


def published_failure(storage: Storage, save: SaveId, rank: int) -> LakeckptError | None:
    """Return the error of the note that ``rank`` has left of ``save`` in storage, or None. One request."""
    try:
        return _error_of(Note.from_bytes(storage.read(save.failure_path(rank))))
    except ObjectMissing:
        return None
    except ValueError:
        return SaveFailed(f"rank {rank} dropped the save, and its note is damaged: see its log")


# --- notes in the exchange


def leave_note(exchange: Exchange, save: SaveId, error: Exception) -> None:
    """Leave a note in the exchange that ``save`` fails on this rank."""
    _leave(exchange, _key(save), Note(rank=exchange.rank, error=error_to_text(error)))


def noted_failure(exchange: Exchange, save: SaveId) -> LakeckptError | None:
    """Return the error of the note that a rank has left of ``save`` in the exchange; None if there is none."""
    found = exchange.peek(_key(save))
    return None if found is None else _error_of(Note.from_bytes(found))


def note_stop(exchange: Exchange, error: BaseException, *, first: int = 0) -> None:
    """Leave a note in the exchange that this rank stops, and takes part in no save from number ``first`` on."""
    _leave(exchange, STOPPED, Note(rank=exchange.rank, error=error_to_text(error), first=first))


def note_left(exchange: Exchange, step: int, *, first: int) -> None:
    """Leave a note in the exchange that this rank ends well, and takes part in no save from number ``first`` on."""
    text = f"it closed its manager after step {step}. Let the loops of all ranks end at one step"
    _leave(exchange, LEFT, Note(rank=exchange.rank, error=error_to_text(SaveFailed(text)), first=first))


def noted_stop(exchange: Exchange, *, well: bool = True) -> tuple[int, LakeckptError] | None:
    """Return the number of the first save in which a rank that has stopped takes no part, and why it stopped.
    ``well``: also if it ended well."""
    found = exchange.peek(STOPPED) or (exchange.peek(LEFT) if well else None)
    if found is None:
        return None
    note = Note.from_bytes(found)
    error = save_error(note.error, prefix=f"rank {note.rank} has stopped: ")
    return note.first, SaveRefused(str(error)) if type(error) is SaveFailed else error  # no retry brings the rank back


def _key(save: SaveId) -> str:
    return f"failed/{save.folder}"


def _leave(exchange: Exchange, key: str, note: Note) -> None:
    """Leave a note, unless another rank has left one: the first cause counts."""
    with suppress(MissingRanksError):  # the store of the exchange is gone, and the ranks with it
        if exchange.peek(key) is None:
            exchange.publish(key, note.to_bytes())


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
