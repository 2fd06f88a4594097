"""This module reads the micro-batches of a mixture: the parts that its sources give, row by row in their order.

A `MixedSource` is to `lakeckpt.data.ahead.Ahead` what a `lakeckpt.data.source.BatchSource` is. Each source has readers
and windows of its own, which are made when the source is first needed. Up to 16 micro-batches of a lane that follow one
another are made together, as a *group*, and delivered as views of it: a source's rows in them stand together in its own
order, and are taken at once. So an error of reading may come some micro-batches early. The module starts no threads
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lakeckpt.core.streams.mixed_batches import MixedAssignment, MixedReceipt, Part
from lakeckpt.data.batch import Batch
from lakeckpt.data.memory import Budget, budget_of
from lakeckpt.data.source import BatchSource, Iterations, delivered
from lakeckpt.errors import SchemaError
from lakeckpt.reading.columns.gather import gather, new_array
from lakeckpt.reading.columns.ragged import Ragged
from lakeckpt.reading.windows.positions import Announced, PositionReader

__all__ = ["MixedSource"]

Int64Array = npt.NDArray[np.int64]
_GROUP = 16
"""Micro-batches of a group."""


class _Group:
    """Micro-batches of one lane that follow one another."""

    def __init__(self) -> None:
        self.orders: list[npt.NDArray[np.uint16]] = []
        """The source of each row of each micro-batch."""
        self.parts: dict[int, list[tuple[Part, Announced]]] = {}
        """Source → what it gives to each micro-batch, in their order."""
        self.columns: dict[str, Any] | None = None
        """The rows of all micro-batches, once they are taken."""

    @property
    def is_ready(self) -> bool:
        """Whether no window has to be waited for."""
        every = (rows for parts in self.parts.values() for _, rows in parts)
        return self.columns is not None or all(PositionReader.is_ready(rows) for rows in every)


class _Place(NamedTuple):
    """A micro-batch of a group."""

    group: _Group
    number: int


_NOT_NUMPY = {torch.bfloat16: torch.int16}
"""Types of tensors that numpy does not have → types of the same width, as which their bytes are moved."""


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
        self._budgets: dict[int, Budget] = {}
        """The memory that the sources share, by the lanes of their readers."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_budgets": {}}

    @property
    def transform(self) -> tuple[Callable[..., Any] | None, ...]:
        """The transforms of the sources."""
        return tuple(one.transform for one in self._sources)

    @property
    def width(self) -> int:
        """How many sources a micro-batch may have parts of."""
        return len(self._sources)

    @staticmethod
    def is_ready(announced: _Place) -> bool:
        """Return whether `take` would not wait."""
        return announced.group.is_ready

    def announce(self, reader: _Readers, assignment: MixedAssignment) -> _Place:
        """Announce the rows of ``assignment`` to ``reader``, which is one of `new_reader`. Raises `LakeckptError`."""
        found = []
        for part in assignment.parts:
            found.append(
                (part, self._sources[part.source].announce_spans(reader.of(part.source), part.spans, part.layouts))
            )
        # A transform gets the rows of one micro-batch, and the rows of one source are delivered without a copy.
        is_alone = len(found) == 1 or any(self._sources[part.source].transform is not None for part, _ in found)
        group = _Group() if is_alone else reader.group_of(assignment.receipt.lane)
        for part, rows in found:
            group.parts.setdefault(part.source, []).append((part, rows))
        group.orders.append(assignment.order)
        return _Place(group, len(group.orders) - 1)

    def take(self, reader: _Readers, announced: _Place, receipt: MixedReceipt) -> Batch:
        """Return the batch of the rows that were announced to ``reader``."""
        group, number = announced
        if group.columns is None:
            reader.close(group, receipt.lane)
            group.columns = self._taken(reader, group, receipt)
        start = sum(map(len, group.orders[:number]))
        order = group.orders[number]
        found = group.columns
        if len(group.orders) > 1:
            found = {name: _rows_of(one, start, start + len(order)) for name, one in found.items()}
        found = delivered(found)
        if self._source_column is not None:
            if self._source_column in found:
                raise SchemaError(
                    f"source_column={self._source_column!r} adds a column of this name to each batch, and the sources "
                    "have one: name another one"
                )
            found[self._source_column] = self._numbers(order)
        return Batch(found, receipt)  # type: ignore[arg-type]

    def _taken(self, reader: _Readers, group: _Group, receipt: MixedReceipt) -> dict[str, Any]:
        """Return the columns of all micro-batches of ``group``."""
        columns = {
            source: self._columns(reader.of(source), source, parts, receipt)
            for source, parts in sorted(group.parts.items())
        }
        if len(columns) == 1:
            return next(iter(columns.values()))
        order = np.concatenate(group.orders)
        names = [self._names[source] for source in columns]
        rows = [np.flatnonzero(order == one) for one in columns]
        found: dict[str, Any] = _alternated(names, list(columns.values()), rows, len(order))
        return found

    def _columns(
        self, reader: PositionReader, number: int, parts: list[tuple[Part, Announced]], receipt: MixedReceipt
    ) -> dict[str, Any]:
        source = self._sources[number]
        if source.transform is None:
            columns: dict[str, Any] = source.columns(reader, reader.joined(rows for _, rows in parts))
            return columns
        ((part, rows),) = parts
        found = source.take(reader, rows, receipt.of_part(part.spans))
        if not isinstance(found, dict):
            raise SchemaError(
                f"the transform of source {self._names[number]!r} returned a {type(found).__name__}: in a mixture it "
                "must return a dict of columns, so that rows of several sources make one batch"
            )
        return found

    def _numbers(self, order: npt.NDArray[np.uint16]) -> Any:
        numbers = order.astype(np.int64)
        return torch.from_numpy(numbers) if self._sources[0].output == "torch" else numbers

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
        self._groups: dict[int, _Group] = {}
        """Lane → the group to which its next micro-batch is added."""

    def group_of(self, lane: int) -> _Group:
        """Return the group to which the next micro-batch of ``lane`` is added."""
        group = self._groups.get(lane)
        if group is None or len(group.orders) >= _GROUP:
            group = self._groups[lane] = _Group()
        return group

    def close(self, group: _Group, lane: int) -> None:
        """Add no more micro-batches to ``group``, which is taken."""
        if self._groups.get(lane) is group:
            del self._groups[lane]

    def of(self, source: int) -> PositionReader:
        """Return the reader of a source."""
        if source not in self._readers:
            self._readers[source] = self._sources[source].new_reader(self._lanes, self._budget)
        return self._readers[source]

    @property
    def has_room(self) -> bool:
        """Whether every source may read on."""
        return all(one.has_room for one in self._readers.values())

    def clear(self) -> None:
        """Drop all windows."""
        self._groups = {}
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


def _rows_of(column: Any, start: int, stop: int) -> Any:
    """Return rows [start, stop) of a column, as views. A tensor is made of its own rows, as torch saves all of what a
    tensor is a view of."""
    if isinstance(column, dict):
        return {name: _rows_of(one, start, stop) for name, one in column.items()}
    if isinstance(column, torch.Tensor):
        return torch.from_numpy(column.numpy()[start:stop])
    if isinstance(column, Ragged) and isinstance(column.offsets, torch.Tensor):
        arrays: Any = column.map_arrays(lambda tensor: tensor.numpy())
        return arrays[start:stop].map_arrays(torch.from_numpy)
    return column[start:stop]


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
