"""This module makes the columns of packed sequences.

`Sequences` holds the tokens of a window's sequences, and where the *runs* of documents begin among them. The other
columns follow from the runs. They are made of the sequences of one micro-batch, when these are cut: so a window takes
the memory of its tokens alone, and the columns are written once, while the processor's cache holds them.

Nothing here reads rows or starts threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from lakeckpt.reading.columns.ragged import Column, Ragged

__all__ = ["NO_LABEL", "Sequences", "with_ends"]

Array = npt.NDArray[Any]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

NO_LABEL = -100
"""The label of a token that has none: ``ignore_index`` of torch's cross-entropy."""


class _Made:
    """A column whose rows are made when they are cut. ``make`` is called with the first row and the end."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        self._make = make

    def __getitem__(self, rows: int | slice) -> Any:
        return self._make(rows.start, rows.stop) if isinstance(rows, slice) else self._make(rows, rows + 1)[0]


class _Runs(NamedTuple):
    """The runs of some sequences: ``first`` to ``last`` of the window's runs. Made for each batch, so a tuple."""

    first: int
    last: int
    bounds: Int64Array
    """Where each begins among the tokens of these sequences, and their end: int64, shape (runs + 1,)."""
    lengths: Int64Array


class Sequences:
    """The sequences of a window, in the order in which they are delivered. For one thread at a time.

    ``tokens`` has the shape (sequences, length). ``bounds`` (int64, shape (runs + 1,)) says where each run begins among
    the tokens, and their end; each sequence begins a run. ``paddings`` are the runs that are padding, ascending.
    ``follows`` (int64, shape (runs,)) is the label of the last token of each run; None: no labels are wanted.
    """

    def __init__(self, tokens: Array, bounds: Int64Array, *, paddings: Int64Array, follows: Int64Array | None) -> None:
        self._tokens, self._bounds, self._paddings, self._follows = tokens, bounds, paddings, follows
        self._length = int(tokens.shape[1])
        self._firsts = np.searchsorted(bounds, np.arange(len(tokens) + 1) * self._length)
        """The first run of each sequence, and the number of runs: int64, shape (sequences + 1,)."""
        numbers = np.arange(len(bounds) - 1) - np.repeat(self._firsts[:-1], np.diff(self._firsts))
        self._numbers: Int32Array = numbers.astype(np.int32)
        """The number of each run in its sequence: int32, shape (runs,)."""
        self._places: Int32Array = np.arange(0, dtype=np.int32)
        """0, 1, 2, …: as many as the largest cut so far has tokens."""
        self._latest: tuple[int, int, _Runs] | None = None
        """The latest cut. The columns of a micro-batch are cut one after another."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._tokens)

    @property
    def size_bytes(self) -> int:
        """The memory that the sequences take."""
        arrays = (self._tokens, self._bounds, self._follows, self._firsts, self._numbers)
        return sum(one.nbytes for one in arrays if one is not None)

    def part(self, start: int, stop: int) -> Sequences:
        """Return sequences [start, stop), in memory of their own."""
        runs = self._runs(start, stop)
        inside = (self._paddings >= runs.first) & (self._paddings < runs.last)
        return Sequences(
            self._tokens[start:stop].copy(),
            runs.bounds,
            paddings=self._paddings[inside] - runs.first,
            follows=None if self._follows is None else self._follows[runs.first : runs.last].copy(),
        )

    def columns(self, names: Sequence[str]) -> dict[str, Column[Array]]:
        """Return the columns ``names``; all but ``tokens`` can only be cut. ``labels`` need ``follows``.

        ``cu_seqlens`` has the lengths of the runs of each sequence: `with_ends` makes of it what is delivered.
        """
        made: dict[str, Callable[[int, int], Any]] = {
            "position_ids": self._position_ids,
            "document_ids": self._document_ids,
            "loss_mask": self._loss_mask,
            "labels": self._labels,
            "cu_seqlens": self._lengths,
        }
        return {name: self._tokens if name == "tokens" else cast("Array", _Made(made[name])) for name in names}

    def _runs(self, start: int, stop: int) -> _Runs:
        """Return the runs of sequences [start, stop)."""
        latest = self._latest
        if latest is None or latest[:2] != (start, stop):
            first, last = self._firsts.item(start), self._firsts.item(stop)
            bounds = self._bounds[first : last + 1] - start * self._length
            found = _Runs(first, last, bounds, bounds[1:] - bounds[:-1])
            latest = self._latest = start, stop, found
        return latest[2]

    def _position_ids(self, start: int, stop: int) -> Array:
        """Return the place of each token in its run."""
        runs, size = self._runs(start, stop), (stop - start) * self._length
        if len(self._places) < size:
            self._places = np.arange(size, dtype=np.int32)
        found = np.repeat(runs.bounds[:-1].astype(np.int32), runs.lengths)
        np.subtract(self._places[:size], found, out=found)
        return found.reshape(stop - start, self._length)

    def _document_ids(self, start: int, stop: int) -> Array:
        """Return the number of each token's run in its sequence."""
        runs = self._runs(start, stop)
        return np.repeat(self._numbers[runs.first : runs.last], runs.lengths).reshape(stop - start, self._length)

    def _loss_mask(self, start: int, stop: int) -> Array:
        """Return False for padding, and True for other tokens."""
        found = np.ones((stop - start, self._length), np.bool_)
        self._pad(found, start, stop, value=False)
        return found

    def _labels(self, start: int, stop: int) -> Array:
        """Return the label of each token."""
        assert self._follows is not None
        runs = self._runs(start, stop)
        found = np.empty((stop - start, self._length), np.int64)
        flat = found.reshape(-1)
        flat[:-1] = self._tokens[start:stop].reshape(-1)[1:]
        flat[runs.bounds[1:] - 1] = self._follows[runs.first : runs.last]
        self._pad(found, start, stop, value=NO_LABEL)
        return found

    def _lengths(self, start: int, stop: int) -> Ragged[Array]:
        """Return the lengths of the runs of each sequence."""
        offsets = self._firsts[start : stop + 1] - self._firsts.item(start)
        return Ragged(values=self._runs(start, stop).lengths.astype(np.int32), offsets=offsets)

    def _pad(self, found: Array, start: int, stop: int, *, value: int) -> None:
        """Set the padding of sequences [start, stop), if they have any, to ``value``."""
        if not len(self._paddings):
            return
        runs, flat = self._runs(start, stop), found.reshape(-1)
        first, last = np.searchsorted(self._paddings, (runs.first, runs.last))
        mine = self._paddings[first:last] - runs.first
        for begin, end in zip(runs.bounds[mine].tolist(), runs.bounds[mine + 1].tolist(), strict=True):
            flat[begin:end] = value


def with_ends(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``columns`` of a batch with ``cu_seqlens`` as it is delivered, if they have it.

    It says where the runs of documents begin among all tokens of the batch, and their end: int32, shape (runs + 1,).
    The result is an array, also if the lengths of the runs are a tensor.
    """
    if "cu_seqlens" not in columns:
        return dict(columns)
    lengths = np.asarray(columns["cu_seqlens"].values)
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return {**columns, "cu_seqlens": ends}
