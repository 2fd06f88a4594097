"""This module defines all errors that lakeckpt raises on purpose, grouped by what a handler would do.

Every error names what was found, where (file, row group, lane, rank, step) and what to do next. ``kind`` is a
stable, machine-readable name::

    LakeckptError
    ├── ConfigError            an argument is wrong: fix the call                                    (ValueError)
    ├── TableError             the lake is not as the run needs it, or cannot be read exactly
    │   ├── TableNotFound      nothing to read there                                          (FileNotFoundError)
    │   ├── SchemaError        a column is missing, or files disagree                                (ValueError)
    │   ├── NullValueError     a null where none was allowed                                         (ValueError)
    │   ├── TableRewritten     a newer version is no append, and the reader follows appends
    │   ├── DataFileDamaged    a file or row group cannot be decoded: restore it
    │   └── DataFileChanged    the pinned listing no longer holds
    │       └── TableVersionGone   files of the pinned version are gone: bring them back, or move on
    ├── StateError             a reader state cannot be used, or is malformed                        (ValueError)
    │   ├── StateMismatch      it belongs to another order of rows
    │   └── StateUnavailable   it cannot be known here                                             (RuntimeError)
    ├── WorkerDied             a loader's worker process ended: iterate again; look at its exit code (RuntimeError)
    ├── WorkerTimeout          no answer in the time that a loader's ``timeout`` gives             (TimeoutError)
    ├── TrackingError          the ranks are not at one cut, or one reported twice                 (RuntimeError)
    │   └── MissingRanksError  ranks that did not report
    ├── CheckpointError        a checkpoint cannot be made or used                                 (RuntimeError)
    │   ├── CheckpointNotFound
    │   ├── CheckpointDamaged      bytes are not what was written: an older one is tried
    │   ├── CheckpointMismatch     it does not fit the live objects: fix the script
    │   ├── AttemptSuperseded      a newer attempt owns the run: stop
    │   ├── RunInUse               ``exclusive=True``, and the run's job is alive: stop that job first
    │   ├── CrashLoop              the job dies again and again at one place: exit status 93            (SystemExit)
    │   ├── NodeLeaves             most deaths lie on this node, and others are enough: exit status 94  (SystemExit)
    │   ├── SaveFailed             the store refused, or ranks are silent: training may go on, nothing was committed
    │   │   ├── SaveRefused        no retry mends it: no permission, no bucket, a full disk
    │   │   ├── ReplicasDiffer     ranks that must hold one model hold others: find out which rank went astray
    │   │   └── SaveSkipped        another cut was persisted instead of this one
    │   ├── UnannouncedChange  the state changed between a cut and the fence: call manager.fence() before it does
    │   └── AgentError             the process that persists cannot be started or reached: see its log
    ├── ArenaError             cuts in host memory cannot be kept or found                         (RuntimeError)
    │   └── ArenaDamaged           the memory is not what was written: take an older cut
    ├── WireError              bytes that are not our format                                         (ValueError)
    │   ├── WireDamaged
    │   ├── NewerFormat        written by a newer major version: upgrade
    │   └── UnsupportedValue   a value outside the closed list of types, or larger or deeper than is ever written
    └── StorageError           a store failed                                                           (OSError)
        ├── ObjectExists       a conditional put lost                                           (FileExistsError)
        ├── ObjectMissing                                                                     (FileNotFoundError)
        ├── ObjectChanged      it is not the object that was listed
        └── ConditionalPutUnsupported   the store cannot commit atomically: use another

Warnings of checkpoints: `BackupWarning`, `CaptureWarning`, `DamageWarning`, `RestartWarning`, `RetentionWarning`,
`SaveWarning`. `UntestedVersionWarning` is the warning of `lakeckpt.integrations`.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AgentError",
    "ArenaDamaged",
    "ArenaError",
    "AttemptSuperseded",
    "BackupWarning",
    "CaptureWarning",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "ConditionalPutUnsupported",
    "ConfigError",
    "CrashLoop",
    "DamageWarning",
    "DataFileChanged",
    "DataFileDamaged",
    "LakeckptError",
    "MissingRanksError",
    "NewerFormat",
    "NodeLeaves",
    "NullValueError",
    "ObjectChanged",
    "ObjectExists",
    "ObjectMissing",
    "ReplicasDiffer",
    "RestartWarning",
    "RetentionWarning",
    "RunInUse",
    "SaveFailed",
    "SaveRefused",
    "SaveSkipped",
    "SaveWarning",
    "SchemaError",
    "StateError",
    "StateMismatch",
    "StateUnavailable",
    "StorageError",
    "TableError",
    "TableNotFound",
    "TableRewritten",
    "TableVersionGone",
    "TrackingError",
    "UnannouncedChange",
    "UnsupportedValue",
    "UntestedVersionWarning",
    "WireDamaged",
    "WireError",
    "WorkerDied",
    "WorkerTimeout",
    "error_of",
    "one_line",
    "shown",
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
    """The lake is not as the run needs it, or has what cannot be read exactly. Nothing was read."""


class TableNotFound(TableError, FileNotFoundError, kind="table_not_found"):
    """Nothing to read at the place named."""


class SchemaError(TableError, ValueError, kind="schema"):
    """A column is missing, of an unsupported type, or files disagree about it."""


class TableRewritten(TableError, kind="table_rewritten"):
    """A newer version of a table that is followed removes rows or writes them again. Nothing of it was read."""


class _InRowGroup(Exception):
    """An error that names a file of the table, and the part of the file."""

    def __init__(
        self, message: str, *, file: str = "", row_group: int | None = None, column: str | None = None
    ) -> None:
        super().__init__(message)
        self.file = file
        self.row_group = row_group
        self.column = column


class DataFileDamaged(_InRowGroup, TableError, kind="data_file_damaged"):
    """A data file cannot be decoded.

    ``file`` is its path in the table, ``row_group`` its ordinal in the file, ``column`` the first damaged column; None
    if it is not known, or the file as a whole.
    """


class NullValueError(_InRowGroup, TableError, ValueError, kind="null_value"):
    """A null where the caller allowed none; ``column``, ``file`` and ``row_group`` name the place, if it is known."""


class DataFileChanged(TableError, kind="data_file_changed"):
    """A data file is no longer the one that the run pinned."""


class TableVersionGone(DataFileChanged, kind="table_version_gone"):
    """Files of the pinned version of a table are gone. ``files`` are their paths in the table."""

    def __init__(self, message: str, *, files: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.files = files


class StateError(LakeckptError, ValueError, kind="state"):
    """A reader state cannot be used, or is malformed."""


class StateMismatch(StateError, kind="state_mismatch"):
    """A reader state belongs to another order of rows."""


class StateUnavailable(StateError, RuntimeError, kind="state_unavailable"):
    """The reader state cannot be known here."""


class WorkerDied(LakeckptError, RuntimeError, kind="worker_died"):
    """A worker process of a loader ended early. The batches that the loop received are counted.

    ``worker`` is its number; ``exit_code`` is negative if a signal killed it, None if it is not known.
    """

    def __init__(self, message: str, *, worker: int | None = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.exit_code = exit_code


class WorkerTimeout(LakeckptError, RuntimeError, TimeoutError, kind="worker_timeout"):
    """A worker process of a loader gave no answer within the loader's ``timeout``."""


