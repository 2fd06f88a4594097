"""This module makes the columns of packed sequences.

`Sequences` holds the tokens of a window's sequences, and where the *runs* of documents begin among them. The other
columns follow from the runs. They are made of the sequences of one micro-batch, when these are cut: so a window takes
the memory of its tokens alone, and the columns are written once, while the processor's cache holds them.

Nothing here reads rows or starts threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lakeckpt.reading.columns.ragged import Column

__all__ = ["NO_LABEL", "Sequences"]

Array = npt.NDArray[Any]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

NO_LABEL = -100
"""The label of a token that has none: ``ignore_index`` of torch's cross-entropy."""


class _Made:
    """A column whose rows are made when they are cut. ``make`` is called with the first row and the end."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[int, int], Array]) -> None:
        self._make = make

    def __getitem__(self, rows: int | slice) -> Any:
        return self._make(rows.start, rows.stop) if isinstance(rows, slice) else self._make(rows, rows + 1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The sequences of a window, in the order in which they are delivered."""

    tokens: Array
    """Shape (sequences, length)."""
    bounds: Int64Array
    """Where each run begins among the tokens, and their end: int64, shape (runs + 1,). Each sequence begins a run."""
    padding: int
    """Which run is padding; -1: none."""
    follows: Int64Array | None
    """The label of the last token of each run: int64, shape (runs,). None: no labels are wanted."""
    firsts: Int64Array
    """The first run of each sequence, and the number of runs: int64, shape (sequences + 1,)."""
    numbers: Int32Array
    """The number of each run in its sequence: int32, shape (runs,)."""

    @classmethod
    def of(cls, tokens: Array, bounds: Int64Array, *, padding: int, follows: Int64Array | None) -> Sequences:
        """Return the sequences of ``tokens``; the arguments are those of the class."""
        firsts = np.searchsorted(bounds, np.arange(len(tokens) + 1) * tokens.shape[1])
        numbers = np.arange(len(bounds) - 1) - np.repeat(firsts[:-1], np.diff(firsts))
        return cls(
            tokens=tokens,
            bounds=bounds,
            padding=padding,
            follows=follows,
            firsts=firsts,
            numbers=numbers.astype(np.int32),
        )

    @property
    def size_bytes(self) -> int:
        """The memory that the sequences take."""
        arrays = (self.tokens, self.bounds, self.follows, self.firsts, self.numbers)
        return sum(one.nbytes for one in arrays if one is not None)

    @property
    def _length(self) -> int:
        return int(self.tokens.shape[1])

    def columns(self) -> dict[str, Column[Array]]:
        """Return the columns; all but ``tokens`` can only be cut."""
        made = {
            "position_ids": self._position_ids,
            "document_ids": self._document_ids,
            "loss_mask": self._loss_mask,
            **({} if self.follows is None else {"labels": self._labels}),
        }
        return {"tokens": self.tokens, **{name: cast("Array", _Made(make)) for name, make in made.items()}}

    def _runs(self, start: int, stop: int) -> tuple[slice, Int64Array]:
        """Return the runs of sequences [start, stop), and where they begin and end among the tokens of these."""
        first, last = self.firsts.item(start), self.firsts.item(stop)
        return slice(first, last), self.bounds[first : last + 1] - start * self._length

    def _position_ids(self, start: int, stop: int) -> Array:
        """Return the place of each token in its run."""
        _, bounds = self._runs(start, stop)
        found = np.arange(bounds[-1], dtype=np.int32)
        found -= np.repeat(bounds[:-1].astype(np.int32), np.diff(bounds))
        return found.reshape(stop - start, self._length)

    def _document_ids(self, start: int, stop: int) -> Array:
        """Return the number of each token's run in its sequence."""
        runs, bounds = self._runs(start, stop)
        return np.repeat(self.numbers[runs], np.diff(bounds)).reshape(stop - start, self._length)

    def _loss_mask(self, start: int, stop: int) -> Array:
        """Return False for padding, and True for other tokens."""
        found = np.ones((stop - start, self._length), np.bool_)
        self._pad(found, start, stop, value=False)
        return found

    def _labels(self, start: int, stop: int) -> Array:
        """Return the label of each token."""
        assert self.follows is not None
        runs, bounds = self._runs(start, stop)
        found = np.empty((stop - start, self._length), np.int64)
        found.reshape(-1)[:-1] = self.tokens[start:stop].reshape(-1)[1:]
        found.reshape(-1)[bounds[1:] - 1] = self.follows[runs]
        self._pad(found, start, stop, value=NO_LABEL)
        return found

    def _pad(self, found: Array, start: int, stop: int, *, value: int) -> None:
        """Set the padding of sequences [start, stop), if they have any, to ``value``."""
        runs, bounds = self._runs(start, stop)
        if runs.start <= self.padding < runs.stop:
            begin, end = bounds[self.padding - runs.start : self.padding - runs.start + 2].tolist()
            found.reshape(-1)[begin:end] = value
