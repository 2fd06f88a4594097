"""This module stops a rank at the point in a step where the fault script kills it.

The rank that a fault names writes a small file when it reaches the point, and waits until `lakeckpt.demo.supervise`, in
another process, sends SIGKILL. lakeckpt itself is not patched, and no rank kills itself.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from lakeckpt.demo.scenario import DemoConfig

__all__ = ["Trip", "armed_path"]


def armed_path(folder: Path, phase: int) -> Path:
    """Return the file by which a rank says that it waits at its fault. It holds the rank's process id."""
    return folder / f"launch-{phase:02d}.armed"


class Trip:
    """The fault of a phase, as one rank sees it."""

    def __init__(self, config: DemoConfig, phase: int, rank: int) -> None:
        fault = config.phases[phase].fault
        self._fault = fault if fault is not None and fault.rank == rank else None
        self._path = armed_path(config.records, phase)

    def reach(self, point: str, step: int) -> None:
        """Stop here if the fault is at ``point`` of ``step``."""
        if self._fault is not None and (self._fault.point, self._fault.step) == (point, step):
            self._stop()

    def _stop(self) -> None:
        fresh = self._path.with_suffix(f".{os.getpid()}")
        fresh.write_text(str(os.getpid()))
        fresh.rename(self._path)
        time.sleep(60)
        raise RuntimeError("waited at the fault for 60 s, and nobody killed this process: does the demo still run?")
