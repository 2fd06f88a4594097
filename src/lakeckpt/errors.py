"""This module defines what can go wrong, grouped by what a handler would do about it.

Every error says what was found, where (file, row group, lane, rank, step) and what to do next. ``kind`` is a
stable, machine-readable name::

    LakeckptError
    ├── ConfigError            an argument is wrong: mend the call                                   (ValueError)
    ├── TableError             the lake is not as the run needs it
    │   ├── TableNotFound      nothing to read there                                          (FileNotFoundError)
    │   ├── SchemaError        a column is missing, or files disagree                                (ValueError)
    │   ├── TableFeatureUnsupported    the table needs what cannot be read exactly                  (ValueError)
    │   ├── NullValueError     a null where none was allowed                                         (ValueError)
    │   ├── DataFileDamaged    a file or row group cannot be decoded: restore it
    │   ├── RowGroupTooLarge   it decodes to more than is allowed: read fewer columns
    │   └── DataFileChanged    the pinned listing no longer holds
    │       └── TableVersionGone   files of the pinned version are gone: bring them back, or move on
    ├── StateError             a reader state cannot be used                                         (ValueError)
    │   ├── StateMismatch      it belongs to another order of rows
    │   ├── StateInvalid       it is malformed
    │   └── StateUnavailable   it cannot be known here                                             (RuntimeError)
    ├── WorkerDied             a loader's worker process ended: iterate again; look at its exit code (RuntimeError)
    ├── WorkerTimeout          no answer in the time that a loader's ``timeout`` gives             (TimeoutError)
    ├── TrackingError          the ranks do not add up, or one reported twice                      (RuntimeError)
    │   ├── MissingRanksError  ranks that did not report
    │   └── DisagreementError  ranks that are not at the same cut
    ├── CheckpointError        a checkpoint cannot be made or used                                 (RuntimeError)
    │   ├── CheckpointNotFound
    │   ├── CheckpointDamaged      bytes are not what was written: an older one is tried
    │   ├── CheckpointMismatch     it does not fit the live objects: mend the script
    │   ├── CheckpointIncomplete   parts are missing
    │   ├── AttemptSuperseded      a newer attempt owns the run: stop
    │   ├── SaveFailed             the store refused: training may go on, nothing was committed
    │   │   └── SaveLeftOut        another cut was persisted instead of this one
    │   ├── UnannouncedChange  the state changed between a cut and the fence: call manager.fence() before it does
    │   └── AgentError             the process that persists cannot be started or reached: see its log
    ├── ArenaError             cuts in host memory cannot be kept or found                         (RuntimeError)
    │   ├── ArenaDamaged           the memory is not what was written: take an older cut
    │   ├── ArenaInUse             another process fills it: let it end first
    │   └── ArenaTooLarge          it does not fit into the memory that is free
    ├── WireError              bytes that are not our format                                         (ValueError)
    │   ├── WireDamaged
    │   ├── NewerFormat        written by a newer major version: upgrade
    │   └── UnsupportedValue   a value outside the closed list of types, or larger or deeper than is ever written
    └── StorageError           a store failed                                                           (OSError)
        ├── ObjectExists       a conditional put lost                                           (FileExistsError)
        ├── ObjectMissing                                                                     (FileNotFoundError)
        ├── ObjectChanged      it is not the object that was listed
        ├── StorageTimeout     no (whole) answer in the time that a call has: look at the store        (TimeoutError)
        └── ConditionalPutUnsupported   the store cannot commit atomically: use another
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AgentError",
    "ArenaDamaged",
    "ArenaError",
    "ArenaInUse",
    "ArenaTooLarge",
    "AttemptSuperseded",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointIncomplete",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "ConditionalPutUnsupported",
    "ConfigError",
    "DataFileChanged",
    "DataFileDamaged",
    "DisagreementError",
    "LakeckptError",
    "MissingRanksError",
    "NewerFormat",
    "NullValueError",
    "ObjectChanged",
    "ObjectExists",
    "ObjectMissing",
    "RowGroupTooLarge",
    "SaveFailed",
    "SaveLeftOut",
    "SchemaError",
    "StateError",
    "StateInvalid",
    "StateMismatch",
    "StateUnavailable",
    "StorageError",
    "StorageTimeout",
    "TableError",
    "TableFeatureUnsupported",
    "TableNotFound",
    "TableVersionGone",
    "TrackingError",
    "UnannouncedChange",
    "UnsupportedValue",
    "WireDamaged",
    "WireError",
    "WorkerDied",
    "WorkerTimeout",
    "error_of",
]


class LakeckptError(Exception):
    """The root of all errors that lakeckpt raises on purpose."""

    kind: ClassVar[str] = "lakeckpt"

    def __init_subclass__(cls, *, kind: str | None = None, **rest: object) -> None:
        super().__init_subclass__(**rest)
        cls.kind = cls.kind if kind is None else kind


class ConfigError(LakeckptError, ValueError, kind="config"):
    """An argument is wrong; nothing was done."""


class TableError(LakeckptError, kind="table"):
    """The lake is not as the run needs it."""


class TableNotFound(TableError, FileNotFoundError, kind="table_not_found"):
    """Nothing to read at the place named."""


class SchemaError(TableError, ValueError, kind="schema"):
    """A column is missing, of an unsupported type, or files disagree about it."""


class TableFeatureUnsupported(TableError, ValueError, kind="table_feature_unsupported"):
    """The version of the table uses what we, or its format's library, cannot read exactly; nothing was read."""


