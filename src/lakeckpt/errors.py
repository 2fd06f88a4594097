"""What can go wrong, grouped by what a handler would do about it.

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
    │   ├── RowGroupTooLarge   it decodes to more than is allowed: raise max_row_group_bytes
    │   └── DataFileChanged    the pinned listing no longer holds
    │       └── TableVersionGone   files of the pinned version are gone: bring them back, or move on
    ├── StateError             a reader state cannot be used                                         (ValueError)
    │   ├── StateMismatch      it belongs to another order of rows
    │   ├── StateInvalid       it is malformed
    │   └── StateUnavailable   it cannot be known here                                             (RuntimeError)
    ├── WorkerError            a loader's worker process does not go on                            (RuntimeError)
    │   ├── WorkerDied         it ended, or was killed: iterate again; look at its exit code
    │   └── WorkerTimeout      no answer in the time that a loader's ``timeout`` gives           (TimeoutError)
    ├── TrackingError          the ranks do not add up                                             (RuntimeError)
    │   ├── OverlapError       rows reported twice
    │   ├── GapError           rows reported by nobody
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
    │   └── AgentError             the process that persists cannot be started or reached: see its log
    ├── ArenaError             cuts in host memory cannot be kept or found                         (RuntimeError)
    │   ├── ArenaDamaged           the memory is not what was written: take an older cut
    │   ├── ArenaInUse             another process fills it: let it end first
    │   └── ArenaTooLarge          it does not fit into the memory that is free
    ├── WireError              bytes that are not our format                                         (ValueError)
    │   ├── WireDamaged
    │   ├── NewerFormat        written by a newer major version: upgrade
    │   ├── UnsupportedValue   a value outside the closed list of types
    │   └── LimitExceeded      larger or deeper than is ever written
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
    "GapError",
    "LakeckptError",
    "LimitExceeded",
    "MissingRanksError",
    "NewerFormat",
    "NullValueError",
    "ObjectChanged",
    "ObjectExists",
    "ObjectMissing",
    "OverlapError",
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
    "UnsupportedValue",
    "WireDamaged",
    "WireError",
    "WorkerDied",
    "WorkerError",
    "WorkerTimeout",
    "error_of",
]


class LakeckptError(Exception):
    """The root of all errors that lakeckpt raises on purpose."""

    kind: ClassVar[str] = "lakeckpt"


class ConfigError(LakeckptError, ValueError):
    """An argument is wrong; nothing was done."""

    kind = "config"


class TableError(LakeckptError):
    """The lake is not as the run needs it."""

    kind = "table"


class TableNotFound(TableError, FileNotFoundError):
    """Nothing to read at the place named."""

    kind = "table_not_found"


class SchemaError(TableError, ValueError):
    """A column is missing, of an unsupported type, or files disagree about it."""

    kind = "schema"


class TableFeatureUnsupported(TableError, ValueError):
    """The version of the table uses what we, or its format's library, cannot read exactly; nothing was read."""

    kind = "table_feature_unsupported"


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


class DataFileDamaged(_InRowGroup, TableError):
    """A data file cannot be decoded.

    ``file`` is its path in the table, ``row_group`` its ordinal in the file, ``column`` the first damaged column; None
    where it is not known, or the file as a whole.
    """

    kind = "data_file_damaged"


class NullValueError(_InRowGroup, TableError, ValueError):
    """A null where the caller allowed none; ``column``, ``file`` and ``row_group`` say where, as far as it is known."""

    kind = "null_value"


class RowGroupTooLarge(_InRowGroup, TableError):
    """A row group decodes to more memory than is allowed; ``file``, ``row_group`` and ``column`` say which."""

    kind = "row_group_too_large"


class DataFileChanged(TableError):
    """A data file is no longer the one that the run pinned."""

    kind = "data_file_changed"


class TableVersionGone(DataFileChanged):
    """Files of the pinned version of a table are gone. ``files`` are their paths in the table."""

    kind = "table_version_gone"

    def __init__(self, message: str, *, files: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.files = files

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_gone, (str(self), self.files))


def _rebuild_gone(message: str, files: tuple[str, ...]) -> TableVersionGone:
    return TableVersionGone(message, files=files)


class StateError(LakeckptError, ValueError):
    """A reader state cannot be used."""

    kind = "state"


class StateMismatch(StateError):
    """A reader state belongs to another order of rows."""

    kind = "state_mismatch"


class StateInvalid(StateError):
    """A reader state is malformed."""

    kind = "state_invalid"


class StateUnavailable(StateError, RuntimeError):
    """The reader state cannot be known here."""

    kind = "state_unavailable"


