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

from lakeckpt.core.plan import Assignment
from lakeckpt.core.streams.mixture import MixedAssignment, MixedReceipt
from lakeckpt.data.batch import Batch
from lakeckpt.data.source import BatchSource, Iterations
from lakeckpt.errors import SchemaError
from lakeckpt.reading.columns.gather import gather
from lakeckpt.reading.columns.ragged import Ragged
from lakeckpt.reading.windows.positions import Announced, PositionReader

__all__ = ["MixedSource"]

Int64Array = npt.NDArray[np.int64]
_Parts = tuple[npt.NDArray[np.uint16], list[tuple[int, Assignment, Announced]]]


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
        for source, part in assignment.parts:
            found.append((source, part, self._sources[source].announce(reader.of(source), part)))
        return assignment.order, found

    def take(self, reader: _Readers, announced: _Parts, receipt: MixedReceipt) -> Batch:
        """Return the batch of the rows that were announced to ``reader``."""
        order, parts = announced
        taken = [
            (source, self._sources[source].take(reader.of(source), rows, part.receipt)) for source, part, rows in parts
        ]
        names = [self._names[source] for source, _ in taken]
        columns = [_checked(self._names[source], one) for source, one in taken]
        if len(taken) == 1:
            found = dict(columns[0])
        else:
            found = _alternated(names, columns, [np.flatnonzero(order == source) for source, _ in taken], len(order))
        if self._source_column is not None:
            found[self._source_column] = self._numbers(order)
        return Batch(found, receipt)  # type: ignore[arg-type]

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


def _checked(name: str, batch: Any) -> dict[str, Any]:
    if not isinstance(batch, dict):
        raise SchemaError(
            f"the transform of source {name!r} returned a {type(batch).__name__}: in a mixture it must return a dict "
            "of columns, so that rows of several sources make one batch"
        )
    return batch


def _alternated(names: Sequence[str], parts: Sequence[dict[str, Any]], rows: Sequence[Int64Array], size: int) -> Any:
    """Return one batch of ``size`` rows: those of ``parts[i]`` stand at ``rows[i]``, in their order."""
    for name, one in zip(names, parts, strict=True):
        if one.keys() != parts[0].keys():
            raise SchemaError(
                f"source {names[0]!r} of the mixture has the columns {sorted(parts[0])}, and source {name!r} has "
                f"{sorted(one)}: give both the same columns, by columns= or transform="
            )
    return {
        column: _column([one[column] for one in parts], rows, size, f"column {column!r} of the sources {names}")
        for column in parts[0]
    }


def _column(parts: Sequence[Any], rows: Sequence[Int64Array], size: int, what: str) -> Any:
    first = parts[0]
    _check_alike(parts, what)
    if isinstance(first, dict):
        return {name: _column([one[name] for one in parts], rows, size, f"{what}, field {name!r}") for name in first}
    if isinstance(first, Ragged):
        return _ragged(parts, rows)
    if isinstance(first, list):
        found: list[Any] = [None] * size
        for part, places in zip(parts, rows, strict=True):
            for place, value in zip(places.tolist(), part, strict=True):
                found[place] = value
        return found
    if isinstance(first, torch.Tensor):
        tensor = first.new_empty((size, *first.shape[1:]))
        for part, places in zip(parts, rows, strict=True):
            tensor[torch.from_numpy(places)] = part
        return tensor
    array = np.empty((size, *first.shape[1:]), first.dtype)
    for part, places in zip(parts, rows, strict=True):
        array[places] = part
    return array


def _ragged(parts: Sequence[Ragged[Any]], rows: Sequence[Int64Array]) -> Any:
    is_torch = isinstance(parts[0].offsets, torch.Tensor)
    arrays = [one.map_arrays(lambda tensor: tensor.numpy()) for one in parts] if is_torch else list(parts)
    found: Any = gather(arrays, np.argsort(np.concatenate(rows), kind="stable"))
    return found.map_arrays(torch.from_numpy) if is_torch else found


def _check_alike(parts: Sequence[Any], what: str) -> None:
    """`SchemaError` where parts of a column cannot be rows of one column."""
    forms = []
    for one in parts:
        if not isinstance(one, dict | Ragged | list | torch.Tensor | np.ndarray):
            raise SchemaError(f"{what} holds a {type(one).__name__}, which is no column of rows")
        form = (one.dtype, *one.shape[1:]) if isinstance(one, torch.Tensor | np.ndarray) else ()
        forms.append(f"{type(one).__name__} {' '.join(map(str, form))}".strip())
    if len(set(forms)) > 1:
        raise SchemaError(f"{what} are {', '.join(forms)}: cast them to one type, by transform= or in the tables")
