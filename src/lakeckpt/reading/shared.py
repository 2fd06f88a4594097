"""This module shares what all readers of a process use, such as threads, as long as one of them uses it.

A value is made for the first reader that asks for it, and lives as long as a reader refers to it. A forked process
begins with none, because it has no threads of its parent. The module starts no threads; several threads may ask.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Shared"]

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Shared(Generic[_K, _V]):
    """The values that ``make(key)`` makes, one for each key, as long as somebody refers to them."""

    def __init__(self, make: Callable[[_K], _V]) -> None:
        self._make = make
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._values: weakref.WeakValueDictionary[_K, _V] = weakref.WeakValueDictionary()

    def get(self, key: _K) -> _V:
        """Return the value of ``key``, which is made if nobody uses one."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                found = self._values[key] = self._make(key)
            return found