class _InRowGroup(Exception):
    """What went wrong in a file of the table, and in which part of it."""

    def __init__(
        self, message: str, *, file: str = "", row_group: int | None = None, column: str | None = None
    ) -> None:
        super().__init__(message)
        self.file = file
        self.row_group = row_group
        self.column = column

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.file, self.row_group, self.column))


def _rebuild(
    kind: type[_InRowGroup], message: str, file: str, row_group: int | None, column: str | None
) -> _InRowGroup:
    return kind(message, file=file, row_group=row_group, column=column)


class DataFileDamaged(_InRowGroup, TableError, kind="data_file_damaged"):
    """A data file cannot be decoded.

    ``file`` is its path in the table, ``row_group`` its ordinal in the file, ``column`` the first damaged column; None
    where it is not known, or the file as a whole.
    """


class NullValueError(_InRowGroup, TableError, ValueError, kind="null_value"):
    """A null where the caller allowed none; ``column``, ``file`` and ``row_group`` say where, as far as it is known."""


class RowGroupTooLarge(_InRowGroup, TableError, kind="row_group_too_large"):
    """A row group takes more bytes, uncompressed, than is allowed; ``file``, ``row_group``, ``column`` say which."""


class DataFileChanged(TableError, kind="data_file_changed"):
    """A data file is no longer the one that the run pinned."""


class TableVersionGone(DataFileChanged, kind="table_version_gone"):
    """Files of the pinned version of a table are gone. ``files`` are their paths in the table."""

    def __init__(self, message: str, *, files: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.files = files

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_gone, (str(self), self.files))


def _rebuild_gone(message: str, files: tuple[str, ...]) -> TableVersionGone:
    return TableVersionGone(message, files=files)


class StateError(LakeckptError, ValueError, kind="state"):
    """A reader state cannot be used."""


class StateMismatch(StateError, kind="state_mismatch"):
    """A reader state belongs to another order of rows."""


class StateInvalid(StateError, kind="state_invalid"):
    """A reader state is malformed."""


class StateUnavailable(StateError, RuntimeError, kind="state_unavailable"):
    """The reader state cannot be known here."""


class WorkerDied(LakeckptError, RuntimeError, kind="worker_died"):
    """A worker process of a loader ended before it had delivered what was due. What the loop received is counted.

    ``worker`` is its number; ``exit_code`` is negative where a signal killed it, None where it is not known.
    """

    def __init__(self, message: str, *, worker: int | None = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_died, (str(self), self.worker, self.exit_code))


