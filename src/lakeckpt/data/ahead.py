"""This module reads assignments ahead of the loop that takes them, in their order.

`Ahead` announces assignments to a reader: as many as the reader has room for, and one at least. It announces a few more
at a time than are taken. So the first batch does not wait until a window's worth of them has been dealt, and the reader
soon knows of windows well before they are needed. While a batch has to be waited for, there is time to announce more.

The reader, and the threads that it starts, are those of one iteration. `Ahead.close` ends them; the garbage collector
may call it in any thread.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lakeckpt.core.plan import Assignment
from lakeckpt.core.receipts import Receipt
from lakeckpt.data.source import BatchSource
from lakeckpt.errors import LakeckptError
from lakeckpt.reading.windows.positions import Announced, PositionReader

__all__ = ["Ahead"]

_EACH_TIME = 4
_MOST = 4096
"""Parts of assignments that are announced and not taken: about 4 MB. More of them cost more in garbage collection."""


class Ahead(Iterator[tuple[Receipt, Any]]):
    """Yields (receipt, what the loop gets) for each of ``assignments``, which are of one plan. It begins to read at
    once. Raises what reading raises."""

    def __init__(self, source: BatchSource, assignments: Iterator[Assignment]) -> None:
        self._source = source
        self._reader: PositionReader | None = None
        self._lanes = 0
        self._assignments: Iterator[Assignment] | None = assignments
        self._announced: deque[tuple[Assignment, Announced | None]] = deque()
        """Assignments, with their rows; None: announcing them failed, and they are announced again when taken."""
        source.begin(self)
        self._announce(_EACH_TIME)

    def __next__(self) -> tuple[Receipt, Any]:
        self._announce(_EACH_TIME)
        if not self._announced:
            self._end()
            raise StopIteration
        while not self.is_ready and self._announce(1):
            pass
        assignment, rows = self._announced.popleft()
        reader = self._reader_of(assignment)
        if rows is None:
            rows = self._source.announce(reader, assignment)
        return assignment.receipt, self._source.take(reader, rows, assignment.receipt)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, its threads have, and modules may have been emptied: nothing is left to do or use.
        if not is_finalizing() and hasattr(self, "_announced"):
            self.close()

    @property
    def is_ready(self) -> bool:
        """True where the next batch would come without a wait."""
        rows = self._announced[0][1] if self._announced else None
        return rows is None or self._source.is_ready(rows)

    @property
    def ready(self) -> int:
        """How many of the next batches would come without a wait. Any thread may ask."""
        ready = 0
        for _, rows in list(self._announced):
            if rows is None or not self._source.is_ready(rows):
                break
            ready += 1
        return ready

    def close(self) -> None:
        """Drop what was announced and decoded, and end the threads."""
        self._assignments = None
        self._announced.clear()
        if self._reader is not None:
            self._reader.clear()

    def _end(self) -> None:
        self.close()
        reader, self._reader = self._reader, None
        if reader is not None:
            self._source.end(reader, self._lanes)

    def _reader_of(self, assignment: Assignment) -> PositionReader:
        if self._reader is None:
            self._reader, self._lanes = self._source.new_reader(assignment.lanes), assignment.lanes
        return self._reader

    def _announce(self, count: int) -> bool:
        """Announce up to ``count`` more; return whether more may be announced now."""
        assignments, announced = self._assignments, self._announced
        if assignments is None or (announced and not self._has_room):
            return False
        for _ in range(count):
            if len(announced) * self._source.width >= _MOST:
                return False
            assignment = next(assignments, None)
            if assignment is None:
                self._assignments = None
                return False
            try:
                rows = self._source.announce(self._reader_of(assignment), assignment)
            except (LakeckptError, OSError):  # raised when the assignment is taken
                announced.append((assignment, None))
                return False
            announced.append((assignment, rows))
            if not self._has_room:
                return False
        return True

    @property
    def _has_room(self) -> bool:
        return self._reader is None or self._reader.has_room
