"""Where exactly does a rank die? At a point in a step that the fault script chose, and nowhere else.

How: the rank that a fault names says so when it reaches the point (one small file, renamed into place) and then stands
still until the fault script, a process outside, sends SIGKILL. Points inside a save are met by an audit hook of the
interpreter: it sees every rename and link below the run's folder, whatever code makes it.

Never: no rank kills itself, and lakeckpt is not patched: the hook only watches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from lakeckpt.cli.demo.scenario import Fault

__all__ = ["Trip", "armed_path"]

_WATCHED = {"before-part": ("os.rename", "parts"), "before-commit": ("os.link", "log")}
"""Point → the interpreter's audit event, and the folder of a run's checkpoints that it must concern."""


def armed_path(folder: Path, launch: int) -> Path:
    """The file by which a rank says that it stands at its fault."""
    return folder / f"launch-{launch:02d}.armed.json"


class Trip:
    """The fault of this launch, as this rank sees it: ``reach`` stands still where the fault is meant for it."""

    def __init__(self, fault: Fault | None, *, rank: int, folder: Path, launch: int, checkpoints: Path) -> None:
        self._fault = fault if fault is not None and fault.rank == rank else None
        self._path = armed_path(folder, launch)
        watched = _WATCHED.get(self._fault.point) if self._fault else None
        self._event = watched and watched[0]
        self._folder = watched and str(checkpoints.resolve() / watched[1])
        self._saving = False
        if self._event is not None:
            sys.addaudithook(self._watch)

    def reach(self, point: str, step: int) -> None:
        """Called by the loop at each point of each step."""
        if self._fault is not None and (self._fault.point, self._fault.step) == (point, step):
            self._stand()

    def enter_cut(self, step: int) -> None:
        """From here until `leave_cut`, what is renamed or linked below the run's folder belongs to this step's save."""
        self._saving = self._fault is not None and self._fault.step == step

    def leave_cut(self) -> None:
        self._saving = False

    def _watch(self, event: str, args: tuple[Any, ...]) -> None:
        if self._saving and event == self._event and self._folder is not None:
            target = os.path.join(_folder_of(args[3]), os.fspath(args[1]))
            if target.startswith(self._folder):
                self._stand()

    def _stand(self) -> None:
        self._saving = False
        fresh = self._path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({"pid": os.getpid(), "time": time.monotonic()}))
        fresh.rename(self._path)
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
        raise RuntimeError("stood at the chosen fault for 60 s, and no fault script came: is it still running?")


def _folder_of(descriptor: int) -> str:
    """The folder that a call's path is relative to: an open one, or the current one (-1)."""
    return os.getcwd() if descriptor < 0 else os.readlink(f"/proc/self/fd/{descriptor}")
