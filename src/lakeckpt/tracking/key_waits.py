"""This module waits for a key of a store on a thread, so that the rank that waits can look at other things meanwhile.

A wait in a `TCPStore` blocks its connection, and torch prints warnings whenever one ends without the key. So a wait
has a connection of its own, and blocks there once, for as long as the rank may wait. The store wakes it: nobody asks
the store again and again. Only the rank that waits, and the rank that wakes it, know the key: a rank that stops
waiting sets the key itself, unless it has a value: that may be the answer for which the rank waits. So the thread of a
wait always ends with the wait, however that ends; an interpreter that exits while a thread is blocked in torch would
abort.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

__all__ = ["KeyWaits"]

_JOIN_S = 5.0


class KeyWaits:
    """The waits of one thread for keys of ``store``, one after the other."""

    __slots__ = ("_connection", "store")

    def __init__(self, store: Any) -> None:
        self.store = store
        self._connection: Any = None

    @contextmanager
    def on(self, key: str, limit_s: float) -> Iterator[Callable[[float], bool]]:
        """Wait for a value of ``key``, at most ``limit_s``, while the block runs. The block gets a function that blocks
        for up to so many seconds, and returns whether the value has come."""
        if self._connection is None:
            self._connection = self.store.clone()
        came = threading.Event()
        work = (self._connection, key, limit_s, came)
        thread = threading.Thread(target=_wait, args=work, name="lakeckpt-store", daemon=True)
        thread.start()
        try:
            yield came.wait
        finally:
            if not came.is_set():
                with suppress(RuntimeError):  # the store is gone, and the thread ends by itself
                    if not self.store.check([key]):
                        self.store.set(key, "1")
            thread.join(_JOIN_S)
            if thread.is_alive():
                self._connection = None


def _wait(store: Any, key: str, limit_s: float, came: threading.Event) -> None:
    """Wait for a key, and set ``came``. If it does not come, the rank that waits finds out what is wrong."""
    with suppress(RuntimeError):
        store.wait([key], timedelta(seconds=limit_s))
        came.set()
