"""This module reads the micro-batches of a mixture: the parts that its sources give, row by row in their order.

`lakeckpt.data.base.ahead` reads by a `MixedSource` as by a `lakeckpt.data.base.source.BatchSource`. Each source has a
reader and windows of its own. The micro-batches of a block, which were planned together, are also read together, and
delivered as views: a source's rows in them stand together in its own order. So an error of reading may come some
micro-batches early. The module starts no threads itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lakeckpt.core.plan import Plan
from lakeckpt.core.streams.mixed_batches import MixedAssignment, MixedBlock, MixedReceipt, Part
from lakeckpt.core.streams.mixture import MixedPlan
from lakeckpt.data.base.batch import Batch
from lakeckpt.data.base.memory import Budget, budget_of
from lakeckpt.data.base.source import BatchSource, Iterations, delivered
from lakeckpt.data.flows.source import FlowSource
from lakeckpt.data.streams.mixed_flows import FlowLanes, FlowRows
from lakeckpt.errors import SchemaError
from lakeckpt.reading.columns.gather import cut, gather, new_array
from lakeckpt.reading.columns.ragged import Ragged
from lakeckpt.reading.windows.positions import Opened, PositionReader

__all__ = ["MixedSource"]

Int64Array = npt.NDArray[np.int64]
_NOT_NUMPY = {torch.bfloat16: torch.int16}
"""Types of tensors that numpy does not have → types of the same width, as which their bytes are moved."""


class _Read:
    """Rows that are read together: those of a block, or of one of its micro-batches."""

    def __init__(
        self, block: MixedBlock, order: npt.NDArray[np.uint16], parts: list[tuple[Part, Opened | FlowLanes]]
    ) -> None:
        self.block, self.order, self.parts = block, order, parts
        self.columns: dict[str, Any] | None = None
        """The rows, once they are taken."""
        self.flows: dict[int, FlowRows] = {}
        """Source → what was taken of it, if its consumption depends on the data."""


class _Opened(NamedTuple):
    """A micro-batch: rows [start, stop) of those that are read together."""

    read: _Read
    start: int
    stop: int

    @property
    def is_ready(self) -> bool:
        """True if no window has to be waited for."""
        return self.read.columns is not None or all(opened.is_ready for _, opened in self.read.parts)


class MixedSource(Iterations):
    """Makes what the loop gets of the assignments of a mixture. Not safe for use by several threads.

    ``source_column`` is the name under which a batch holds the number of each row's source; None: it holds none.
    ``memory_limit_bytes`` is for all sources together.
    """

    def __init__(
        self,
        names: Sequence[str],
        sources: Sequence[BatchSource],
        *,
        source_column: str | None,
        memory_limit_bytes: int | None,
    ) -> None:
        super().__init__()
        self.memory_limit_bytes = memory_limit_bytes
        self._names, self._sources, self._source_column = tuple(names), tuple(sources), source_column
        self._changing = frozenset(
            number for number, one in enumerate(sources) if one.transform is not None or isinstance(one, FlowSource)
        )
        """The sources whose rows go through a transform, or whose consumption depends on the data."""
        self._budgets: dict[int, Budget] = {}
        """The memory that the sources share, by the lanes of their readers."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_budgets": {}}

    @property
    def transform(self) -> tuple[Callable[..., Any] | None, ...]:
        """The transforms of the sources."""
        return tuple(one.transform for one in self._sources)

    def follow(self, readers: _Readers, plan: MixedPlan, turns: Sequence[tuple[int, int]]) -> None:
        """Have ``readers`` read ahead lanes of ``plan``, given as (turn, lane)."""
        for number, weight in enumerate(plan.weights):
            if number in plan.state.makers:
                if weight and not readers.has(number):
                    lanes = [(plan.first + lane) % plan.segment.num_lanes for _, lane in turns]
                    readers.flow(number, plan.source(number)).follow(lanes, weight / sum(plan.weights))
            elif weight or readers.has(number):
                mine, share = turns if weight else [], weight / sum(plan.weights)
                self._sources[number].follow(readers.of(number), plan.source(number), mine, share)

    def open(self, readers: _Readers, assignment: MixedAssignment) -> _Opened:
        """Begin to decode the rows of ``assignment``, and those that are read with them, by ``readers``, which
        `new_reader` made. Raises `LakeckptError`."""
        block, number, lane = assignment.block, assignment.number, assignment.receipt.lane
        size = len(block.order[number])
        # A transform gets the rows of one micro-batch, as a source does whose consumption depends on the data, and the
        # rows of one source are delivered without a copy.
        if block.whole or (self._changing and any(part.source in self._changing for part in block.parts)):
            if number == 0:
                readers.windows.fill()
            return _Opened(self._begun(readers, block, block.order[number], block.parts_of(number)), 0, size)
        read = readers.blocks.get(lane)
        if read is None or read.block is not block:
            read = readers.blocks[lane] = self._begun(readers, block, block.order.reshape(-1), block.parts)
            readers.windows.fill()
        return _Opened(read, number * size, (number + 1) * size)

    def _begun(
        self, readers: _Readers, block: MixedBlock, order: npt.NDArray[np.uint16], parts: Sequence[Part]
    ) -> _Read:
        opened = [
            self._sources[one.source].open_spans(readers.of(one.source), one.spans, one.layouts)
            if one.plan is None
            else readers.flow(one.source, one.plan)
            for one in parts
        ]
        return _Read(block, order, list(zip(parts, opened, strict=True)))

    def take(self, readers: _Readers, opened: _Opened, receipt: MixedReceipt) -> Batch:
        """Return the batch of the rows that ``readers`` have opened."""
        read, start, stop = opened
        if read.columns is None:
            read.columns = self._taken(readers, read, receipt)
        found = read.columns
        if stop - start < len(read.order):
            found = _rows_of(found, start, stop, torch.from_numpy if self._is_torch else _as_it_is)
        if stop == len(read.order):
            readers.blocks.pop(receipt.lane, None)
        found = delivered(found)
        if self._source_column is not None:
            if self._source_column in found:
                raise SchemaError(
                    f"source_column={self._source_column!r} adds a column of this name to each batch, and the sources "
                    "have one: name another one"
                )
            found[self._source_column] = self._numbers(read.order[start:stop])
        if read.flows:
            receipt = receipt.with_reads(self._names, {source: one.read for source, one in read.flows.items()})
        return Batch(found, receipt)  # type: ignore[arg-type]

    def _taken(self, readers: _Readers, read: _Read, receipt: MixedReceipt) -> dict[str, Any]:
        """Return the columns of all rows of ``read``."""
        raw = len(read.order) > receipt.rows
        columns = []
        for part, opened in read.parts:
            if isinstance(opened, FlowLanes):
                read.flows[part.source] = opened.take(receipt.lane, part.rows)
                columns.append(read.flows[part.source].columns)
            else:
                columns.append(self._columns(readers, part, opened, receipt, raw=raw))
        if len(columns) == 1:
            return columns[0]
        sources = [part.source for part, _ in read.parts]
        bounds = np.cumsum(np.bincount(read.order, minlength=sources[-1] + 1))[sources[:-1]]
        rows = np.split(np.argsort(read.order, kind="stable"), bounds)
        found: dict[str, Any] = _alternated([self._names[one] for one in sources], columns, rows, len(read.order))
        return found

    def _columns(
        self, readers: _Readers, part: Part, opened: Opened, receipt: MixedReceipt, *, raw: bool
    ) -> dict[str, Any]:
        source, reader = self._sources[part.source], readers.of(part.source)
        if source.transform is None:
            columns: dict[str, Any] = source.columns(reader, opened, raw=raw)
            return columns
        found = source.take(reader, opened, receipt.of_part(part.spans))
        if not isinstance(found, dict):
            raise SchemaError(
                f"the transform of source {self._names[part.source]!r} returned a {type(found).__name__}: in a mixture "
                "it must return a dict of columns, so that rows of several sources make one batch"
            )
        return found

    @property
    def _is_torch(self) -> bool:
        return self._sources[0].output == "torch"

    def _numbers(self, order: npt.NDArray[np.uint16]) -> Any:
        numbers = order.astype(np.int64)
        return torch.from_numpy(numbers) if self._is_torch else numbers

    def new_reader(self, lanes: int) -> _Readers:
        """Return readers of the sources' windows, of which one is open for each of ``lanes``."""
        if lanes not in self._budgets:
            every = [one.reads for one in self._sources]
            self._budgets[lanes] = budget_of(self.memory_limit_bytes, every, lanes=lanes)
        return _Readers(self._sources, lanes, self._budgets[lanes])

    def end(self, reader: _Readers, lanes: int) -> None:
        """Keep the readers of an iteration that is over; nobody else may use them any more."""
        reader.end()


