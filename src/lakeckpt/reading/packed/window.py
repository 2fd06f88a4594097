"""This module decodes windows of packed sequences.

`SequenceDecoder.decode` is a pure function of a layout and one of its windows. The tokens of the window's fragments are
cut into documents; the first and the last document of a fragment may be a part of one. Where the window is shuffled,
the documents are put in the order of a keyed hash, and the sequences that they are cut into in the order of another
one: otherwise a long document would fill a batch. A window needs nothing of other windows, and its last sequence is
padded only at the end of an epoch. The threads are those of `lakeckpt.reading.windows.threads`.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from lakeckpt.core.hashing import derive_key, permutation
from lakeckpt.core.order import Fragment, Window
from lakeckpt.errors import DataFileChanged
from lakeckpt.reading.columns.gather import column_bytes, gather
from lakeckpt.reading.columns.ragged import Column, Ragged
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.packed.packing import Packing, documents_of, where
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.threads import Threads
from lakeckpt.reading.windows.window import DecodedWindow

__all__ = ["NO_LABEL", "SequenceDecoder"]

Array = npt.NDArray[np.generic]
Int64Array = npt.NDArray[np.int64]

NO_LABEL = -100
"""The label of a token that has none: ``ignore_index`` of torch's cross-entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pieces:
    """Documents of one fragment: ``tokens[bounds[i]:bounds[i + 1]]`` each. ``follow``: the label of its last token."""

    tokens: Array
    bounds: Int64Array
    follow: Array


class SequenceDecoder:
    """Decodes windows of sequences of the documents that ``rows`` decodes; several threads may at once.

    ``counted`` has the tokens of each row group. ``rows_of`` (int64, shape (row groups,)): how many rows of each row
    group ``rows`` decodes.
    """

    def __init__(
        self, rows: RowGroupDecoder, packing: Packing, counted: RowSelection, rows_of: Int64Array, threads: Threads
    ) -> None:
        self.rows, self._packing, self._counted, self._rows_of = rows, packing, counted, rows_of
        self._threads = threads
        self.room_bytes: float = math.inf
        """Ignored: the memory of a window is not used again."""

    def decode(self, window: Window) -> DecodedWindow:
        """Return the sequences of ``window``.

        Raises as `RowGroupDecoder.decode`; `NullValueError` for a null token; `DataFileChanged` for another number of
        tokens than was counted.
        """
        with self._threads.decoding if len(window.fragments) > 1 else contextlib.nullcontext():
            parts = self._threads.map(self._pieces, window.fragments) or [self._nothing()]
        lists: list[Column[Array]] = [Ragged(values=part.tokens, offsets=part.bounds) for part in parts]
        documents = sum(len(part.follow) for part in parts)
        order = np.arange(documents) if window.key is None else permutation(window.key, documents)
        packed = gather(lists, order)
        assert isinstance(packed, Ragged)
        follow = np.concatenate([part.follow for part in parts])[order]
        columns = self._columns(np.asarray(packed.values), np.asarray(packed.offsets), follow, window)
        return DecodedWindow(columns=columns, table=None, size_bytes=column_bytes(columns))

    def _pieces(self, part: Fragment) -> _Pieces:
        """Return the documents of tokens [start, stop) of a row group, cut at both ends."""
        table = self.rows.decode(part.group, 0, int(self._rows_of[part.group]))
        index, packing = self.rows.table.index, self._packing
        tokens, ends = documents_of(table, packing, partial(where, index, part.group))
        if len(tokens) != self._counted.group_rows[part.group]:
            raise DataFileChanged(
                f"{where(index, part.group)} has {len(tokens)} tokens in {packing.column!r}, and "
                f"{self._counted.group_rows[part.group]} were counted: its statistics count nulls otherwise than "
                "Parquet's definition, or the file was changed. Write the file again"
            )
        first = int(np.searchsorted(ends, part.start, side="right")) - 1
        last = int(np.searchsorted(ends, part.stop, side="left"))
        bounds = np.clip(ends[first : last + 1], part.start, part.stop)
        after = np.append(tokens[part.start + 1 : part.stop + 1], NO_LABEL if part.stop == len(tokens) else [])
        follow = after.astype(tokens.dtype)[bounds[1:] - 1 - part.start]
        if packing.masks_ends:
            follow[bounds[1:] == ends[first + 1 : last + 1]] = NO_LABEL
        return _Pieces(tokens=tokens[part.start : part.stop], bounds=bounds - part.start, follow=follow)

    def _nothing(self) -> _Pieces:
        tokens, ends = documents_of(self.rows.schema.empty_table(), self._packing, str)
        return _Pieces(tokens=tokens, bounds=ends, follow=tokens)

    def _columns(self, tokens: Array, bounds: Int64Array, follow: Array, window: Window) -> dict[str, Column[Array]]:
        """Return the columns of sequences of ``tokens``, whose documents begin and end at ``bounds``."""
        length, count = self._packing.length, window.rows
        size = count * length
        if window.key is None:
            order = np.arange(count)
        else:
            order = permutation(derive_key("sequences", *window.key), count)

        def shaped(values: Array, padding: int) -> Array:
            if len(values) < size:
                values = np.concatenate([values, np.full(size - len(values), padding, values.dtype)])
            whole = values.reshape(count, length)
            if window.key is None:
                return whole if whole.flags.writeable else whole.copy()  # Arrow's memory is not the caller's to write
            return whole[order]

        begins = np.union1d(np.append(bounds, size), np.arange(count) * length)
        lengths = np.diff(begins)
        places = np.arange(size, dtype=np.int32) - np.repeat(begins[:-1].astype(np.int32), lengths)
        numbers = np.arange(len(lengths)) - np.searchsorted(begins, begins[:-1] // length * length)
        columns: dict[str, Column[Array]] = {
            "tokens": shaped(tokens, self._packing.padding),
            "position_ids": shaped(places, 0),
            "document_ids": shaped(np.repeat(numbers.astype(np.int32), lengths), 0),
            "loss_mask": shaped(np.arange(size) < len(tokens), 0),
        }
        if self._packing.labels:
            columns["labels"] = shaped(self._labels(tokens, bounds, follow), NO_LABEL)
        return columns

    def _labels(self, tokens: Array, bounds: Int64Array, follow: Array) -> Array:
        """Return the label of each token: the next token of its document, else of its sequence."""
        labels = np.append(tokens[1:], follow[-1:]).astype(np.int64)  # torch's cross-entropy takes no other type
        ends = bounds[1:] - 1
        named = np.full(len(ends), True) if self._packing.masks_ends else bounds[1:] % self._packing.length == 0
        labels[ends[named]] = follow[named]
        return labels
