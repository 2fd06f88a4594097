"""What does an agent do while the store fails?  It tries again, ever less often, for as long as it makes sense.

Failures that say something about the object (it is there, it is not, it is another), stores that can never commit, and
stores that are full or refuse this user go through at once: the next save finds out whether somebody has mended that.
All others are repeated after 0.1 s, 0.2 s, … up to 30 s, until ``is_hopeless`` says that the work is
not worth it any more: a newer cut waits, or the time is over. Whatever is repeated means the same when done twice: see
`Storage`. Starts no threads; waits on the `Waiter` that it is given.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import TypeVar

from lakeckpt.errors import ConditionalPutUnsupported, ObjectChanged, ObjectExists, ObjectMissing, StorageError
from lakeckpt.lake.storage.base import Buffer, ObjectInfo, Storage, describe
from lakeckpt.tracking.waiting import Waiter

__all__ = ["RetryingStorage"]

_FIRST_S, _LONGEST_S = 0.1, 30.0
_FINAL = (ObjectExists, ObjectMissing, ObjectChanged, ConditionalPutUnsupported)
_LASTING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})
"""The system's reasons that time does not mend."""

_T = TypeVar("_T")


class RetryingStorage:
    """``inner``, tried again while it fails. ``failing(error)`` is told of each failure that is tried again."""

    def __init__(
        self,
        inner: Storage,
        *,
        waiter: Waiter,
        is_hopeless: Callable[[], bool],
        failing: Callable[[StorageError], None] = lambda error: None,
    ) -> None:
        self.name = describe(inner)
        self._inner = inner
        self._waiter = waiter
        self._is_hopeless = is_hopeless
        self._failing = failing

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See `Storage`."""
        return self._tried(lambda: self._inner.list(prefix))

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        """See `Storage`."""
        return self._tried(lambda: self._inner.read(path, start, stop, etag=etag))

    def put(self, path: str, chunks: Iterable[Buffer]) -> int:
        """See `Storage`. The chunks are gone through once for each try."""
        again = list(chunks)
        return self._tried(lambda: self._inner.put(path, again))

    def put_new(self, path: str, data: bytes) -> None:
        """See `Storage`."""
        self._tried(lambda: self._inner.put_new(path, data))

    def delete(self, path: str) -> None:
        """See `Storage`."""
        self._tried(lambda: self._inner.delete(path))

    def _tried(self, call: Callable[[], _T]) -> _T:
        pause_s = _FIRST_S
        while True:
            try:
                return call()
            except _FINAL:
                raise
            except StorageError as error:
                if error.errno in _LASTING or self._is_hopeless():
                    raise
                self._failing(error)
            self._waiter.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
