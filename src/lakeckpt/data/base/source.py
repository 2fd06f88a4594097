"""This module makes readers and batches for assignments: it reads, converts and transforms rows, in any process alike.

A source says how the rows of one table are read. It holds no place in the data and no rows, and it is picklable, so any
worker can serve any assignment. `lakeckpt.data.base.ahead.Ahead` reads with it. The source starts no threads itself;
the readers that it makes do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.data import get_worker_info

from lakeckpt.core.identity import Identity, Maker
from lakeckpt.core.order import EpochLayout
from lakeckpt.core.plan import Assignment, LayoutKey, Plan
from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.data.base.batch import Batch, texts
from lakeckpt.data.base.identity import Pinned
from lakeckpt.data.base.memory import Budget, Reads, budget_of
from lakeckpt.data.base.options import ReadOptions
from lakeckpt.data.base.transform import TransformContext
from lakeckpt.errors import StateMismatch
from lakeckpt.reading.columns.convert import Nulls
from lakeckpt.reading.columns.ragged import Ragged
from lakeckpt.reading.filters.decoder import FilteredDecoder
from lakeckpt.reading.packed.packing import Packing
from lakeckpt.reading.packed.sequences import with_ends
from lakeckpt.reading.packed.whole import WholeDecoder
from lakeckpt.reading.packed.window import SequenceDecoder
from lakeckpt.reading.windows.cache import Decoding, window_parts, windows_held_of
from lakeckpt.reading.windows.decode import RowGroupDecoder, select_columns
from lakeckpt.reading.windows.lanes import windows_of
from lakeckpt.reading.windows.positions import Opened, PositionReader
from lakeckpt.reading.windows.threads import Threads, usual_threads

__all__ = ["BatchSource", "Items", "Iterations", "Output", "delivered", "gives", "row_of"]

Int64Array = npt.NDArray[np.int64]
Output = Literal["torch", "numpy", "arrow"]
_LAYOUTS_KEPT = 4


class Iterations:
    """Closes each iteration when the next one begins."""

    def __init__(self) -> None:
        self._iteration: weakref.ref[Any] | None = None

    def begin(self, iteration: Any) -> None:
        """Close the iteration that read before ``iteration``, if somebody still holds it: its windows take memory."""
        before = None if self._iteration is None else self._iteration()
        if before is not None:
            before.close()
        self._iteration = weakref.ref(iteration)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iteration": None}


class Items(Iterator[Any]):
    """Iterates what a generator yields to the loop. After an error, each later call raises the same error again: a
    generator that has raised would say that there is no more, as at the end of an epoch."""

    def __init__(self, found: Generator[Any]) -> None:
        self._found = found
        self._error: Exception | None = None

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        try:
            return next(self._found)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            del self  # the error refers to this frame
            raise

    def close(self) -> None:
        """Close the generator."""
        self._found.close()


class BatchSource(Iterations):
    """Makes what the loop gets of the rows of assignments of one table. Not safe for use by several threads."""

    describe: Callable[[Identity], Maker] | None = None
    """Says what makes any number of items of each row, and reads a few rows for it; None: each row is one."""

    def __init__(
        self,
        pinned: Pinned,
        *,
        output: Output,
        options: ReadOptions,
        transform: Callable[[Any, TransformContext], Any] | None,
        row_wise: bool,
    ) -> None:
        super().__init__()
        self._spec, self._endless = pinned.spec, pinned.endless
        self.output: Output = output
        """The kind of a batch's columns: tensors, arrays, or an Arrow table."""
        self._nulls: Nulls = options.nulls
        self._gives_texts = options.text == "str" and output != "arrow"
        self._transform = transform
        self._row_wise = row_wise
        self.memory_limit_bytes = options.memory_limit_bytes
        self._earlier: dict[str, tuple[Int64Array, int]] = {}
        """Digest of a table's index → the positions that it counts, as `know` was given them."""
        self.pin(pinned)

    def __getstate__(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"_layouts": {}, "_recent": (None, None), "_budgets": {}, "_idle": None}
        return {**super().__getstate__(), **empty}

    def pin(self, pinned: Pinned) -> None:
        """Read this version of the table from now on."""
        self._table, self._columns, self._selecting = pinned.table, pinned.columns, pinned.selecting
        schema = select_columns(self._table.schema, self._columns) if self._gives_texts else ()
        self._texts = [field.name for field in schema if _holds_text(field.type)]
        self._layouts: dict[LayoutKey, EpochLayout] = {}
        self._recent: Any = None, None
        """The keys of the last assignment that had one layout, and that layout."""
        self._budgets: dict[int, Budget] = {}
        """The memory of readers, by their lanes."""
        self._idle: tuple[int, PositionReader] | None = None
        """The lanes and the reader of an iteration that is over: its memory serves the next one."""

    def know(self, table: str, counted: tuple[Int64Array, int]) -> None:
        """Lay out the epochs that began with the index ``table`` by what it ``counted`` (`Pinned.counted`)."""
        self._earlier[table] = counted

    @property
    def earlier(self) -> tuple[str, ...]:
        """The indexes that were made known."""
        return tuple(sorted(self._earlier))

    @property
    def transform(self) -> Callable[..., Any] | None:
        """The transform that batches or rows go through; picklable if the user's function is."""
        return self._transform

    def follow(self, reader: PositionReader, plan: Plan, turns: Iterable[tuple[int, int]], share: float = 1.0) -> None:
        """Have ``reader``, one of `new_reader`, read ahead lanes of ``plan``, given as (turn, lane). ``share``: see
        `lakeckpt.reading.windows.cache.WindowCache.follow`."""
        rests, parts = [plan.lane_rest(lane, turn) for turn, lane in turns], window_parts(share)
        found = (windows_of(one, lambda epoch: self._layout(plan.layout(epoch)), parts) for one in rests)
        reader.windows.follow(found, share)

    def open(self, reader: PositionReader, assignment: Assignment) -> Opened:
        """Begin to decode the rows of ``assignment`` by ``reader``, which is one of `new_reader`. Raises
        `LakeckptError`."""
        return self.open_spans(reader, assignment.receipt.spans, assignment.layouts)

    def open_spans(self, reader: PositionReader, spans: tuple[Span, ...], keys: tuple[LayoutKey, ...]) -> Opened:
        """Begin to decode ``spans``, in the layouts that ``keys`` name, as `open`."""
        known, layout = self._recent
        if keys is known and len(spans) == 1:  # nearly all are
            return reader.open(((layout, spans[0].start, spans[0].stop),))
        layouts = {key.epoch: self._layout(key) for key in keys}
        if len(layouts) == 1:
            self._recent = keys, next(iter(layouts.values()))
        return reader.open([(layouts[s.epoch], s.start, s.stop) for s in spans])

    def take(self, reader: PositionReader, opened: Opened, receipt: Receipt) -> Any:
        """Return what the loop gets for the rows that ``reader`` has opened: a batch, or a row."""
        rows = self.columns(reader, opened)
        if self.output != "arrow":
            rows = delivered(rows)
        return self._finished(rows if self.output == "arrow" else Batch(rows, receipt), receipt)

    def columns(self, reader: PositionReader, opened: Opened, *, raw: bool = False) -> Any:
        """Return the columns of the rows that ``reader`` has opened, or an Arrow table, without a transform. ``raw``:
        they hold arrays in any case."""
        rows = reader.take(opened, raw=raw)
        for name in () if self.output == "arrow" else self._texts:
            rows[name] = texts(rows[name])
        return rows

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

    @property
    def reads(self) -> Reads:
        """The table, columns and window size that windows are read of."""
        return Reads(self._table, self._columns, self._spec.window)

    def new_reader(self, lanes: int, budget: Budget | None = None) -> PositionReader:
        """Return a reader of windows, of which one is open for each of ``lanes``: an idle one, if there is one.

        ``budget`` is the memory that the reader shares with others; None: it has its own.
        """
        idle, self._idle = self._idle, None
        if idle is not None and idle[0] == lanes:
            return idle[1]
        if budget is None:
            if lanes not in self._budgets:
                self._budgets[lanes] = budget_of(self.memory_limit_bytes, [self.reads], lanes=lanes)
            budget = self._budgets[lanes]
        return self._made_reader(lanes, budget)

    def end(self, reader: PositionReader, lanes: int) -> None:
        """Keep the reader of an iteration that is over; nobody else may use it any more."""
        self._idle = lanes, reader

    def _made_reader(self, lanes: int, budget: Budget) -> PositionReader:
        kept = None if self._selecting is None else self._selecting.kept
        if kept is None:
            decoder = RowGroupDecoder(self._table, self._columns, ahead_bytes=budget.ahead)
        else:
            decoder = FilteredDecoder(self._table, self._columns, *kept, ahead_bytes=budget.ahead)
        packing = None if self._selecting is None else self._selecting.packing
        gives_tensors = self.output == "torch" and not (packing is not None and packing.whole)
        return PositionReader(
            decoder,
            self._spec,
            max_windows=lanes,
            nulls=None if self.output == "arrow" else self._nulls,
            make=torch.from_numpy if gives_tensors else None,
            room=budget.room,
            threads=_threads(),
            decoder_of=None if packing is None else self._decoding(decoder, packing, lanes),
        )

    def _decoding(self, decoder: RowGroupDecoder, packing: Packing, lanes: int) -> Callable[[Threads], Decoding]:
        """Return what makes the decoder of windows of packed sequences."""
        assert self._selecting is not None
        kept = self._selecting.kept
        rows_of = (self._table.index if kept is None else kept[1]).group_rows
        if packing.whole:
            return partial(WholeDecoder, decoder, packing, rows_of)
        return partial(SequenceDecoder, decoder, packing, self._selecting.get(), rows_of, windows_held_of(lanes))

    def _layout(self, key: LayoutKey) -> EpochLayout:
        layout = self._layouts.get(key)
        if layout is None:
            layout = key.layout(self._spec, *self._counted(key), endless=self._endless)
            while len(self._layouts) >= _LAYOUTS_KEPT:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[key] = layout
        return layout

    def _counted(self, key: LayoutKey) -> tuple[Int64Array, int]:
        """Return the positions of each row group that the layout ``key`` counts, and how many make a position."""
        if key.table:
            if key.table not in self._earlier:
                raise StateMismatch(
                    f"epoch {key.epoch} began with other excluded row groups (exclude=), and only the run knows which: "
                    "restore it by CheckpointManager.restore(), or lakeckpt.load"
                )
            return self._earlier[key.table]
        found = None if self._selecting is None else self._selecting.get()
        return (self._table.index.group_rows, 1) if found is None else (found.group_rows, found.unit)


def delivered(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a batch as they are delivered: ``cu_seqlens`` of packed sequences is of the whole batch."""
    if not isinstance(columns.get("cu_seqlens"), Ragged):
        return dict(columns)
    found = with_ends(columns)
    if isinstance(columns["tokens"], torch.Tensor):
        found["cu_seqlens"] = torch.from_numpy(found["cu_seqlens"])
    return found


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_text(kind.field(number).type) for number in range(kind.num_fields))
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _threads() -> int:
    """Return how many threads may decode in this process: loader workers share the processors."""
    info = get_worker_info()
    return usual_threads(1 if info is None else info.num_workers)


def gives(receipt: Receipt, row_wise: bool) -> bool:
    """Return whether the loop gets an item for ``receipt``. Row-wise, the last step may have none for this rank."""
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
