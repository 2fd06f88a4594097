"""The calls of a local storage, until the n-th of them cuts the power of the disk below."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from lakeckpt.lake.storage.oscalls import OsCalls
from tests.system.disks import Disk

_COUNTED = [
    name for name in vars(OsCalls) if not name.startswith("_") and name not in ("token", "close", "lock", "fstat")
]


class PowerCut(OSError):
    """The process died with its machine."""


class CuttingCalls(OsCalls):
    """The real calls, until the n-th cuts the power; ``leave_out`` says of a descriptor that its fsync is not made."""

    def __init__(self, disk: Disk, cut_at: int, leave_out: Callable[[int], bool] = lambda descriptor: False) -> None:
        self.disk, self.cut_at, self.leave_out = disk, cut_at, leave_out
        self.made = 0
        self.dark = False

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
            super().fsync(descriptor)


def _counting(name: str) -> Callable[..., Any]:
    def call(self: CuttingCalls, *args: Any) -> Any:
        self.count()
        return getattr(OsCalls, name)(self, *args)

    return call


for _name in _COUNTED:
    if _name != "fsync":
        setattr(CuttingCalls, _name, _counting(_name))