class _Readers:
    """The readers of the sources of a mixture, in one iteration."""

    def __init__(self, sources: Sequence[BatchSource], lanes: int, budget: Budget) -> None:
        self._sources, self._lanes, self._budget = sources, lanes, budget
        self._readers: dict[int, PositionReader] = {}
        self._flows: dict[int, FlowLanes] = {}
        self.blocks: dict[int, _Read] = {}
        """Lane → its block that is read."""

    def of(self, source: int) -> PositionReader:
        """Return the reader of a source."""
        if source not in self._readers:
            self._readers[source] = self._sources[source].new_reader(self._lanes, self._budget)
        return self._readers[source]

    def flow(self, source: int, plan: Plan) -> FlowLanes:
        """Return the lanes of a source whose consumption depends on the data, from the frontiers of ``plan`` on."""
        if source not in self._flows:
            flow = self._sources[source]
            assert isinstance(flow, FlowSource)
            self._flows[source] = FlowLanes(flow, plan, self.of(source), self._lanes)
        return self._flows[source]

    def has(self, source: int) -> bool:
        """Return whether a source was read."""
        return source in self._readers

    @property
    def windows(self) -> _Readers:
        """The windows that the readers hold together."""
        return self

    def fill(self) -> None:
        """Have all readers read ahead."""
        self._budget.room.fill()

    @property
    def rows_ready(self) -> int:
        """The rows that are decoded, and were not served. Any thread may ask."""
        return sum(one.windows.rows_ready for one in list(self._readers.values()))

    def clear(self) -> None:
        """Drop all windows."""
        self.blocks, self._flows = {}, {}
        for one in self._readers.values():
            one.clear()

    def end(self) -> None:
        """Give the readers back to their sources."""
        for source, one in self._readers.items():
            self._sources[source].end(one, self._lanes)
        self._readers = {}


