"""When does a pipeline's rank wait for its transfers?  torch's schedules do so in one function of their module.

It is replaced while a watched schedule steps, by one that tells the watch of the thread that calls it, and does the
same. Where torch has no such function (it is no part of its public surface), nobody can be told: `can_be_told`.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Tell", "can_be_told", "told_of_waits"]

Tell = Callable[[Callable[[], Any]], Any]
"""Called with the wait, which it has to call, and whose result it returns."""

_MODULE = "torch.distributed.pipelining.schedules"
_WAIT = "_wait_batch_p2p"


class _Listeners:
    """Who is told, by thread; the function of torch's that was replaced for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_thread: dict[int, Tell] = {}
        self._undo: Callable[[], None] | None = None

    def add(self, thread: int, tell: Tell) -> Tell | None:
        """``tell`` is told of the thread's waits. Returns who was until now."""
        with self._lock:
            if self._undo is None:
                self._undo = self._replace()
            before = self._by_thread.get(thread)
            self._by_thread[thread] = tell
            return before

    def remove(self, thread: int, before: Tell | None) -> None:
        """Who was told before is told again; with nobody left, torch's function is put back."""
        with self._lock:
            if before is not None:
                self._by_thread[thread] = before
                return
            del self._by_thread[thread]
            if not self._by_thread and self._undo is not None:
                self._undo()
                self._undo = None

    def _replace(self) -> Callable[[], None]:
        module = importlib.import_module(_MODULE)
        original = getattr(module, _WAIT)

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            tell = self._by_thread.get(threading.get_ident())
            if tell is None or not work:
                return original(work, *args, **kwargs)
            return tell(lambda: original(work, *args, **kwargs))

        def undo() -> None:
            if getattr(module, _WAIT) is wait:
                setattr(module, _WAIT, original)

        setattr(module, _WAIT, wait)
        return undo


_LISTENERS = _Listeners()


def can_be_told() -> bool:
    """Whether this torch waits for all transfers of its schedules in one function."""
    return callable(getattr(importlib.import_module(_MODULE), _WAIT, None))


@contextmanager
def told_of_waits(tell: Tell) -> Iterator[None]:
    """In the block, ``tell`` is called in the place of each wait of this thread for transfers of a pipeline."""
    thread = threading.get_ident()
    before = _LISTENERS.add(thread, tell)
    try:
        yield
    finally:
        _LISTENERS.remove(thread, before)
