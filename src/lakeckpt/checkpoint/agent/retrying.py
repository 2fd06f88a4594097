"""This module retries the calls of a storage that fails, ever less often, for as long as a save may take.

It serves outages that last longer than the retries of the storage itself (about a minute): an agent has more time. A
call is tried again after 0.1 s, 0.2 s, … up to 30 s, until ``is_hopeless``: a newer cut waits, another rank has dropped
the save, or the time is over.
Errors about the object (it exists, it is missing, it has changed), stores that can never commit, and stores that are
full or refuse this user are raised at once: the next save tries again. A repeated call means the same as one call: see
`Storage`. The module starts no threads, and waits on a `Waiter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lakeckpt.errors import ObjectChanged, ObjectExists, ObjectMissing, StorageError
from lakeckpt.lake.storage.base import Buffer, ObjectInfo, Storage, delete_all, describe, is_lasting
from lakeckpt.tracking.waiting import LONGEST_S, Waiter

__all__ = ["RetryingStorage"]

_FIRST_S, _LONGEST_S = 0.1, 30.0
_FINAL = (ObjectExists, ObjectMissing, ObjectChanged)

_T = TypeVar("_T")


class RetryingStorage:
    """Retries the calls of ``inner``. ``failing(error)`` is called for each error after which a call is retried."""

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
        """See `Storage`. The chunks are read once for each try."""
        again = list(chunks)
        return self._tried(lambda: self._inner.put(path, again))

    def put_new(self, path: str, data: bytes) -> None:
        """See `Storage`."""
        self._tried(lambda: self._inner.put_new(path, data))

    def delete(self, path: str) -> None:
        """See `Storage`."""
        self._tried(lambda: self._inner.delete(path))

    def delete_all(self, paths: Sequence[str]) -> None:
        """See `lakeckpt.lake.storage.base.delete_all`."""
        self._tried(lambda: delete_all(self._inner, paths))

    def _tried(self, call: Callable[[], _T]) -> _T:
        pause_s = _FIRST_S
        while True:
            try:
                return call()
            except _FINAL:
                raise
            except StorageError as error:
                if is_lasting(error) or self._is_hopeless():
                    raise
                self._failing(error)
            self._wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

    def _wait(self, seconds: float) -> None:
        """Wait before the next try, which follows at once if it is the last one."""
        while seconds > 0 and not self._is_hopeless():
            self._waiter.wait(min(seconds, LONGEST_S))
            seconds -= LONGEST_S