def _alternated(names: Sequence[str], parts: Sequence[dict[str, Any]], rows: Sequence[Int64Array], size: int) -> Any:
    """Return one batch of ``size`` rows: those of ``parts[i]`` stand at ``rows[i]``, in their order."""
    for name, one in zip(names, parts, strict=True):
        if one.keys() != parts[0].keys():
            raise SchemaError(
                f"source {names[0]!r} of the mixture has the columns {sorted(parts[0])}, and source {name!r} has "
                f"{sorted(one)}: give both the same columns, by columns= or transform="
            )
    every = ", ".join(map(repr, names))
    return {
        column: _column([one[column] for one in parts], rows, size, f"column {column!r} of the sources {every}")
        for column in parts[0]
    }


def _column(parts: Sequence[Any], rows: Sequence[Int64Array], size: int, what: str) -> Any:
    first = parts[0]
    if not all(type(one) is type(first) for one in parts):
        raise _unlike(parts, what)
    if not isinstance(first, dict):
        _check_rows(parts, rows, what)
    if isinstance(first, torch.Tensor):
        return _tensor(parts, rows, size, what)
    if isinstance(first, np.ndarray):
        return _array(parts, rows, size, what)
    if isinstance(first, dict) and all(one.keys() == first.keys() for one in parts):
        return {name: _column([one[name] for one in parts], rows, size, f"{what}, field {name!r}") for name in first}
    if isinstance(first, Ragged):
        return _ragged(parts, rows)
    if not isinstance(first, list):
        raise _unlike(parts, what)
    found: list[Any] = [None] * size
    for part, places in zip(parts, rows, strict=True):
        for place, value in zip(places.tolist(), part, strict=True):
            found[place] = value
    return found


def _check_rows(parts: Sequence[Any], rows: Sequence[Int64Array], what: str) -> None:
    """Refuse parts that are not of as many rows as were read."""
    found, read = [_length(one) for one in parts], [len(places) for places in rows]
    if found != read:
        raise SchemaError(
            f"{what} are of {found} rows, and {read} rows were read of the sources: in a mixture a transform must "
            "return a row for each row that it gets, in their order"
        )


def _length(column: Any) -> int | None:
    """Return the number of rows of a column; None: it has no rows."""
    try:
        return len(column)
    except TypeError:
        return None


def _tensor(parts: Sequence[torch.Tensor], rows: Sequence[Int64Array], size: int, what: str) -> torch.Tensor:
    first = parts[0]
    if first.dtype in _NOT_NUMPY and all(one.dtype == first.dtype for one in parts):
        bits = [one.view(_NOT_NUMPY[first.dtype]).numpy() for one in parts]
        return torch.from_numpy(_array(bits, rows, size, what)).view(first.dtype)
    return torch.from_numpy(_array([one.numpy() for one in parts], rows, size, what))


def _array(parts: Sequence[npt.NDArray[Any]], rows: Sequence[Int64Array], size: int, what: str) -> npt.NDArray[Any]:
    dtype, shape = parts[0].dtype, parts[0].shape[1:]
    found = new_array((size, *shape), dtype)
    for part, places in zip(parts, rows, strict=True):
        if part.dtype != dtype or part.shape[1:] != shape:
            raise _unlike(parts, what)
        found[places] = part
    return found


def _rows_of(column: Any, start: int, stop: int, make: Callable[[Any], Any]) -> Any:
    """Return rows [start, stop) of a column, as views to which ``make`` is applied."""
    if isinstance(column, dict):
        return {name: _rows_of(one, start, stop, make) for name, one in column.items()}
    if isinstance(column, list):
        return column[start:stop]
    return cut({"": column}, start, stop, make)[""]


def _as_it_is(array: Any) -> Any:
    return array


def _ragged(parts: Sequence[Ragged[Any]], rows: Sequence[Int64Array]) -> Any:
    is_torch = isinstance(parts[0].offsets, torch.Tensor)
    arrays = [one.map_arrays(lambda tensor: tensor.numpy()) for one in parts] if is_torch else list(parts)
    found: Any = gather(arrays, np.argsort(np.concatenate(rows), kind="stable"))
    return found.map_arrays(torch.from_numpy) if is_torch else found


def _unlike(parts: Sequence[Any], what: str) -> SchemaError:
    """Return the error for parts of a column that cannot be rows of one column."""
    forms = [
        f"{type(one).__name__} {getattr(one, 'dtype', '')} {tuple(getattr(one, 'shape', ()))[1:]}" for one in parts
    ]
    return SchemaError(
        f"{what} are {', '.join(forms)}: make them one type, by transform= or in the tables. A column is a tensor, an "
        "array, a Ragged, a list, or a dict of these"
    )
