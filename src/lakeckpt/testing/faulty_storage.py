"""This module wraps a `Storage` so that its n-th call fails, lies, or is the last thing that the process does.

`FaultyStorage` wraps any storage and does to chosen calls what stores do to programs. Faults are addressed by method
and number, never by time or chance, so that a failing case is a line to copy::

    FaultyStorage(inner, fail_at={("put_new", 1): StoreFault.LOST_ANSWER, ("*", 7): StoreFault.KILL})

means: the first ``put_new`` succeeds, but its caller hears of an error; the seventh call of any kind never happens, and
the storage is dead from then on. Calls that are not addressed go through unchanged. Keeps the record ``calls``.
"""

from __future__ import annotations

import enum
import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from lakeckpt.errors import ConfigError, StorageError
from lakeckpt.lake.storage.base import Buffer, ObjectInfo, Storage, describe

__all__ = ["FaultyStorage", "Killed", "StoreFault"]

METHODS = ("list", "read", "put", "put_new", "delete")


class StoreFault(enum.Enum):
    """What happens to a call. Each kind says which methods it can happen to; the others refuse it at once."""

    ERROR = "error"  # any: nothing is done, StorageError
    FULL = "full"  # put, put_new: nothing is done, StorageError of a full disk, which no retry mends
    LOST_ANSWER = "lost answer"  # any: it is done, and yet StorageError
    TORN = "torn"  # put: the first half becomes visible, then StorageError
    SILENT_TEAR = "silent tear"  # put: the first half becomes visible, and success is reported
    FLIPPED = "flipped"  # read: one bit in the middle of the answer is wrong
    KILL = "kill"  # any: nothing is done, Killed; every later call raises Killed
    KILL_AFTER = "kill after"  # any: it is done, then as KILL
    KILL_TORN = "kill torn"  # put: the first half becomes visible, then as KILL


_PUT = ("put",)
_ONLY = {
    StoreFault.TORN: _PUT,
    StoreFault.SILENT_TEAR: _PUT,
    StoreFault.KILL_TORN: _PUT,
    StoreFault.FLIPPED: ("read",),
    StoreFault.FULL: ("put", "put_new"),
}


class Killed(BaseException):
    """The process is dead: like SIGKILL, not to be caught by the code under test."""


class FaultyStorage:
    """A `Storage` whose calls fail as ``fail_at`` says.

    ``fail_at`` maps (method, n) to a `StoreFault`: the n-th call (from 1) of that method, ``"*"`` counting all methods
    together. ``before(method, path)`` is called ahead of each call, to force an interleaving. ``calls`` lists
    (method, path) of all calls so far; for ``list`` the path is the prefix. ``inner`` is the storage that is wrapped.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        fail_at: Mapping[tuple[str, int], StoreFault] | None = None,
        before: Callable[[str, str], None] | None = None,
    ) -> None:
        self.inner = inner
        self._faults = dict(fail_at or {})
        for (method, n), fault in self._faults.items():
            if method not in (*METHODS, "*") or n < 1 or not isinstance(fault, StoreFault):
                raise ConfigError(f"a fault is addressed by ({'|'.join(METHODS)}|*, n >= 1), not by {(method, n)!r}")
            if method != "*" and method not in _ONLY.get(fault, (method,)):
                raise ConfigError(f"{fault} can only happen to {' and '.join(_ONLY[fault])}, not to {method!r}")
        self._before = before
        self._lock = threading.Lock()
        self.calls: list[tuple[str, str]] = []
        self.dead = False

    @property
    def name(self) -> str:
        return describe(self.inner)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        fault = self._enter("list", prefix)
        found = self.inner.list(prefix)
        self._leave(fault, "list", prefix)
        return found

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        fault = self._enter("read", path)
        try:
            data = self.inner.read(path, start, stop, etag=etag)
        except StorageError:
            if fault is StoreFault.KILL_AFTER:  # a call that fails is a call, too
                self._die("read", path)
            raise
        self._leave(fault, "read", path)
        if fault is StoreFault.FLIPPED and data:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data

    def put(self, path: str, chunks: Sequence[Buffer]) -> int:
        fault = self._enter("put", path)
        if fault in (StoreFault.TORN, StoreFault.SILENT_TEAR, StoreFault.KILL_TORN):
            data = b"".join(chunks)
            self.inner.put(path, [data[: len(data) // 2]])
            self._leave(fault, "put", path)
            return len(data)
        size = self.inner.put(path, chunks)
        self._leave(fault, "put", path)
        return size

    def put_new(self, path: str, data: bytes) -> None:
        fault = self._enter("put_new", path)
        self.inner.put_new(path, data)
        self._leave(fault, "put_new", path)

    def delete(self, path: str) -> None:
        fault = self._enter("delete", path)
        self.inner.delete(path)
        self._leave(fault, "delete", path)

    def _enter(self, method: str, path: str) -> StoreFault | None:
        """Count the call, and raise what keeps it from happening."""
        if self._before is not None:
            self._before(method, path)
        with self._lock:
            if self.dead:
                raise Killed(f"{method} {path!r} after the process was killed")
            self.calls.append((method, path))
            n = sum(1 for called, _ in self.calls if called == method)
            fault = self._faults.get((method, n)) or self._faults.get(("*", len(self.calls)))
        if fault is not None and method not in _ONLY.get(fault, (method,)):
            raise ConfigError(f"call {len(self.calls)} is {method} {path!r}, to which {fault} cannot happen")
        if fault is StoreFault.FULL:
            error = StorageError(f"injected: {method} {path!r} failed, as the disk is full")
            error.errno = errno.ENOSPC
            raise error
        if fault is StoreFault.ERROR:
            raise StorageError(f"injected: {method} {path!r} failed before it was done")
        if fault is StoreFault.KILL:
            self._die(method, path)
        return fault

    def _leave(self, fault: StoreFault | None, method: str, path: str) -> None:
        """Raise what the caller gets although (part of) the call was done."""
        if fault is StoreFault.LOST_ANSWER:
            raise StorageError(f"injected: {method} {path!r} was done, but the answer was lost")
        if fault is StoreFault.TORN:
            raise StorageError(f"injected: {method} {path!r} was torn")
        if fault in (StoreFault.KILL_AFTER, StoreFault.KILL_TORN):
            self._die(method, path)

    def _die(self, method: str, path: str) -> NoReturn:
        with self._lock:
            self.dead = True
        raise Killed(f"injected: killed at {method} {path!r}")
