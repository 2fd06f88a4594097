"""This module packs whole documents into sequences.

The documents of a window are put in the order of a keyed hash. `best_fit` then gives each of them to a sequence: from
the longest document to the shortest, each goes to the sequence with the least free space that holds it (best fit
decreasing). A document that is longer than a sequence is cut into full sequences and a rest, which is packed like a
document; or it is dropped. The rest of a sequence is padding. At last the sequences are put in the order of another
keyed hash. So the sequences of a window are a pure function of its documents and its key.

A position of the order is a row group here, and all sequences of a window are those of its first position. A window
needs nothing of other windows. The module logs dropped documents, and starts no threads; those that decode are of
`lakeckpt.reading.windows.threads`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lakeckpt.core.hashing import derive_key, permutation
from lakeckpt.core.order import Fragment, Window
from lakeckpt.reading.columns.gather import copy_runs
from lakeckpt.reading.packed.documents import Documents, documents_of
from lakeckpt.reading.packed.packing import Packing
from lakeckpt.reading.packed.sequences import NO_LABEL, Sequences
from lakeckpt.reading.packed.token_counts import place_of
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.threads import Threads
from lakeckpt.reading.windows.window import DecodedWindow

__all__ = ["COLUMN", "WholeDecoder", "best_fit", "packed"]

COLUMN = "sequences"
"""The one column of a window: the `Sequences` at its first position, and nothing at the others."""
_LOG = logging.getLogger("lakeckpt")

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]


def best_fit(lengths: Int64Array, size: int) -> Int64Array:
    """Return the bin of each thing: int64, shape (n,), from 0 to the number of bins.

    ``lengths`` (int64, shape (n,)) are from 1 to ``size``, and no bin holds more than ``size``. Best fit decreasing;
    of things of one length the first is taken first, of bins of one free space the one that came to it last.

    >>> best_fit(np.array([3, 6, 5, 2, 4]), 10).tolist()
    [1, 0, 1, 1, 0]
    """
    order = np.argsort(-lengths, kind="stable")
    spaces = list[int]()  # that bins have, ascending
    having = dict[int, list[int]]()
    bins, count = list[int](), 0
    for length in lengths[order].tolist():
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            bins.append(having[space].pop())
            if not having[space]:
                del spaces[at], having[space]
        else:
            space = size
            bins.append(count)
            count += 1
        if space > length:
            if space - length not in having:
                insort(spaces, space - length)
            having.setdefault(space - length, []).append(bins[-1])
    found = np.empty(len(lengths), np.int64)
    found[order] = bins
    return found


def packed(parts: Sequence[Documents], packing: Packing, key: tuple[int, int] | None) -> Sequences:
    """Return the sequences of the documents of ``parts``, at least one; ``key`` None: they are not shuffled."""
    lengths = np.concatenate([np.diff(part.ends) for part in parts])
    order = np.arange(len(lengths)) if key is None else permutation(key, len(lengths))
    if packing.drops_long:
        order = order[lengths[order] <= packing.length]
    documents, inner = _pieces(lengths, order, packing.length)
    sizes = np.minimum(lengths[documents] - inner, packing.length)
    places = _places(best_fit(sizes, packing.length), key)
    rooms = packing.length - np.bincount(places, sizes).astype(np.int64)
    padded = np.flatnonzero(rooms)
    final = np.argsort(np.concatenate([places, padded]), kind="stable")  # padding is the last run of its sequence
    documents, inner = (_appended(one, padded, value) for one, value in ((documents, -1), (inner, 0)))
    return _made(parts, packing, documents[final], inner[final], np.append(sizes, rooms[padded])[final])


def _pieces(lengths: Int64Array, order: Int64Array, size: int) -> tuple[Int64Array, Int64Array]:
    """Return the document of each piece, and where the piece begins in it; only long documents have several."""
    counts = -(-lengths[order] // size)
    firsts = np.cumsum(counts) - counts
    return np.repeat(order, counts), (np.arange(counts.sum()) - np.repeat(firsts, counts)) * size


def _places(bins: Int64Array, key: tuple[int, int] | None) -> Int64Array:
    """Return the sequence of each piece; unshuffled, in the order of their first pieces."""
    numbers, firsts = np.unique(bins, return_index=True)
    delivered = np.argsort(firsts) if key is None else permutation(derive_key("sequences", *key), len(numbers))
    places = np.empty(len(numbers), np.int64)
    places[delivered] = np.arange(len(numbers))
    return places[bins]


def _appended(runs: Int64Array, padded: Int64Array, value: int) -> Int64Array:
    return np.append(runs, np.full(len(padded), value))


def _made(
    parts: Sequence[Documents], packing: Packing, documents: Int64Array, inner: Int64Array, sizes: Int64Array
) -> Sequences:
    """Return the sequences that consist of runs: ``sizes`` tokens from ``inner`` on of ``documents``; -1: padding."""
    counts = [len(part.rows) for part in parts]
    sources = [part.tokens for part in parts]
    fill = np.full(packing.length, packing.padding, sources[0].dtype)
    begins = np.concatenate([*(part.ends[:-1] for part in parts), [0]])
    stops = np.concatenate([*(part.ends[1:] for part in parts), [0]])
    which = np.append(np.repeat(np.arange(len(parts)), counts), len(parts))[documents]
    starts = begins[documents] + inner
    tokens = copy_runs([*sources, fill], which, starts, sizes) if len(sizes) else sources[0][:0].copy()
    follows = None
    if packing.labels:
        follows = np.full(len(sizes), NO_LABEL, np.int64)
        goes_on = (documents >= 0) & (starts + sizes < stops[documents])
        for place, source in enumerate(sources):
            mine = np.flatnonzero(goes_on & (which == place))
            follows[mine] = source[starts[mine] + sizes[mine]]
    return Sequences(
        tokens.reshape(-1, packing.length),
        np.append(0, np.cumsum(sizes)),
        paddings=np.flatnonzero(documents < 0),
        follows=follows,
    )


class _First:
    """The column of a window whose sequences are all at the first position."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences

    def __getitem__(self, rows: slice) -> list[Sequences | tuple[()]]:
        return [() if row else self._sequences for row in range(rows.start, rows.stop)]