class TrackingError(LakeckptError, RuntimeError, kind="tracking"):
    """The reports of the ranks do not add up: ranks are at different cuts, or a rank reported more than once."""


class MissingRanksError(TrackingError, kind="missing_ranks"):
    """Ranks did not report."""


class CheckpointError(LakeckptError, RuntimeError, kind="checkpoint"):
    """A checkpoint cannot be made or used."""


class CheckpointNotFound(CheckpointError, kind="checkpoint_not_found"):
    """There is no such checkpoint."""


class CheckpointDamaged(CheckpointError, kind="checkpoint_damaged"):
    """Bytes of a checkpoint are not what was written."""


class CheckpointMismatch(CheckpointError, kind="checkpoint_mismatch"):
    """A checkpoint does not fit the live objects."""


class AttemptSuperseded(CheckpointError, kind="attempt_superseded"):
    """A newer attempt owns the run; this one must stop."""


class RunInUse(CheckpointError, kind="run_in_use"):
    """The job of this run is alive, and the manager is exclusive: nothing was changed."""


class CrashLoop(CheckpointError, SystemExit, kind="crash_loop"):
    """The job has died again and again without progress: nothing was changed, and no restart helps. A process that does
    not handle it ends with status 93."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.code = 93


class NodeLeaves(CheckpointError, SystemExit, kind="node_leaves"):
    """Most deaths of the job lie on this node, and the other nodes go on without it. A process that does not handle it
    ends with status 94."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.code = 94


