"""This module makes batches of assignments: it reads, converts and transforms rows, in any process alike.

A source is a pure function of assignments, with a cache of decoded windows: it holds no place in the data, so that any
worker can serve any assignment, in any order. It is picklable; what is decoded is not part of it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pyarrow as pa
import torch
from torch.utils.data import get_worker_info

from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.core.plan import Assignment, LayoutKey
from lakeckpt.core.receipts import Receipt
from lakeckpt.data.batch import Batch, jagged, texts
from lakeckpt.data.memory import limit_of
from lakeckpt.data.options import ReadOptions
from lakeckpt.data.place.selecting import Selecting
from lakeckpt.data.transform import TransformContext
from lakeckpt.errors import LakeckptError, NullValueError
from lakeckpt.lake.storage.deferring import Deferring
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.columns.convert import Nulls, convert
from lakeckpt.reading.columns.plain import PlainRows
from lakeckpt.reading.columns.ragged import Ragged
from lakeckpt.reading.filters.decoder import FilteredDecoder
from lakeckpt.reading.windows.decode import DEFAULT_AHEAD_BYTES, RowGroupDecoder
from lakeckpt.reading.windows.positions import Announced, NullFound, PositionReader
from lakeckpt.reading.windows.threads import usual_threads

__all__ = ["BatchSource", "Output", "gives", "row_of"]

Output = Literal["torch", "numpy", "arrow"]
_LAYOUTS_KEPT = 4


class BatchSource:
    """Reads the rows of assignments of one table. Not safe for use by several threads.

    Windows of assignments that were announced are decoded ahead, within the memory limit of ``options``.
    ``selecting``: where positions count the rows that a filter keeps.
    """

    def __init__(
        self,
        table: Table,
        *,
        columns: list[str] | None,
        spec: OrderSpec,
        output: Output,
        options: ReadOptions,
        transform: Callable[[Any, TransformContext], Any] | None,
        row_wise: bool,
        selecting: Selecting | None = None,
    ) -> None:
        self._table = table
        self._columns = columns
        self._spec = spec
        self._output = output
        self._nulls: Nulls = options.nulls
        self._jagged = options.jagged
        self._gives_texts = options.text == "str" and output != "arrow"
        self._texts: tuple[str, ...] = ()
        """The columns in which texts are made lists of str."""
        self._transform = transform
        self._row_wise = row_wise
        self._selecting = selecting
        self.memory_limit_bytes = options.memory_limit_bytes
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
        self._reader, self._layouts, self._recent = None, {}, (None, None)
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

    def end_turn(self, turn: int) -> None:
        """``clear``, unless another turn was begun since. Waits for nothing: the garbage collector may call it."""

        def end() -> None:
            if self._turn == turn:
                self._turn += 1
                self.clear()

        if self._process == os.getpid():
            self._turns.when_free(end)

    def clear(self) -> None:
        """Forget what was announced and decoded, and end threads."""
        self._announced.clear()
        if self._reader is not None:
            self._reader.clear()

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

    def take(self, assignment: Assignment) -> tuple[Receipt, Any]:
        """Return what the loop gets for ``assignment``: a batch, or the one row that it has.

        Assignments that were announced are best taken in that order; any other may be taken at any time, too.
        """
        announced = self._recall(assignment)
        receipt = assignment.receipt
        assert self._reader is not None
        try:
            rows = self._reader.take(announced)
        except NullFound as found:
            assert self._output != "arrow"
            raise _placed(found, receipt, index=self._table.index, nulls=self._nulls) from found.error
        if self._output == "arrow":
            return receipt, self._finished(rows, receipt)
        for name in self._texts:
            rows[name] = texts(rows[name])
        if self._jagged:
            rows = {name: jagged(column) for name, column in rows.items()}
        return receipt, self._finished(Batch(rows, receipt), receipt)

    def take_plain(self, assignment: Assignment) -> tuple[PlainRows, int, int] | None:
        """`take` for whoever copies the batch that ``assignment`` gives: where its rows lie. None where that cannot be
        told so: nothing was taken then, and the batch is to be taken."""
        if self._transform is not None or self._row_wise or self._output == "arrow":
            return None
        if self._reader is None or not self._announced or self._announced[0][0] is not assignment:
            return None
        found = self._reader.take_plain(self._announced[0][1])
        if found is not None:
            self._announced.popleft()
        return found

    @property
    def transform(self) -> Callable[..., Any] | None:
        """The transform that batches or rows go through; picklable where the user's function is."""
        return self._transform

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
        if self._row_wise:
            if not receipt.rows:
                return None
            batch = batch if isinstance(batch, pa.Table) else Batch(row_of(batch, 0), receipt)
        return batch if self._transform is None else self._transformed(self._transform, batch, receipt)

    def _transformed(self, transform: Callable[[Any, TransformContext], Any], batch: Any, receipt: Receipt) -> Any:
        try:
            result = transform(batch, TransformContext(seed=self._spec.seed, receipt=receipt))
        except Exception as error:
            where = (
                f"in the transform of micro-batch {receipt.micro_batch} (epoch {receipt.epoch}, step "
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
        window, ahead = self._spec.window, DEFAULT_AHEAD_BYTES
        limit = limit_of(self.memory_limit_bytes, self._table, self._columns, window=window, lanes=lanes)
        if isinstance(self._table.storage, LocalStorage):
            ahead = 0
        elif limit is not None:
            ahead = min(ahead, limit // 4)
            limit -= ahead
        if self._selecting is None:
            decoder = RowGroupDecoder(self._table, self._columns, ahead_bytes=ahead)
        else:
            decoder = FilteredDecoder(self._table, self._columns, self._selecting.kept, ahead_bytes=ahead)
        reader = PositionReader(
            decoder,
            self._spec,
            max_windows=lanes,
            nulls=None if self._output == "arrow" else self._nulls,
            make=torch.from_numpy if self._output == "torch" else None,
            memory_limit_bytes=limit,
            threads=_threads(),
        )
        if self._gives_texts:
            self._texts = tuple(field.name for field in reader.schema if _holds_text(field.type))
        return reader

    def _layout(self, key: LayoutKey) -> EpochLayout:
        layout = self._layouts.get(key)
        if layout is None:
            rows = (self._table.index if self._selecting is None else self._selecting.get()).group_rows
            layout = EpochLayout.build(rows, self._spec, key.epoch, key.num_lanes, key.rotation)
            while len(self._layouts) >= _LAYOUTS_KEPT:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[key] = layout
        return layout


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_text(kind.field(number).type) for number in range(kind.num_fields))
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _placed(found: NullFound, receipt: Receipt, *, index: TableIndex, nulls: Nulls) -> NullValueError:
    """Return the error of ``found`` with the file and the row group of the first null; its rows are at hand."""
    low, high = 0, found.table.num_rows  # the first ``low`` rows have no null, the first ``high`` have
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(found.table.slice(low, middle - low), nulls=nulls)
            low = middle
        except NullValueError:
            high = middle
    groups, _ = found.layout.locate(found.positions[low : low + 1])
    file, row_group = index.group(int(groups[0]))
    path = index.paths[file]
    return NullValueError(
        f"{found.error} (the first one of micro-batch {receipt.micro_batch}, epoch {receipt.epoch}: row group "
        f"{row_group} of the data file {path!r})",
        file=path,
        row_group=row_group,
        column=found.error.column,
    )


def _threads() -> int:
    """What this process may have decoding: were each of the loader's to take all processors, the first would wait."""
    info = get_worker_info()
    return usual_threads(1 if info is None else info.num_workers)


def gives(receipt: Receipt, row_wise: bool) -> bool:
    """Whether the loop gets something for ``receipt``: not for a row that another rank got at the end of an epoch."""
    return not row_wise or receipt.rows > 0


def row_of(columns: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return one row of ``columns``. Masks of a list's elements stand beside it, as ``<name>.values.is_null``.

    Fixed-width columns give one element each (torch: a tensor without the first dimension), others what
    `lakeckpt.Ragged` gives for a row.
    """
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
