"""Where do benchmarks keep gigabytes for a while?  In folders that go when the run goes, however it ends.

A folder's name tells the process that made it. It is removed at the end, also where SIGTERM or SIGINT ends the run;
what a run that was killed outright has left is removed by the next one of the same name.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ["MEMORY", "place_for_a_run"]

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
"""Where files lie in host memory, if anywhere."""


@contextmanager
def place_for_a_run(name: str, *, under: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A new folder under ``under`` (default: where temporary files lie) for a run of benchmark ``name``.

    Only in the main thread: signals are told there.
    """
    parent = Path(tempfile.gettempdir() if under is None else under)
    _clear(parent, name)
    before = signal.signal(signal.SIGTERM, _end)
    made = Path(tempfile.mkdtemp(prefix=f"{_prefix(name)}{os.getpid()}-", dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _prefix(name: str) -> str:
    return f"lakeckpt-{name}-"


def _clear(parent: Path, name: str) -> None:
    """Remove what runs that are dead have left."""
    for one in parent.glob(f"{_prefix(name)}*-*"):
        pid = one.name.removeprefix(_prefix(name)).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and one.stat().st_uid == os.getuid():
            shutil.rmtree(one, ignore_errors=True)


def _end(number: int, _: FrameType | None) -> None:
    """As SIGINT does: whoever is to clean up does so on the way out."""
    sys.exit(128 + number)
