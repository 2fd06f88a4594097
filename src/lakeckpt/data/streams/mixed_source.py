"""This module reads the micro-batches of a mixture: the parts that its sources give, row by row in their order.

A `MixedSource` is to `lakeckpt.data.ahead.Ahead` what a `lakeckpt.data.source.BatchSource` is. Each source has readers
and windows of its own, which are made when the source is first needed. The module starts no threads itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lakeckpt.core.streams.mixture import MixedAssignment, MixedReceipt, Part
from lakeckpt.data.batch import Batch
from lakeckpt.data.source import BatchSource, Iterations
from lakeckpt.errors import SchemaError
from lakeckpt.reading.columns.gather import gather
from lakeckpt.reading.columns.ragged import Ragged
from lakeckpt.reading.windows.positions import Announced, PositionReader

__all__ = ["MixedSource"]

Int64Array = npt.NDArray[np.int64]
_Parts = tuple[npt.NDArray[np.uint16], list[tuple[int, Part, Announced]]]


class MixedSource(Iterations):
    """Makes what the loop gets of the assignments of a mixture. Not safe for use by several threads.

    ``source_column`` is the name under which a batch holds the number of each row's source; None: it holds none.
    """

    def __init__(self, names: Sequence[str], sources: Sequence[BatchSource], *, source_column: str | None) -> None:
        super().__init__()
        self._names, self._sources, self._source_column = tuple(names), tuple(sources), source_column
        for one in self._sources:
            one.sharing = len(self._sources)

    @property
    def memory_limit_bytes(self) -> int | None:
        """The least limit that a source was given; None: none was."""
        given = [one.memory_limit_bytes for one in self._sources if one.memory_limit_bytes is not None]
        return min(given, default=None)

    @property
    def transform(self) -> tuple[Callable[..., Any] | None, ...]:
        """The transforms of the sources."""
        return tuple(one.transform for one in self._sources)

    @staticmethod
    def is_ready(announced: _Parts) -> bool:
        """Return whether `take` would not wait."""
        return all(PositionReader.is_ready(rows) for _, _, rows in announced[1])

    def announce(self, reader: _Readers, assignment: MixedAssignment) -> _Parts:
        """Announce the rows of ``assignment`` to ``reader``, which is one of `new_reader`. Raises `LakeckptError`."""
        found = []
        for part in assignment.parts:
            rows = self._sources[part.source].announce_spans(reader.of(part.source), part.spans, part.layouts)
            found.append((part.source, part, rows))
        return assignment.order, found

    def take(self, reader: _Readers, announced: _Parts, receipt: MixedReceipt) -> Batch:
        """Return the batch of the rows that were announced to ``reader``."""
        order, parts = announced
        columns = [self._columns(reader.of(source), part, rows, receipt) for source, part, rows in parts]
        if len(parts) == 1:
            found = dict(columns[0])
        else:
            names = [self._names[source] for source, _, _ in parts]
            found = _alternated(names, columns, [np.flatnonzero(order == source) for source, _, _ in parts], len(order))
        if self._source_column is not None:
            found[self._source_column] = self._numbers(order)
        return Batch(found, receipt)  # type: ignore[arg-type]

    def _columns(self, reader: PositionReader, part: Part, rows: Announced, receipt: MixedReceipt) -> dict[str, Any]:
        source = self._sources[part.source]
        if source.transform is None:
            columns: dict[str, Any] = source.columns(reader, rows)
            return columns
        found = source.take(reader, rows, receipt.of_part(part.spans))
        if not isinstance(found, dict):
            raise SchemaError(
                f"the transform of source {self._names[part.source]!r} returned a {type(found).__name__}: in a mixture "
                "it must return a dict of columns, so that rows of several sources make one batch"
            )
        return found

    def _numbers(self, order: npt.NDArray[np.uint16]) -> Any:
        numbers = order.astype(np.int64)
        return torch.from_numpy(numbers) if self._sources[0].output == "torch" else numbers

    def new_reader(self, lanes: int) -> _Readers:
        """Return readers of the sources' windows, of which one is open for each of ``lanes``."""
        return _Readers(self._sources, lanes)

    def end(self, reader: _Readers, lanes: int) -> None:
        """Keep the readers of an iteration that is over; nobody else may use them any more."""
        reader.end()


class _Readers:
    """The readers of the sources of a mixture, in one iteration."""

    def __init__(self, sources: Sequence[BatchSource], lanes: int) -> None:
        self._sources, self._lanes = sources, lanes
        self._readers: dict[int, PositionReader] = {}

    def of(self, source: int) -> PositionReader:
        """Return the reader of a source."""
        if source not in self._readers:
            self._readers[source] = self._sources[source].new_reader(self._lanes)
        return self._readers[source]

    @property
    def has_room(self) -> bool:
        """Whether every source may read on."""
        return all(one.has_room for one in self._readers.values())

    def clear(self) -> None:
        """Drop all windows."""
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
    if isinstance(first, torch.Tensor):
        return torch.from_numpy(_array([one.numpy() for one in parts], rows, size, what))
    if isinstance(first, np.ndarray):
        return _array(parts, rows, size, what)
    if isinstance(first, dict):
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


def _array(parts: Sequence[npt.NDArray[Any]], rows: Sequence[Int64Array], size: int, what: str) -> npt.NDArray[Any]:
    dtype, shape = parts[0].dtype, parts[0].shape[1:]
    found = np.empty((size, *shape), dtype)
    for part, places in zip(parts, rows, strict=True):
        if part.dtype != dtype or part.shape[1:] != shape:
            raise _unlike(parts, what)
        found[places] = part
    return found


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
