"""What comes next, and what after that?  Announces assignments to a source ahead of the loop, and takes them in order.

As many are announced as the source has room for, and one at least: where none is, none is left. A few more at a time
than are taken: so the first batch does not wait until a window's worth of them has been dealt, and the source soon
knows of windows well before they are needed. While a batch has to be waited for, there is time to announce more.

It starts no threads (the source does), and ends them: `close`, which letting go of it does, too.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lakeckpt.core.plan import Assignment
from lakeckpt.core.receipts import Receipt
from lakeckpt.data.source import BatchSource

__all__ = ["Ahead"]

_EACH_TIME = 4
_MOST = 4096
"""Assignments that are announced and not taken: about 4 MB. More of them cost more in garbage collection."""


class Ahead(Iterator[tuple[Receipt, Any]]):
    """Yields what the loop gets for each of ``assignments``. The source is its own, until another one is begun with it.

    It begins to read at once.
    """

    def __init__(self, source: BatchSource, assignments: Iterator[Assignment]) -> None:
        self._source, self._turn = source, source.begin_turn()
        self._assignments: Iterator[Assignment] | None = assignments
        self._announced: deque[Assignment] = deque()
        self._announce(_EACH_TIME)

    def __next__(self) -> tuple[Receipt, Any]:
        source, announced = self._source, self._announced
        self._announce(_EACH_TIME)
        if not announced:
            self.close()
            raise StopIteration
        while not source.is_ready and self._announce(1):
            pass
        return self._take(announced.popleft())

    def _take(self, assignment: Assignment) -> tuple[Receipt, Any]:
        """Return what this yields for ``assignment``; workers of a loader pack it."""
        return self._source.take(assignment)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, its threads have, and modules may have been emptied: nothing is left to do or use.
        if not is_finalizing() and hasattr(self, "_announced"):
            self.close()

    def close(self) -> None:
        """Forget what was announced and decoded; end the source's threads."""
        self._assignments = None
        self._announced.clear()
        self._source.end_turn(self._turn)

    def _announce(self, count: int) -> bool:
        """Announce up to ``count`` more; tell whether there may be still more to announce."""
        assignments, announced, source = self._assignments, self._announced, self._source
        if assignments is None or (announced and not source.has_room):
            return False
        for _ in range(count):
            if len(announced) >= _MOST:
                return False
            assignment = next(assignments, None)
            if assignment is None:
                self._assignments = None
                return False
            announced.append(assignment)
            if not source.announce(assignment):
                return False
        return True
