"""This module reads how much memory this process may take: the machine's, and what its control groups allow.

A container is killed when it takes more than its control group (version 1 or 2) may. In a container the path of a group
may be that of outside, so that the groups above it are read, too. The module reads a few small files and allocates
nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["available_bytes", "machine_bytes"]

_ANY = 1 << 62
"""More than any machine has: if nothing is known."""
_PROC, _GROUPS = "/proc", "/sys/fs/cgroup"
_OLD, _NEW = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), ("max", "current", "inactive_file")

_Names = tuple[str, str, str]


def machine_bytes(proc: str = _PROC, groups: str = _GROUPS) -> int:
    """Return the memory of the machine, or less if a control group of this process allows less."""
    allowed = [limit for _, limit, _ in _limited(proc, groups)]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *allowed])


def available_bytes(proc: str = _PROC, groups: str = _GROUPS) -> int:
    """Return how many bytes can be allocated without swapping and within the limits of all control groups.

    Cached files that nobody reads are freed when memory is needed, and count as available.
    """
    found = _number(Path(proc, "meminfo"), "MemAvailable:")
    free = [_ANY if found is None else found * 1024]
    for folder, limit, (_, usage, inactive) in _limited(proc, groups):
        if (taken := _number(folder / f"memory.{usage}")) is not None:
            free.append(limit - taken + (_number(folder / "memory.stat", inactive) or 0))
    return max(0, min(free))


def _limited(proc: str, groups: str) -> Iterator[tuple[Path, int, _Names]]:
    """Yield the control groups of this process that have a limit: (folder, limit in bytes, names of files in it)."""
    for line in _lines(Path(proc, "self/cgroup")):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            yield from _limited_above(Path(groups), path, _NEW)
        elif "memory" in controllers.split(","):
            yield from _limited_above(Path(groups, "memory"), path, _OLD)


def _limited_above(root: Path, path: str, names: _Names) -> Iterator[tuple[Path, int, _Names]]:
    """Do the same for the group ``path`` below ``root`` and all groups above it."""
    inner = PurePosixPath(path.strip())
    for one in (inner, *inner.parents):
        folder = root / str(one).lstrip("/")
        if (limit := _number(folder / f"memory.{names[0]}")) is not None:
            yield folder, limit, names


def _number(path: Path, name: str | None = None) -> int | None:
    """Return the number in the file, or in its line that begins with ``name``; None if there is none ("max")."""
    for line in _lines(path):
        words = line.split()
        if name is None or (words and words[0] == name):
            with contextlib.suppress(ValueError, IndexError):
                return int(words[0 if name is None else 1])
    return None


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text("ascii").splitlines()
    return []