class SaveFailed(CheckpointError, kind="save_failed"):
    """A checkpoint could not be written, or parts of it are missing. Nothing was committed; training may go on."""


class SaveRefused(SaveFailed, kind="save_refused"):
    """A store refuses checkpoints for a reason that no retry mends: no permission, no bucket, a full disk."""


class ReplicasDiffer(SaveFailed, kind="replicas_differ"):
    """Replicas that captured a share each do not hold one model: their shares are no checkpoint."""


class SaveSkipped(SaveFailed, kind="save_skipped"):
    """A cut was not persisted, because a newer one was, or because there was no memory to keep it."""


class UnannouncedChange(CheckpointError, kind="unannounced_change"):
    """A tensor changed between a cut and the fence, or an optimizer step calls no hook. The capture was dropped."""


class AgentError(CheckpointError, kind="agent_error"):
    """The process that persists cuts beside the trainers cannot be started, or does not answer."""


class ArenaError(LakeckptError, RuntimeError, kind="arena"):
    """Cuts in host memory cannot be kept or found: no memory is free, or another process fills the arena."""


class ArenaDamaged(ArenaError, kind="arena_damaged"):
    """The memory of an arena is not what was written."""


class WireError(LakeckptError, ValueError, kind="wire"):
    """Bytes that are not a document of ours, or a value that cannot become one."""


class WireDamaged(WireError, kind="wire_damaged"):
    """A document is truncated or altered."""


class NewerFormat(WireError, kind="newer_format"):
    """A document was written by a newer major version of its format."""


class UnsupportedValue(WireError, kind="unsupported_value"):
    """A value outside the closed list of types that we write and read, or larger or deeper than any."""


class StorageError(LakeckptError, OSError, kind="storage"):
    """A store failed, or did not answer in time."""


class ObjectExists(StorageError, FileExistsError, kind="object_exists"):
    """A conditional put found an object in its place."""


class ObjectMissing(StorageError, FileNotFoundError, kind="object_missing"):
    """There is no such object."""


class ObjectChanged(StorageError, kind="object_changed"):
    """There is another object than the one that was listed: its ETag differs."""


class ConditionalPutUnsupported(StorageError, kind="conditional_put_unsupported"):
    """The store cannot put an object only if there is none."""


class CaptureWarning(UserWarning):
    """Captures cannot run beside training as they should, or take longer. The captured states are complete and correct
    all the same."""


class DamageWarning(UserWarning):
    """An object of the run is not as it was written. Either the restore took an older checkpoint, or it did not need
    the object. The warning is also raised for a cut in memory that cannot be restored; its message then says
    that nothing is damaged."""


class RestartWarning(UserWarning):
    """Something that the script gives differs from the attempt before, and the run goes on without it; or the ranks
    cannot make the global batch that the script asks for."""


class BackupWarning(UserWarning):
    """A backup was not made that was due; it is tried again after the next commit."""


class RetentionWarning(UserWarning):
    """Checkpoints that are not to be kept could not be removed, and take up room; the next save tries again."""


class SaveWarning(UserWarning):
    """A save failed and training goes on; nothing was committed."""


class UntestedVersionWarning(UserWarning):
    """A framework is installed in a version that the tests of its integration did not run with."""


def error_of(kind: str, text: str, *, otherwise: type[LakeckptError]) -> LakeckptError:
    """Return the error that another process raised, by its ``kind`` and text; ``otherwise`` for other kinds."""
    every = [one for one in globals().values() if isinstance(one, type) and issubclass(one, LakeckptError)]
    return next((one for one in every if one.kind == kind), otherwise)(text)


def shown(value: object, most: int = 80) -> str:
    """Return the repr of what a user gave, on one line of at most ``most`` characters: a tokenizer's holds its whole
    vocabulary. If that is too long, its class leads."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{type(value).__name__}: {text}"[: most - 1] + "…"


def one_line(error: object, most: int = 300) -> str:
    """Return the text of an error of another library on one line, at most ``most`` characters of it."""
    return " ".join(str(error).split())[:most]
