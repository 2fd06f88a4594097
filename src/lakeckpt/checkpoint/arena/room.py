"""How much memory can be had?  What Linux estimates for the machine, and what the control groups of this process allow.

A container is ended when it takes more than its group may, however much the machine has free; memory of arenas counts.
Of what a group has taken, cached files that nobody reads are given back when memory is needed, and count as free.

It reads a few small files and takes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["available_bytes"]

_ANY = 1 << 62
"""More than anybody has: where nothing is known."""
_OLD, _NEW = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), ("max", "current", "inactive_file")


def available_bytes(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> int:
    """What can be had without swapping and without leave of a control group."""
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
    """What the group ``path`` and all above it allow. In a container the path may be that of outside."""
    limit, usage, inactive = names
    inner = PurePosixPath(path.strip())
    for one in (inner, *inner.parents):
        folder = root / str(one).lstrip("/")
        allowed, taken = _number(folder / f"memory.{limit}"), _number(folder / f"memory.{usage}")
        if allowed is not None and taken is not None:
            yield allowed - taken + (_number(folder / "memory.stat", inactive) or 0)


def _number(path: Path, name: str | None = None) -> int | None:
    """The number in the file, or in its line that begins with ``name``; None where there is none ("max", say)."""
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
