"""This module stops a rank at the point in a step where the fault script kills it.

The rank that a fault names writes a small file when it reaches the point, and waits until `lakeckpt.demo.supervise`, in
another process, sends SIGKILL. Points inside a save are noticed by an audit hook of the interpreter, which sees every
rename and link below the run's folder. lakeckpt itself is not patched, and no rank kills itself.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from lakeckpt.demo.scenario import DemoConfig

__all__ = ["Trip", "armed_path"]

_WATCHED = {"before-part": ("os.rename", "parts"), "before-commit": ("os.link", "log")}
"""Point → the interpreter's audit event, and the folder of the run that it must concern."""


def armed_path(folder: Path, launch: int) -> Path:
    """Return the file by which a rank says that it waits at its fault. It holds the rank's process id."""
    return folder / f"launch-{launch:02d}.armed"


class Trip:
    """The fault of a launch, as one rank sees it."""

    def __init__(self, config: DemoConfig, launch: int, rank: int) -> None:
        fault = config.phases[launch].fault
        self._fault = fault if fault is not None and fault.rank == rank else None
        self._path = armed_path(config.records, launch)
        self._saving = False
        if self._fault is not None and self._fault.point in _WATCHED:
            self._event, folder = _WATCHED[self._fault.point]
            self._folder = str(config.checkpoints.resolve() / folder)
            sys.addaudithook(self._watch)

    def reach(self, point: str, step: int) -> None:
        """Stop here if the fault is at ``point`` of ``step``."""
        if self._fault is not None and (self._fault.point, self._fault.step) == (point, step):
            self._stop()

    def save_begins(self, step: int) -> None:
        """Count what is renamed or linked below the run's folder as part of the save of ``step``."""
        self._saving = self._fault is not None and self._fault.step == step

    def save_ends(self) -> None:
        self._saving = False

    def _watch(self, event: str, args: tuple[Any, ...]) -> None:
        if self._saving and event == self._event:
            folder = os.getcwd() if args[3] < 0 else os.readlink(f"/proc/self/fd/{args[3]}")
            if os.path.join(folder, os.fspath(args[1])).startswith(self._folder):
                self._stop()

    def _stop(self) -> None:
        self._saving = False
        fresh = self._path.with_suffix(f".{os.getpid()}")
        fresh.write_text(str(os.getpid()))
        fresh.rename(self._path)
        time.sleep(60)
        raise RuntimeError("waited at the fault for 60 s, and nobody killed this process: does the demo still run?")
