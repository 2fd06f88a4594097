"""Which epoch do the workers of a plain torch DataLoader read?  They agree through a small file.

A torch DataLoader hands every worker process its own copy of the dataset and never tells the main process's copy that
an iteration began, so an epoch counted in either would be lost. The workers of one iteration agree on its epoch through
a file that belongs to the main process: the first worker of an iteration moves it on, the others join. An iteration is
told by torch's base seed and by which workers have begun: a worker that begins again begins another iteration.

The file is made with the dataset, locked with flock while it is read and written, and removed with the dataset.
`lakeckpt.LakeLoader` plans in the main process and needs none of this.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

__all__ = ["EpochFile"]


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class EpochFile:
    """A file in the temporary folder; picklable by its path, removed by the process that made it."""

    def __init__(self) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="lakeckpt-epoch-")
        os.close(descriptor)
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())

    def __getstate__(self) -> str:
        return self.path

    def __setstate__(self, path: str) -> None:
        self.path = path

    def used(self, rank: int) -> bool:
        """Whether a worker of ``rank`` has begun an iteration."""
        with self._locked() as known:
            return str(rank) in known

    def clear(self, rank: int) -> None:
        """Forget the iterations of ``rank``: its main process goes to another place."""
        with self._locked() as known:
            known.pop(str(rank), None)

    def join(self, rank: int, worker: int, base_seed: int, *, first: int, loaded: int | None) -> tuple[int, bool]:
        """Return the epoch that ``worker`` of ``rank`` reads now, and whether it is the first iteration since `clear`.

        ``first`` is the epoch of the first iteration; ``loaded`` the epoch of a state given to the worker itself.
        """
        with self._locked() as known:
            mine = known.get(str(rank))
            if mine is None:
                mine = {"seed": base_seed, "epoch": first, "workers": [], "iteration": 0}
            elif mine["seed"] != base_seed or worker in mine["workers"]:
                mine = {
                    "seed": base_seed,
                    "epoch": mine["epoch"] + 1,
                    "workers": [],
                    "iteration": mine["iteration"] + 1,
                }
            if loaded is not None:
                mine["epoch"] = loaded
            mine["workers"].append(worker)
            known[str(rank)] = mine
        return int(mine["epoch"]), mine["iteration"] == 0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        # Made anew where it is missing: the dataset may have been sent to another machine.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            raw = file.read()
            known: dict[str, Any] = json.loads(raw) if raw else {}
            yield known
            file.seek(0)
            file.truncate()
            file.write(json.dumps(known).encode())
