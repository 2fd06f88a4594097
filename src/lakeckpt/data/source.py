"""How does an assignment become a batch?  Read, convert, transform: the same in the main process and in workers.

A source is a pure function of assignments, with a cache of decoded windows: it holds no place in the data, so that any
worker can serve any assignment, in any order. It is picklable; what is decoded is not part of it. What it cannot read
and may skip is told by the receipts that it returns, and remembered until the process or the epoch ends.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import torch
from torch.utils.data import get_worker_info

from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.core.plan import Assignment, LayoutKey
from lakeckpt.core.receipts import Receipt
from lakeckpt.data.batch import Batch
from lakeckpt.data.nulls import placed
from lakeckpt.data.selecting import Selecting
from lakeckpt.data.tensors import jagged
from lakeckpt.data.transform import TransformContext
from lakeckpt.errors import LakeckptError
from lakeckpt.lake.deferring import Deferring
from lakeckpt.lake.local import LocalStorage
from lakeckpt.lake.table import Table
from lakeckpt.reading.decode import DEFAULT_AHEAD_BYTES, RowGroupDecoder
from lakeckpt.reading.filtered import FilteredDecoder
from lakeckpt.reading.plain import PlainRows
from lakeckpt.reading.positions import Announced, NullFound, PositionReader
from lakeckpt.reading.ragged import Ragged
from lakeckpt.reading.skipping import Skipper
from lakeckpt.reading.threads import usual_threads

__all__ = ["BatchSource", "Output", "items_of", "row_of", "split_rows"]

Output = Literal["torch", "numpy", "arrow"]
_LAYOUTS_KEPT = 4


class BatchSource:
    """Reads the rows of assignments of one table. Not safe for use by several threads.

    Windows of assignments that were announced are decoded ahead, within ``memory_limit_bytes``.
    ``selecting``: where positions count the rows that a filter keeps.
    """

    def __init__(
        self,
        table: Table,
        *,
        columns: list[str] | None,
        spec: OrderSpec,
        output: Output,
        nulls: Literal["error", "mask"],
        jagged: bool,
        transform: Callable[[Any, TransformContext], Any] | None,
        row_wise: bool,
        selecting: Selecting | None = None,
        skips_bad: bool = False,
        memory_limit_bytes: int | None = None,
    ) -> None:
        self._table = table
        self._columns = columns
        self._spec = spec
        self._output = output
        self._nulls: Literal["error", "mask"] = nulls
        self._jagged = jagged
        self._transform = transform
        self._row_wise = row_wise
        self._selecting = selecting
        self._skips_bad = skips_bad
        self.memory_limit_bytes = memory_limit_bytes
        self._skipper: Skipper | None = None
        self._reader: PositionReader | None = None
        self._lanes = 0
        self._layouts: dict[LayoutKey, EpochLayout] = {}
        self._recent: Any = None, None
        """The keys of the last assignment that had one layout, and that layout."""
        self._announced: deque[tuple[Assignment, Announced]] = deque()
        self._process = os.getpid()
        self._turn = 0
        self._turns = Deferring()
        self.generation = 0
        """How often another version was gone to: copies in other processes are out of date then."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_reader": None,
            "_skipper": None,
            "_layouts": {},
            "_recent": (None, None),
            "_announced": deque(),
            "_process": None,
            "_turns": None,
        }

    def repin(self, table: Table, columns: list[str] | None, selecting: Selecting | None) -> None:
        """Read another version of the table from now on."""
        self.clear()
        self._table, self._columns, self._selecting = table, columns, selecting
        self._reader, self._skipper, self._layouts, self._recent = None, None, {}, (None, None)
        self.generation += 1

    def begin_turn(self) -> int:
        """Say that somebody else announces and takes from now on; returns the number of his turn, to end it with."""
        if self._process != os.getpid():  # a copy, or a fork, in which a thread that is not here may hold the lock
            self._process, self._turns = os.getpid(), Deferring()
        with self._turns.lock:
            self._turns.catch_up()
            self.clear()
            self._turn += 1
            return self._turn

    def end_turn(self, turn: int, *, again: bool) -> None:
        """``clear``, unless another turn was begun since. Waits for nothing: the garbage collector may call it."""

        def end() -> None:
            if self._turn == turn:
                self._turn += 1
                self.clear(again=again)

        if self._process == os.getpid():
            self._turns.when_free(end)

    def clear(self, *, again: bool = False) -> None:
        """Forget what was announced and decoded, and end threads. ``again``: as much will be read, as of an epoch."""
        self._announced.clear()
        if self._reader is not None:
            self._reader.clear(again=again)

    def announce(self, assignment: Assignment) -> bool:
        """Say that ``assignment`` will be taken, after those that were announced before it; tells whether more may be.

        Its windows are decoded in threads as soon as there is room. It never waits and never raises: what goes wrong
        is raised by `take`. Whoever is told that no more may be announced still may, to no use yet. What was announced
        and is not wanted any more goes with `clear`.
        """
        try:
            self._announced.append((assignment, self._announce(assignment)))
        except (LakeckptError, OSError):
            return False
        return self.has_room

    @property
    def has_room(self) -> bool:
        """Whether it is of use to announce more now."""
        return self._reader is None or self._reader.has_room

    @property
    def is_ready(self) -> bool:
        """Whether `take` of what was announced first would not wait."""
        return not self._announced or PositionReader.is_ready(self._announced[0][1])

    def waits(self, when_over: Callable[[], None]) -> bool:
        """Whether windows of what was announced first are being decoded; ``when_over`` is called, in any thread, when
        one is. Nothing is promised of what there was no room to begin with."""
        return bool(self._announced) and PositionReader.waits(self._announced[0][1], when_over)

    def take(self, assignment: Assignment) -> tuple[Receipt, Any]:
        """Return what the loop gets for ``assignment``: a batch; in row-wise use with a transform, a list of rows.

        Assignments that were announced are best taken in that order; any other may be taken at any time, too.
        The receipt is the assignment's, and says what was skipped.
        """
        announced = self._recall(assignment)
        receipt = assignment.receipt
        assert self._reader is not None
        try:
            rows, skips = self._reader.take(announced)
        except NullFound as found:
            assert self._output != "arrow"
            raise placed(found, receipt, index=self._table.index, nulls=self._nulls) from found.error
        if skips:
            receipt = replace(receipt, skips=skips)
        if self._output == "arrow":
            return receipt, self._finished(rows, receipt)
        if self._jagged:
            rows = {name: jagged(column) for name, column in rows.items()}
        return receipt, self._finished(Batch(rows, receipt), receipt)

    def take_plain(self, assignment: Assignment) -> tuple[PlainRows, int, int] | None:
        """`take` for whoever copies the batch that ``assignment`` gives: where its rows lie. None where that cannot be
        told so: nothing was taken then, and the batch is to be taken."""
        if self._transform is not None or self._output == "arrow":
            return None
        if self._reader is None or not self._announced or self._announced[0][0] is not assignment:
            return None
        found = self._reader.take_plain(self._announced[0][1])
        if found is not None:
            self._announced.popleft()
        return found

    @property
    def gives_arrays(self) -> bool:
        """Whether batches are of numpy's arrays."""
        return self._output == "numpy"

    def _recall(self, assignment: Assignment) -> Announced:
        """What is known of ``assignment`` since it was announced; else it is announced now."""
        announced = self._announced
        if announced and announced[0][0] is assignment:
            return announced.popleft()[1]
        for place, (one, parts) in enumerate(announced):
            if one is assignment:
                del announced[place]
                return parts
        return self._announce(assignment)

    def _finished(self, batch: Any, receipt: Receipt) -> Any:
        if self._transform is None:
            return batch
        if self._row_wise:
            return [self._transformed(row, receipt, index) for index, row in enumerate(split_rows(batch))]
        return self._transformed(batch, receipt)

    def _transformed(self, batch: Any, receipt: Receipt, row: int | None = None) -> Any:
        assert self._transform is not None
        try:
            result = self._transform(batch, TransformContext(seed=self._spec.seed, receipt=receipt, row=row))
        except Exception as error:
            which = f"row {row} of " if row is not None else ""
            where = (
                f"in the transform of {which}micro-batch {receipt.micro_batch} (epoch {receipt.epoch}, step "
                f"{receipt.step} of rank {receipt.rank})"
            )
            if isinstance(error, StopIteration):  # it would end the loop as the end of the rows does
                raise RuntimeError(
                    f"StopIteration was raised {where}: an iterator there has no more to give"
                ) from error
            error.add_note(where)
            raise
        if type(result) is dict or (type(result) is Batch and not hasattr(result, "receipt")):
            return Batch(result, receipt)
        return result

    def _announce(self, assignment: Assignment) -> Announced:
        if self._reader is None or assignment.lanes != self._lanes:
            self._reader = self._new_reader(assignment.lanes)
            self._lanes = assignment.lanes
        assert self._skipper is not None
        if assignment.skips and self._skipper.learn(assignment.skips):
            self._reader.clear()  # what is held may be of row groups that are skipped from now on
        spans = assignment.receipt.spans
        known, layout = self._recent
        if assignment.layouts is known and len(spans) == 1:  # nearly all are
            return self._reader.announce(((layout, spans[0].start, spans[0].stop),))
        layouts = {key.epoch: self._layout(key) for key in assignment.layouts}
        if len(layouts) == 1:
            self._recent = assignment.layouts, next(iter(layouts.values()))
        return self._reader.announce([(layouts[s.epoch], s.start, s.stop) for s in spans])

    def _new_reader(self, lanes: int) -> PositionReader:
        """A reader of windows of which one is open for each of ``lanes``."""
        if self._skipper is None:
            selection = "" if self._selecting is None else self._selecting.get().digest
            self._skipper = Skipper(self._table.index, selection=selection, finds_more=self._skips_bad)
        limit, ahead = self.memory_limit_bytes, DEFAULT_AHEAD_BYTES
        if isinstance(self._table.storage, LocalStorage):
            ahead = 0
        elif limit is not None:
            ahead = min(ahead, limit // 4)
            limit -= ahead
        new_decoder: Callable[[], RowGroupDecoder]
        if self._selecting is None:
            new_decoder = partial(RowGroupDecoder, self._table, self._columns, ahead_bytes=ahead)
        else:
            kept = self._selecting.kept
            new_decoder = partial(FilteredDecoder, self._table, self._columns, kept, ahead_bytes=ahead)
        return PositionReader(
            self._table,
            self._columns,
            self._spec,
            max_windows=lanes,
            nulls=None if self._output == "arrow" else self._nulls,
            make=torch.from_numpy if self._output == "torch" else None,
            memory_limit_bytes=limit,
            threads=_threads(),
            new_decoder=new_decoder,
            skipper=self._skipper,
        )

    def _layout(self, key: LayoutKey) -> EpochLayout:
        layout = self._layouts.get(key)
        if layout is None:
            rows = (self._table.index if self._selecting is None else self._selecting.get()).group_rows
            layout = EpochLayout.build(rows, self._spec, key.epoch, key.num_lanes, key.rotation)
            while len(self._layouts) >= _LAYOUTS_KEPT:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[key] = layout
        return layout


def _threads() -> int:
    """What this process may have decoding: were each of the loader's to take all processors, the first would wait."""
    info = get_worker_info()
    return usual_threads(1 if info is None else info.num_workers)


def items_of(found: Any, receipt: Receipt, row_wise: bool, skip: int) -> Iterable[tuple[Any, Receipt]]:
    """What the loop gets of one micro-batch, with receipts; of rows, all but the first ``skip``."""
    return _rows_of(found, receipt, skip) if row_wise else ((found, receipt),)


def _rows_of(found: Any, receipt: Receipt, skip: int) -> Iterator[tuple[Any, Receipt]]:
    rows = found if isinstance(found, list) else split_rows(found)
    for number in range(skip, receipt.rows):
        mine = replace(receipt, row=number)
        row = rows[number]
        if hasattr(row, "receipt"):
            row.receipt = mine
        yield row, mine


def split_rows(batch: Any) -> list[Any]:
    """Return the rows of a micro-batch: of a `Batch` one `Batch` a row, of an Arrow table one table a row.

    Fixed-width columns give one element each (torch: a tensor without the first dimension), others what
    `lakeckpt.Ragged` gives for a row.
    """
    if isinstance(batch, pa.Table):
        return [batch.slice(row, 1) for row in range(batch.num_rows)]
    return [Batch(row_of(batch, row), batch.receipt) for row in range(batch.receipt.rows)]


def row_of(columns: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return one row of ``columns``. Masks of a list's elements stand beside it, as ``<name>.values.is_null``."""
    found: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, dict):
            found[name] = row_of(column, row)
            continue
        found[name] = column[row]
        if isinstance(column, Ragged):
            masks = column[row : row + 1].masks
            found.update({f"{name}.{mask}": elements for mask, elements in masks.items()})
    return found
