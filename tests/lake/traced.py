"""Calls of the operating system that are recorded, fail at the n-th, or are the last of a process that dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from lakeckpt.lake.storage import direct, local
from lakeckpt.lake.storage.local import LocalStorage

CHANGES = ("mkdir", "create", "write", "fsync", "rename", "link", "unlink", "rmdir")


@contextmanager
def os_of_the_storage(module: Any) -> Iterator[None]:
    """Let the local storage make the calls of ``module`` in place of those of `os`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "os", module)
        patch.setattr(direct, "os", module)
        if hasattr(module, "token_hex"):
            patch.setattr(local, "secrets", module)
        yield


class _OverCalls:
    def __init__(self, inner: LocalStorage, module: Any) -> None:
        self._inner, self._module = inner, module

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*given: Any, **named: Any) -> Any:
            with os_of_the_storage(self._module):
                return method(*given, **named)

        return call


def storage_over(root: str | os.PathLike[str], module: Any) -> LocalStorage:
    """A local storage each of whose methods makes the calls of ``module`` in place of those of `os`."""
    return cast(LocalStorage, _OverCalls(LocalStorage(root), module))


class Crash(BaseException):
    """The process is gone: nothing after this happens."""


class TracedOs:
    """The module `os` for a `storage_over`: ``events`` lists what was done as (call, path[, path]).

    ``fail`` maps (call, n) to what the n-th such call (from 1; 0: each) raises instead of being done. ``crash_at``: the
    number of the call (of those that change something) that is not done, nor any after it. ``short_writes``: at most 3
    bytes are written at a time. ``before(call, path)`` runs ahead of each call.
    """

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

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def of(self, *calls: str) -> list[tuple[str, ...]]:
        return [event for event in self.events if event[0] in calls]

    def before(self, call: str, path: str) -> None:
        """Do nothing; for tests that let something happen here."""

    def token_hex(self, size: int) -> str:
        self._tokens += 1
        return f"t{self._tokens}"

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
        self.before(call, paths[-1])
        self.events.append((call, *paths))

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._enter("create", path)
        descriptor = os.open(path, flags, mode)
        self._open[descriptor] = path
        return descriptor

    def mkdir(self, path: str) -> None:
        if os.path.isdir(path):
            raise FileExistsError(path)
        self._enter("mkdir", path)
        os.mkdir(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._enter("write", self._open[descriptor])
        return os.write(descriptor, data[:3] if self.short_writes else data)

    def fsync(self, descriptor: int) -> None:
        self._enter("fsync", self._open[descriptor])
        os.fsync(descriptor)

    def rename(self, old: str, new: str) -> None:
        self._enter("rename", old, new)
        os.rename(old, new)

    def link(self, old: str, new: str) -> None:
        self._enter("link", old, new)
        os.link(old, new)

    def unlink(self, path: str) -> None:
        self._enter("unlink", path)
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        self._enter("rmdir", path)
        os.rmdir(path)

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor)
        os.close(descriptor)

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
        if call == "mkdir":
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