class WholeDecoder:
    """Decodes windows of row groups of documents that ``rows`` decodes; several threads may at once.

    ``rows_of`` (int64, shape (row groups,)): how many rows of each row group ``rows`` decodes.
    """

    def __init__(self, rows: RowGroupDecoder, packing: Packing, rows_of: Int64Array, threads: Threads) -> None:
        self.rows, self._packing, self._rows_of, self._threads = rows, packing, rows_of, threads
        self.room_bytes: float = math.inf
        """See `Decoding`. No memory waits here."""

    def decode(self, window: Window) -> DecodedWindow:
        """Return the sequences of ``window``. Raises as `RowGroupDecoder.decode`; `NullValueError` for a null token."""
        with self._threads.decoding if len(window.fragments) > 1 else contextlib.nullcontext():
            parts = self._threads.map(self._documents, window.fragments) or [self._nothing()]
        if self._packing.drops_long:
            self._report(parts, window)
        found = packed(parts, self._packing, window.key)
        columns = {COLUMN: cast("Array", _First(found))}
        return DecodedWindow(columns=columns, table=None, size_bytes=found.size_bytes)

    def groups(self, window: Window) -> list[int]:
        """Return the row groups that are read for ``window``."""
        return [part.group for part in window.fragments]

    def kept_bytes(self) -> int:
        """Return 0: nothing is kept for later windows."""
        return 0

    def release(self) -> None:
        """Do nothing: nothing is kept."""

    def _documents(self, part: Fragment) -> Documents:
        table = self.rows.decode(part.group, 0, int(self._rows_of[part.group]))
        return documents_of(table, self._packing, place_of(self.rows.table.index, part.group))

    def _nothing(self) -> Documents:
        return documents_of(self.rows.schema.empty_table(), self._packing, ("", 0))

    def _report(self, parts: Sequence[Documents], window: Window) -> None:
        """Log how many documents of ``window`` are dropped."""
        length = self._packing.length
        dropped = sum(int((np.diff(part.ends) > length).sum()) for part in parts)
        if dropped:
            every = sum(len(part.rows) for part in parts)
            _LOG.info(
                "%d of %d documents are dropped, being longer than %d tokens: row groups %s of the table",
                dropped,
                every,
                length,
                ", ".join(map(str, self.groups(window))),
            )
