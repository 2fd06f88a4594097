"""This module gives the training loop of one rank its micro-batches of a flow, one for each step, up to the end.

A rank takes turns among its lanes that have rows. Its rows are over when those of all its lanes are, which is known
when the last of them is read. If there are several ranks, it goes on with batches without rows until no rank has any
left (`lakeckpt.data.flows.ends`): for that, a few micro-batches are read ahead and held back.

`Feed` counts nothing: a batch is consumed when the loop gets it. Workers read their lanes in turn, too, and may be a
micro-batch of a lane ahead of the turns of the rank; such a micro-batch waits here. The module starts no threads.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from lakeckpt.core.plan import Assignment, Plan
from lakeckpt.core.receipts import LaneMove, LaneRead, Receipt
from lakeckpt.core.state import State
from lakeckpt.data.base.batch import Batch
from lakeckpt.data.flows.calls import empty_of
from lakeckpt.data.flows.ends import Ends
from lakeckpt.data.flows.reading import FlowReading, Found
from lakeckpt.data.flows.source import FlowSource
from lakeckpt.errors import StateUnavailable

__all__ = ["Feed"]


_Read = Callable[[Iterator[Assignment], Any], Iterator[tuple[Receipt, Found]]]


class Feed(Iterator[tuple[Receipt, Any]]):
    """Yields (receipt, batch) for each step of ``rank`` from ``state`` on; ``over`` is called with the number of steps
    of the epoch when it ends.

    Call `in_process` or `of_workers` first: they say where micro-batches come from. Raises what reading raises.
    """

    def __init__(self, source: FlowSource, state: State, rank: int, *, ends: Ends, over: Callable[[int], None]) -> None:
        self._source, self._state, self._rank, self._ends, self._over = source, state, rank, ends, over
        self._plan = Plan(state)
        self._open = set(self._plan.open_lanes(rank))
        """The lanes that may have more rows."""
        self._take: Callable[[int], Found]
        self._held: deque[tuple[Receipt, Batch]] = deque()
        self._next = self._pulled = state.step
        """The next step of the loop, and the next to be read."""
        self._moves: tuple[LaneMove, ...] = ()
        """How lanes moved that had nothing more to yield, and that no receipt says yet."""
        self._columns: dict[str, Any] | None = None
        """The columns of a batch without rows."""

    def in_process(self) -> Feed:
        """Read in this process."""
        self._take = FlowReading(self._source, self._state, self._rank).take
        return self

    def of_workers(self, workers: int, read: _Read, beginning: Any) -> Feed:
        """Take what ``workers`` workers read from ``beginning`` on: ``read`` gives, for each assignment, what its
        worker reads next."""
        self._take = _OfWorkers(_Due(self._plan, self._rank, workers), read, beginning).take
        return self

    def __next__(self) -> tuple[Receipt, Any]:
        if self._next == self._state.step or not self._ends.asks:
            self._know(self._next)
        if not self._held and self._is_over():
            self._over(self._next)
            raise StopIteration
        if self._ends.asks:
            self._know(self._next + 1)
        found = self._held.popleft() if self._held else self._without_rows()
        self._next += 1
        return found

    def _is_over(self) -> bool:
        return not self._open and self._ends.is_over(self._next)

    def _know(self, border: int) -> None:
        """Read until it is known whether there are rows behind ``border``, and state that."""
        ahead = self._ends.lookahead(border)
        while self._open and self._pulled <= ahead:
            self._pull()
        self._ends.state(border, None if self._pulled > ahead else self._pulled)

    def _pull(self) -> None:
        """Read the next step, or learn that a lane has nothing more."""
        lane = self._plan.lane(self._pulled, self._rank, self._open)
        read, columns = self._take(lane)
        if read.is_last:
            self._open.discard(lane)
        if columns is None:
            self._moves += (read.move,)
            return
        self._held.append(self._batch(read, columns))
        self._pulled += 1

    def _batch(self, read: LaneRead, columns: dict[str, Any]) -> tuple[Receipt, Batch]:
        receipt = self._plan.receipt(self._pulled, self._rank, read, self._moves)
        self._moves = ()
        if self._columns is None:
            self._columns = empty_of(columns)
        return receipt, Batch(columns, receipt)

    def _without_rows(self) -> tuple[Receipt, Batch]:
        if self._columns is None:
            self._columns = self._source.empty(self._state)
        receipt = self._plan.receipt(self._next, self._rank, None, self._moves)
        self._moves = ()
        return receipt, Batch(empty_of(self._columns), receipt)


class _OfWorkers:
    """Takes micro-batches of lanes from workers, each of which reads its own lanes in turn."""

    def __init__(self, due: _Due, read: _Read, beginning: Any) -> None:
        self._due, self._found = due, read(due, beginning)
        self._waiting: dict[int, deque[Found]] = defaultdict(deque)

    def take(self, lane: int) -> Found:
        """Return the next micro-batch of ``lane``."""
        while not self._waiting[lane]:
            self._due.lane = lane
            pulled = next(self._found, None)
            if pulled is None:
                raise StateUnavailable("the workers of this iterator were closed: go on with a new one, iter(loader)")
            self._waiting[pulled[1][0].move.lane].append(pulled[1])
        return self._waiting[lane].popleft()


class _Due(Iterator[Assignment]):
    """Asks the worker of ``lane`` for what it reads next. The receipt's ``step`` counts the answers of the worker."""

    def __init__(self, plan: Plan, rank: int, workers: int) -> None:
        self._plan, self._rank, self._workers = plan, rank, workers
        self._asked = [0] * workers
        self.lane = 0

    def __next__(self) -> Assignment:
        segment = self._plan.state.segment
        owner = self.lane // segment.world_size
        count = self._asked[owner % self._workers]
        self._asked[owner % self._workers] += 1
        receipt = self._plan.receipt(count, self._rank, None)
        return Assignment(receipt=receipt, layouts=(), owner=owner, lanes=segment.num_lanes // segment.world_size)