class WorkerError(LakeckptError, RuntimeError):
    """A worker process of a loader does not go on; what the loop received before is counted."""

    kind = "worker"


class WorkerDied(WorkerError):
    """A worker process of a loader ended before it had delivered what was due.

    ``worker`` is its number; ``exit_code`` is negative where a signal killed it, None where it is not known.
    """

    kind = "worker_died"

    def __init__(self, message: str, *, worker: int | None = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_died, (str(self), self.worker, self.exit_code))


def _rebuild_died(message: str, worker: int | None, exit_code: int | None) -> WorkerDied:
    return WorkerDied(message, worker=worker, exit_code=exit_code)


class WorkerTimeout(WorkerError, TimeoutError):
    """A worker process of a loader gave no answer within the loader's ``timeout``."""

    kind = "worker_timeout"


class TrackingError(LakeckptError, RuntimeError):
    """What the ranks report does not add up."""

    kind = "tracking"


class OverlapError(TrackingError):
    """Rows were reported more than once."""

    kind = "overlap"


class GapError(TrackingError):
    """Rows were reported by nobody."""

    kind = "gap"


class MissingRanksError(TrackingError):
    """Ranks did not report."""

    kind = "missing_ranks"


class DisagreementError(TrackingError):
    """Ranks are not at the same cut."""

    kind = "disagreement"


class CheckpointError(LakeckptError, RuntimeError):
    """A checkpoint cannot be made or used."""

    kind = "checkpoint"


class CheckpointNotFound(CheckpointError):
    """There is no such checkpoint."""

    kind = "checkpoint_not_found"


class CheckpointDamaged(CheckpointError):
    """Bytes of a checkpoint are not what was written."""

    kind = "checkpoint_damaged"


class CheckpointMismatch(CheckpointError):
    """A checkpoint does not fit the live objects."""

    kind = "checkpoint_mismatch"


class CheckpointIncomplete(CheckpointError):
    """Parts of a checkpoint are missing."""

    kind = "checkpoint_incomplete"


class AttemptSuperseded(CheckpointError):
    """A newer attempt owns the run; this one must stop."""

    kind = "attempt_superseded"


class SaveFailed(CheckpointError):
    """A checkpoint could not be written; nothing was committed."""

    kind = "save_failed"


class SaveLeftOut(SaveFailed):
    """A cut was not persisted, as there was another one to persist instead, or no memory to keep it until then."""

    kind = "save_left_out"


class AgentError(CheckpointError):
    """The process that persists cuts beside the trainers cannot be started, or does not answer."""

    kind = "agent_error"


class ArenaError(LakeckptError, RuntimeError):
    """Cuts in host memory cannot be kept or found."""

    kind = "arena"


class ArenaDamaged(ArenaError):
    """The memory of an arena is not what was written."""

    kind = "arena_damaged"


class ArenaInUse(ArenaError):
    """Another process fills an arena."""

    kind = "arena_in_use"


class ArenaTooLarge(ArenaError):
    """An arena does not fit into the memory that is free."""

    kind = "arena_too_large"


class WireError(LakeckptError, ValueError):
    """Bytes that are not a document of ours, or a value that cannot become one."""

    kind = "wire"


class WireDamaged(WireError):
    """A document is truncated or altered."""

    kind = "wire_damaged"


class NewerFormat(WireError):
    """A document was written by a newer major version of its format."""

    kind = "newer_format"


class UnsupportedValue(WireError):
    """A value outside the closed list of types that we write and read."""

    kind = "unsupported_value"


class LimitExceeded(WireError):
    """A document is larger or deeper than any that we write."""

    kind = "limit_exceeded"


class StorageError(LakeckptError, OSError):
    """A store failed."""

    kind = "storage"


class ObjectExists(StorageError, FileExistsError):
    """A conditional put found an object in its place."""

    kind = "object_exists"


class ObjectMissing(StorageError, FileNotFoundError):
    """There is no such object."""

    kind = "object_missing"


class ObjectChanged(StorageError):
    """There is another object than the one that was listed: its ETag differs."""

    kind = "object_changed"


class StorageTimeout(StorageError, TimeoutError):
    """The store did not give a whole answer in the time that a call has."""

    kind = "storage_timeout"


class ConditionalPutUnsupported(StorageError):
    """The store cannot put an object only where there is none."""

    kind = "conditional_put_unsupported"


def error_of(kind: str, text: str, *, otherwise: type[LakeckptError]) -> LakeckptError:
    """What another process raised, told as its ``kind`` and its text; of class ``otherwise`` where no class has it."""
    every = [one for one in globals().values() if isinstance(one, type) and issubclass(one, LakeckptError)]
    return next((one for one in every if one.kind == kind), otherwise)(text)