def _rebuild_died(message: str, worker: int | None, exit_code: int | None) -> WorkerDied:
    return WorkerDied(message, worker=worker, exit_code=exit_code)


class WorkerTimeout(LakeckptError, RuntimeError, TimeoutError, kind="worker_timeout"):
    """A worker process of a loader gave no answer within the loader's ``timeout``."""


class TrackingError(LakeckptError, RuntimeError, kind="tracking"):
    """What the ranks report does not add up, or a rank reported more than once."""


class MissingRanksError(TrackingError, kind="missing_ranks"):
    """Ranks did not report."""


class DisagreementError(TrackingError, kind="disagreement"):
    """Ranks are not at the same cut."""


class CheckpointError(LakeckptError, RuntimeError, kind="checkpoint"):
    """A checkpoint cannot be made or used."""


class CheckpointNotFound(CheckpointError, kind="checkpoint_not_found"):
    """There is no such checkpoint."""


class CheckpointDamaged(CheckpointError, kind="checkpoint_damaged"):
    """Bytes of a checkpoint are not what was written."""


class CheckpointMismatch(CheckpointError, kind="checkpoint_mismatch"):
    """A checkpoint does not fit the live objects."""


class CheckpointIncomplete(CheckpointError, kind="checkpoint_incomplete"):
    """Parts of a checkpoint are missing."""


class AttemptSuperseded(CheckpointError, kind="attempt_superseded"):
    """A newer attempt owns the run; this one must stop."""


class SaveFailed(CheckpointError, kind="save_failed"):
    """A checkpoint could not be written; nothing was committed."""


class SaveLeftOut(SaveFailed, kind="save_left_out"):
    """A cut was not persisted, as there was another one to persist instead, or no memory to keep it until then."""


class UnannouncedChange(CheckpointError, kind="unannounced_change"):
    """A tensor changed between a cut and the fence, or an optimizer step calls no hook. The capture was dropped."""


class AgentError(CheckpointError, kind="agent_error"):
    """The process that persists cuts beside the trainers cannot be started, or does not answer."""


class ArenaError(LakeckptError, RuntimeError, kind="arena"):
    """Cuts in host memory cannot be kept or found."""


class ArenaDamaged(ArenaError, kind="arena_damaged"):
    """The memory of an arena is not what was written."""


class ArenaInUse(ArenaError, kind="arena_in_use"):
    """Another process fills an arena."""


class ArenaTooLarge(ArenaError, kind="arena_too_large"):
    """An arena does not fit into the memory that is free."""


class WireError(LakeckptError, ValueError, kind="wire"):
    """Bytes that are not a document of ours, or a value that cannot become one."""


class WireDamaged(WireError, kind="wire_damaged"):
    """A document is truncated or altered."""


class NewerFormat(WireError, kind="newer_format"):
    """A document was written by a newer major version of its format."""


class UnsupportedValue(WireError, kind="unsupported_value"):
    """A value outside the closed list of types that we write and read, or larger or deeper than any."""


class StorageError(LakeckptError, OSError, kind="storage"):
    """A store failed."""


class ObjectExists(StorageError, FileExistsError, kind="object_exists"):
    """A conditional put found an object in its place."""


class ObjectMissing(StorageError, FileNotFoundError, kind="object_missing"):
    """There is no such object."""


class ObjectChanged(StorageError, kind="object_changed"):
    """There is another object than the one that was listed: its ETag differs."""


class StorageTimeout(StorageError, TimeoutError, kind="storage_timeout"):
    """The store did not give a whole answer in the time that a call has."""


class ConditionalPutUnsupported(StorageError, kind="conditional_put_unsupported"):
    """The store cannot put an object only where there is none."""


def error_of(kind: str, text: str, *, otherwise: type[LakeckptError]) -> LakeckptError:
    """What another process raised, told as its ``kind`` and its text; of class ``otherwise`` where no class has it."""
    every = [one for one in globals().values() if isinstance(one, type) and issubclass(one, LakeckptError)]
    return next((one for one in every if one.kind == kind), otherwise)(text)
