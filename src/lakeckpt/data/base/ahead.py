"""This module reads micro-batches ahead of the loop that takes them, in their order.

`Ahead` tells a reader at the begin of each stretch which lanes it reads, and from where, so that the reader decodes the
windows of these lanes ahead. A micro-batch is dealt when it is taken, or when somebody asks if it is ready.

The reader, and the threads that it starts, are those of one iteration. `Ahead.close` ends them; the garbage collector
may call it in any thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.streams.mixture import MixedPlan
from lakeckpt.errors import LakeckptError

__all__ = ["Ahead", "Stretches"]

Stretches = Iterable[tuple[Plan | MixedPlan, int, int | None]]
"""(plan, first step, one past its last step or None) of all that is to come."""
Owns = Callable[[Plan | MixedPlan, int], bool]


_Dealt = tuple[Any, tuple[Plan | MixedPlan, list[tuple[int, int]]] | None]
"""An assignment; if it is the first of a stretch, also the plan, and (turn, lane) of all lanes that are read in it."""


class Ahead(Iterator[tuple[Receipt, Any]]):
    """Yields (receipt, what the loop gets) for each step of ``stretches`` that ``owns`` accepts, for ``rank``.

    ``source`` makes the items. It begins to read at once. Raises what reading raises; the next call tries again.
    """

    def __init__(
        self, source: Any, stretches: Stretches, rank: int, *, row_wise: bool = False, owns: Owns | None = None
    ) -> None:
        self._source = source
        self._reader: Any = None
        self._lanes, self._batch_rows = 0, 1
        self._rest: Iterator[_Dealt] = _dealt(stretches, rank, row_wise, owns)
        self._next: _Dealt | None = None
        self._opened: Any = None
        """The rows of `_next`; None: opening them failed, or there is none."""
        source.begin(self)
        self._deal()

    def __next__(self) -> tuple[Receipt, Any]:
        if not self._deal():
            self._end()
            raise StopIteration
        assert self._next is not None
        if self._opened is None:
            self._opened = self._open(self._next)
        receipt = self._next[0].receipt
        found = self._source.take(self._reader, self._opened, receipt)
        self._next, self._opened = None, None
        return receipt, found

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, its threads have, and modules may have been emptied: nothing is left to do or use.
        if not is_finalizing() and hasattr(self, "_opened"):
            self.close()

    @property
    def is_ready(self) -> bool:
        """True if the next batch would come without a wait."""
        self._deal()
        return self._opened is None or bool(self._opened.is_ready)

    @property
    def ready(self) -> int:
        """How many batches the rows make that are decoded and were not taken. Any thread may ask."""
        reader = self._reader
        return 0 if reader is None else int(reader.windows.rows_ready // self._batch_rows)

    def close(self) -> None:
        """Drop what was decoded, and end the threads."""
        self._rest, self._next, self._opened = iter(()), None, None
        if self._reader is not None:
            self._reader.clear()

    def _end(self) -> None:
        self.close()
        reader, self._reader = self._reader, None
        if reader is not None:
            self._source.end(reader, self._lanes)

    def _deal(self) -> bool:
        """Deal the next micro-batch, unless it is dealt, and open its rows; return whether there is one."""
        if self._next is None and (dealt := next(self._rest, None)) is not None:
            self._next = dealt
            with suppress(LakeckptError, OSError):  # raised when it is taken
                self._opened = self._open(dealt)
        return self._next is not None

    def _open(self, dealt: _Dealt) -> Any:
        assignment, begins = dealt
        if self._reader is None:
            self._reader, self._lanes = self._source.new_reader(assignment.lanes), assignment.lanes
        if begins is not None:
            self._batch_rows = begins[0].segment.batch_size
            self._source.follow(self._reader, *begins)
        opened = self._source.open(self._reader, assignment)
        if begins is not None:
            self._reader.windows.fill()  # after what is needed first
        return opened


def _dealt(stretches: Stretches, rank: int, row_wise: bool, owns: Owns | None) -> Iterator[_Dealt]:
    for plan, step, stop in stretches:
        each = plan.segment.num_lanes // plan.segment.world_size
        last = step + each if stop is None else min(stop, step + each)
        mine = [one for one in range(step, last) if owns is None or owns(plan, one)]
        numbers = [plan.micro_batch(one) + rank - plan.first for one in mine]
        begins = plan, [divmod(one, plan.segment.num_lanes) for one in numbers]
        is_first = True
        while mine and (stop is None or step < stop):
            if owns is None or owns(plan, step):
                yield plan.assignment(step, rank, row_wise=row_wise), begins if is_first else None
                is_first = False
            step += 1
