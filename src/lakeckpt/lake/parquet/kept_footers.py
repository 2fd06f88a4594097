"""This module keeps parsed footers, so that a data file that is opened again is not read for its footer once more.

All tables of a process share the footers that were used last, up to 64 MiB of memory. A kept footer holds no file
descriptor. The key that a caller gives must differ for a file that was written again. Threads may share the footers; a
forked process begins with none. The module starts no threads.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import pyarrow.parquet as pq

__all__ = ["KeptFooters", "kept_footers"]

_PARSED = 8
"""A parsed footer takes up to so many times the bytes that it has in its file."""


class KeptFooters:
    """The footers that were used last, of at most ``most_bytes`` as they lie in memory; one may be larger."""

    def __init__(self, most_bytes: int = 64 * 2**20) -> None:
        self._most_bytes = most_bytes
        self.forget()

    def forget(self) -> None:
        """Begin with no footer."""
        self._lock, self._size_bytes = threading.Lock(), 0
        self._footers: OrderedDict[Hashable, pq.FileMetaData] = OrderedDict()

    def get(self, key: Hashable, read: Callable[[], pq.FileMetaData]) -> pq.FileMetaData:
        """Return the footer of ``key``, which ``read`` reads if it is not kept. Raises what ``read`` raises."""
        with self._lock:
            if key in self._footers:
                self._footers.move_to_end(key)
                return self._footers[key]
        found = read()
        with self._lock:
            if self._footers.setdefault(key, found) is found:  # no other thread has read it meanwhile
                self._size_bytes += _PARSED * found.serialized_size
            while self._size_bytes > self._most_bytes and len(self._footers) > 1:
                self._size_bytes -= _PARSED * self._footers.popitem(last=False)[1].serialized_size
        return found


kept_footers = KeptFooters()
os.register_at_fork(after_in_child=kept_footers.forget)
