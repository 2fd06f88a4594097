"""This module keeps markers: files in the folder of arenas which say that a launcher's job has begun a run at a place.

A restore leaves a marker on each of its nodes if a launcher restarts this job: torchrun, or Slurm. If the job is
restarted and its place lists no run, the marker tells that the run is away and not new. The marker lies on the node,
because what lies in the run is away with the run. It is a file ``<digest of the place>.begun`` of some 200 bytes.

`launchers` returns what a restarted job has in common with the job before, and with no other job. A run id that
torchrun gives by default ("none") is every job's: the process that started this rank then stands for the launcher.

A folder that cannot be read or written has no markers. Imports without torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.errors import ArenaError, WireError
from lakeckpt.wire.documents import Count, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Marker", "began_s", "launchers", "leave_marker", "marker_at", "remove_marker"]

_SUFFIX = ".begun"
_KIND, _VERSION = "marker", (1, 0)
_OLD_S = 30 * 86_400.0
"""A marker that no restore and no save has renewed for so long is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A job of these `launchers` has begun a run at ``place``; ``step`` is the newest checkpoint that it knew."""

    place: str
    launchers: tuple[str, ...]
    step: Count


def launchers(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names of what restarts this process as a part of one job; empty if nothing says so.

    >>> launchers({"SLURM_JOB_ID": "81"}), launchers({"TORCHELASTIC_RUN_ID": "exp-7"})
    (('Slurm job 81',), ('torchrun exp-7',))
    """
    found = []
    if (run := environment.get("TORCHELASTIC_RUN_ID")) is not None:
        is_own = run in ("", "none")
        found.append(f"torchrun {run}" if not is_own else _parent())
    if job := environment.get("SLURM_JOB_ID"):
        found.append(f"Slurm job {job}")
    return tuple(found)


def began_s(pid: int) -> float | None:
    """Return when a process of this machine began, in seconds since 1970; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat, open("/proc/uptime", "rb") as uptime:
            fields = stat.read().rpartition(b")")[2].split()
            up_s = float(uptime.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return None if fields[0] in (b"Z", b"X") else time.time() - up_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def marker_at(folder: ArenaFolder, place: bytes) -> Marker | None:
    """Return the marker of the place with this digest, or None."""
    with contextlib.suppress(OSError, WireError), open(_path(folder, place), "rb") as file:
        found: Marker = from_plain(Marker, loads(file.read(), kind=_KIND, supported=_VERSION), "a marker")
        return found
    return None


def leave_marker(folder: ArenaFolder, place: bytes, marker: Marker) -> None:
    """Write the marker of a place, or replace it. Remove markers that are a month old."""
    path = _path(folder, place)
    written = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError, ArenaError):
        folder.make()
        with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(dumps(to_plain(marker), kind=_KIND, version=_VERSION))
        os.replace(written, path)
        with os.scandir(folder.path) as entries:
            for entry in entries:
                if _SUFFIX in entry.name and entry.stat().st_mtime < time.time() - _OLD_S:
                    os.unlink(entry.path)


def remove_marker(folder: ArenaFolder, place: bytes) -> bool:
    """Remove the marker of a place. Return whether there was one."""
    with contextlib.suppress(OSError):
        os.unlink(_path(folder, place))
        return True
    return False


def _path(folder: ArenaFolder, place: bytes) -> str:
    return os.path.join(folder.path, f"{place.hex()}{_SUFFIX}")


def _parent() -> str:
    """Return the name of the process that started this one: it lives on while torchrun restarts its ranks."""
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/stat", "rb") as stat:
        ticks = stat.read().rpartition(b")")[2].split()[19].decode()
        return f"torchrun, process {os.getppid()} since {ticks} on {socket.gethostname()}"
    return f"torchrun, process {os.getppid()} on {socket.gethostname()}"
