"""The calls of a local storage, until the n-th of them cuts the power of the disk below."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from tests.system.disks import Disk

_COUNTED = frozenset(
    ("open", "mkdir", "write", "pread", "preadv", "lstat", "stat", "listdir", "rename", "link", "unlink", "rmdir")
)


class PowerCut(OSError):
    """The process died with its machine."""


class CuttingCalls:
    """The module `os` for a storage, until the n-th call cuts the power.

    ``leave_out`` says of a descriptor that its fsync is not made.
    """

    def __init__(self, disk: Disk, cut_at: int, leave_out: Callable[[int], bool] = lambda descriptor: False) -> None:
        self.disk, self.cut_at, self.leave_out = disk, cut_at, leave_out
        self.made = 0
        self.dark = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in _COUNTED:
            return real

        def call(*given: Any, **named: Any) -> Any:
            self.count()
            return real(*given, **named)

        return call

    def count(self) -> None:
        if self.dark:
            raise PowerCut(errno.EIO, "there is no power")
        self.made += 1
        if self.made == self.cut_at:
            self.cut()

    def cut(self) -> None:
        self.dark = True
        self.disk.cut_power()
        raise PowerCut(errno.EIO, "the power was cut")

    def fsync(self, descriptor: int) -> None:
        self.count()
        if not self.leave_out(descriptor):
            os.fsync(descriptor)
