"""This module encodes the errors that ranks, their agents and their workers send to each other: as a kind and a text.

It is the only such encoding: answers of rounds, obstacles, votes of a restore, and the orders and outcomes of an agent
contain it. It imports without torch and starts no threads.
"""

from __future__ import annotations

from lakeckpt.errors import (
    CheckpointError,
    ConfigError,
    LakeckptError,
    MissingRanksError,
    SaveFailed,
    StateError,
    StorageError,
    TrackingError,
    UnsupportedValue,
    error_of,
)

__all__ = ["error_from_text", "error_to_text", "save_error"]


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


def save_error(text: str, *, prefix: str = "") -> LakeckptError:
    """Return the error of a save of which another process has sent ``text`` (`error_to_text`), of a class that a
    trainer handles as it handles its own."""
    found = error_from_text(text, prefix=prefix, otherwise=SaveFailed)
    if isinstance(found, MissingRanksError):
        return SaveFailed(str(found))
    if isinstance(found, (CheckpointError, TrackingError, StateError, UnsupportedValue, ConfigError)):
        return found
    return SaveFailed(str(found))
