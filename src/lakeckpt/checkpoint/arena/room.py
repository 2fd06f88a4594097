"""This module reads how much memory is available to this process.

That is what Linux estimates for the machine, or less where a control group of this process allows less: a container is
killed when it takes more than its group may, and the memory of arenas counts. Cached files that nobody reads are freed
when memory is needed, and count as available. The module reads a few small files and allocates nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["available_bytes"]

_ANY = 1 << 62
"""More than any machine has: where nothing is known."""
_OLD, _NEW = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), ("max", "current", "inactive_file")


def available_bytes(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> int:
    """Return how many bytes can be allocated without swapping and within the limits of all control groups."""
    found = _number(Path(proc, "meminfo"), "MemAvailable:")
    free = [_ANY if found is None else found * 1024]
    for line in _lines(Path(proc, "self/cgroup")):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            free += _free_in(Path(groups), path, _NEW)
        elif "memory" in controllers.split(","):
            free += _free_in(Path(groups, "memory"), path, _OLD)
    return max(0, min(free))


def _free_in(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield what the group ``path`` and all groups above it allow. In a container the path may be the host's."""
    limit, usage, inactive = names
    inner = PurePosixPath(path.strip())
    for one in (inner, *inner.parents):
        folder = root / str(one).lstrip("/")
        allowed, taken = _number(folder / f"memory.{limit}"), _number(folder / f"memory.{usage}")
        if allowed is not None and taken is not None:
            yield allowed - taken + (_number(folder / "memory.stat", inactive) or 0)


def _number(path: Path, name: str | None = None) -> int | None:
    """Return the number in the file, or in its line that begins with ``name``; None where there is none ("max")."""
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
