"""Calls of the operating system that are recorded, fail at the n-th, or are the last of a process that dies."""

from __future__ import annotations

import os
from typing import Any

from lakeckpt.lake.storage.oscalls import OsCalls

CHANGES = ("mkdir_path", "mkdir", "create", "write", "fsync", "rename", "link", "unlink", "rmdir")


class Crash(BaseException):
    """The process is gone: nothing after this happens."""


class TracedCalls(OsCalls):
    """The real calls, by path: ``events`` lists what was done as (call, path[, new path]).

    ``fail`` maps (call, n) to what the n-th such call (from 1) raises instead of being done. ``crash_at``: the number
    of the call (of those that change something) that is not done, nor any after it. ``short_writes``: at most 3 bytes
    are written at a time.
    """

    __slots__ = ("_changes", "_counts", "_open", "_tokens", "crash_at", "events", "fail", "short_writes")

    def __init__(
        self,
        *,
        fail: dict[tuple[str, int], Exception] | None = None,
        crash_at: int | None = None,
        short_writes: bool = False,
    ) -> None:
        self.events: list[tuple[str, ...]] = []
        self.fail = fail or {}
        self.crash_at = crash_at
        self.short_writes = short_writes
        self._open: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._changes = 0
        self._tokens = 0

    def of(self, *calls: str) -> list[tuple[str, ...]]:
        return [event for event in self.events if event[0] in calls]

    def _enter(self, call: str, *paths: str) -> None:
        self._counts[call] = self._counts.get(call, 0) + 1
        if call in CHANGES:
            self._changes += 1
            if self.crash_at is not None and self._changes >= self.crash_at:
                raise Crash(f"{call} {paths}")
        error = self.fail.get((call, self._counts[call]), self.fail.get((call, 0)))
        if error is not None:
            self.events.append((f"failed {call}", *paths))
            raise error
        self.events.append((call, *paths))

    def _at(self, folder: int, name: str) -> str:
        return f"{self._open[folder]}/{name}"

    def _opened(self, descriptor: int, path: str) -> int:
        self._open[descriptor] = path
        return descriptor

    def token(self) -> str:
        self._tokens += 1
        return f"t{self._tokens}"

    def open_root(self, path: str) -> int:
        return self._opened(super().open_root(path), path)

    def open_folder(self, name: str, folder: int) -> int:
        return self._opened(super().open_folder(name, folder), self._at(folder, name))

    def open_file(self, name: str, folder: int, follow: bool) -> int:
        return self._opened(super().open_file(name, folder, follow), self._at(folder, name))

    def create(self, name: str, folder: int) -> int:
        self._enter("create", self._at(folder, name))
        return self._opened(super().create(name, folder), self._at(folder, name))

    def mkdir_path(self, path: str) -> None:
        self._enter("mkdir_path", path)
        super().mkdir_path(path)

    def mkdir(self, name: str, folder: int) -> None:
        self._enter("mkdir", self._at(folder, name))
        super().mkdir(name, folder)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._enter("write", self._open[descriptor])
        return super().write(descriptor, data[:3] if self.short_writes else data)

    def fsync(self, descriptor: int) -> None:
        self._enter("fsync", self._open[descriptor])
        super().fsync(descriptor)

    def rename(self, old: str, new: str, folder: int) -> None:
        self._enter("rename", self._at(folder, old), self._at(folder, new))
        super().rename(old, new, folder)

    def link(self, old: str, new: str, folder: int) -> None:
        self._enter("link", self._at(folder, old), self._at(folder, new))
        super().link(old, new, folder)

    def unlink(self, name: str, folder: int) -> None:
        self._enter("unlink", self._at(folder, name))
        super().unlink(name, folder)

    def rmdir(self, name: str, folder: int) -> None:
        self._enter("rmdir", self._at(folder, name))
        super().rmdir(name, folder)

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor)
        super().close(descriptor)

    @property
    def changes(self) -> int:
        return self._changes

    @property
    def left_open(self) -> list[str]:
        return sorted(self._open.values())


def assert_durable(events: list[tuple[str, ...]], target: str, root: str) -> None:
    """Nothing unsynced ever had the target's name, and at the end its name and all new folders are on the disk."""
    written: dict[str, bool] = {}  # file -> synced since its last write
    entries: dict[str, bool] = {}  # name -> its folder was synced since the name was made
    for call, *paths in events:
        if call in ("create", "write"):
            written[paths[0]] = False
        elif call == "fsync" and paths[0] in written:
            written[paths[0]] = True
        if call in ("rename", "link") and paths[1] == target:
            assert written[paths[0]], f"{paths[0]} became {target} before it was synced"
        if call in ("mkdir", "mkdir_path"):
            entries[paths[0]] = False
        if call in ("rename", "link"):
            entries[paths[1]] = False
        if call == "fsync":
            for name in entries:
                entries[name] |= os.path.dirname(name) == paths[0]
    assert entries.get(target), f"the folder of {target} was not synced after it got its name"
    lost = [name for name, synced in entries.items() if not synced and target.startswith(f"{name}/")]
    assert not lost, f"new folders that a power cut may take away: {lost}"
    assert target.startswith(root)


def summary(events: list[tuple[str, ...]], root: str) -> list[str]:
    """The events as lines, with paths relative to the folder above the root."""

    def short(path: str) -> str:
        return os.path.relpath(path, os.path.dirname(root))

    def line(call: str, *paths: Any) -> str:
        return " ".join([call, *map(short, paths)])

    return [line(*event) for event in events]
