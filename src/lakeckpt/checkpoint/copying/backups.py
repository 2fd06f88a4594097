"""This module makes backups of a run: copies at other places, after commits, as often as a `Backup` says.

Whether a backup is due is found by comparing the newest checkpoints of the run and of the copy, so a job that starts
again goes on with its backups. A thread copies, one backup after the other. What fails is tried again after the next
commit. The module never imports torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from lakeckpt.checkpoint.copying.run_copy import copy_run
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.errors import ConfigError, LakeckptError, UnsupportedValue
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.wire.envelope import dumps

__all__ = ["Backup", "Backups"]


@dataclass(frozen=True, slots=True)
class Backup:
    """A copy of a run that its job keeps at another place, for ``CheckpointManager(backups=[…])``.

    ``uri``: the place, a folder or a URL. ``every``: how many optimizer steps (int) or how much time (timedelta, or
    seconds as a float) the newest checkpoint is ahead of the copy before it is copied. ``storage_options``: of the
    place's store, as plain values. Raises `ConfigError`.
    """

    uri: str
    every: int | float | timedelta
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        every = self.every.total_seconds() if isinstance(self.every, timedelta) else self.every
        if isinstance(every, bool) or not isinstance(every, (int, float)) or not 0 < every < float("inf"):
            raise ConfigError(
                f"every of a Backup is a positive number of steps (int), a timedelta or seconds (float), got {every!r}"
            )
        try:
            dumps(dict(self.storage_options), kind="value", version=(1, 0))
        except UnsupportedValue as error:
            raise ConfigError(
                f"storage_options of a Backup go to the agent, a process of its own, and must be plain values: {error}"
            ) from error
        object.__setattr__(self, "every", every)

    def is_due(self, source: Storage, target: Storage) -> bool:
        """Return whether the newest checkpoint at ``source`` is so far ahead of the copy at ``target``."""
        newest, copied = read_history(source).tip, read_history(target).tip
        if newest is None or copied is None:
            return newest is not None
        ahead = newest.step - copied.step if isinstance(self.every, int) else newest.created_s - copied.created_s
        return newest.slot > copied.slot and ahead >= float(self.every)  # type: ignore[arg-type]


class Backups:
    """Keeps the ``backups`` of the run at ``storage``. ``log`` gets a line for each. One thread calls the methods."""

    def __init__(self, storage: Storage, backups: Sequence[Backup], log: Callable[[str], None]) -> None:
        self._storage, self._backups, self._log = storage, backups, log
        self._thread: threading.Thread | None = None
        self.failed = ""
        """Why the last backup that was due was not made; empty if it was."""

    def committed(self) -> None:
        """A checkpoint was committed: begin to make the backups that are due, unless some are being made."""
        if self._backups and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._make, name="lakeckpt-backup", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait for the backups that are being made."""
        if self._thread is not None:
            self._thread.join()

    def _make(self) -> None:
        failed = ""
        for one in self._backups:
            try:
                target = open_storage(one.uri, storage_options=one.storage_options or None)
                if one.is_due(self._storage, target):
                    done = copy_run(self._storage, target)
                    self._log(f"step {done.step} is copied to {describe(target)} ({done.written_bytes:,} bytes)")
            except (LakeckptError, OSError) as error:
                failed = f"the backup at {one.uri} was not made, and is tried again after the next commit: {error}"
                self._log(failed)
        self.failed = failed
