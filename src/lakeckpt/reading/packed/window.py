"""This module decodes windows of packed sequences.

`SequenceDecoder.decode` is a pure function of a layout and one of its windows. The tokens of the window's fragments are
cut into documents; the first and the last document of a fragment may be a part of one. Where the window is shuffled,
the documents are put in the order of a keyed hash, and the sequences that they are cut into in the order of another
one: otherwise a long document would fill a batch. A document that a sequence cuts becomes several *runs*, and every run
is copied once to where it belongs.

A window needs nothing of other windows. Its last sequence is padded only at the end of an epoch. A row group in which a
window ends belongs to the next window, too, so it is decoded once for both. The threads are those of
`lakeckpt.reading.windows.threads`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.core.hashing import derive_key, permutation
from lakeckpt.core.order import Fragment, Window
from lakeckpt.errors import DataFileChanged
from lakeckpt.reading.columns.gather import copy_runs
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.packed.packing import Packing, documents_of, place_of
from lakeckpt.reading.packed.sequences import NO_LABEL, Sequences
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.threads import Threads
from lakeckpt.reading.windows.window import DecodedWindow

__all__ = ["SequenceDecoder"]

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Documents:
    """Documents of one fragment: ``tokens[bounds[i]:bounds[i + 1]]`` each. ``follow``: the label of its last token."""

    tokens: Array
    bounds: Int64Array
    follow: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """The runs of a window's sequences, in the order in which they are delivered; int64, shape (runs,) each."""

    places: Int64Array
    """The fragment of each; one past the last fragment is padding."""
    starts: Int64Array
    """Where it begins among the fragment's tokens."""
    lengths: Int64Array
    begins: Int64Array
    """Where it begins among the tokens of the window's sequences."""
    documents: Int64Array
    """The document of each, over all fragments; -1: padding."""
    ends: npt.NDArray[np.bool_]
    """Whether the run is the end of its document, or padding."""

    @property
    def padding(self) -> int:
        """Which run is padding; -1: none."""
        found = np.flatnonzero(self.documents < 0)
        return int(found[0]) if len(found) else -1


class SequenceDecoder:
    """Decodes windows of sequences of the documents that ``rows`` decodes; several threads may at once.

    ``counted`` has the tokens of each row group. ``rows_of`` (int64, shape (row groups,)): how many rows of each row
    group ``rows`` decodes. At most ``kept`` row groups that two windows share are kept for the second one.
    """

    def __init__(
        self,
        rows: RowGroupDecoder,
        packing: Packing,
        counted: RowSelection,
        rows_of: Int64Array,
        kept: int,
        threads: Threads,
    ) -> None:
        self.rows, self._packing, self._counted, self._rows_of = rows, packing, counted, rows_of
        self._threads = threads
        self._kept: OrderedDict[int, Future[tuple[Array, Int64Array]]] = OrderedDict()
        """Row groups that one of two windows has read, or is reading. The other window may be read first."""
        self._most_kept, self._lock = kept, threading.Lock()
        self.room_bytes: float = math.inf
        """See `Decoding`. No memory waits here."""

    def decode(self, window: Window) -> DecodedWindow:
        """Return the sequences of ``window``.

        Raises as `RowGroupDecoder.decode`; `NullValueError` for a null token; `DataFileChanged` for another number of
        tokens than was counted.
        """
        with self._threads.decoding if len(window.fragments) > 1 else contextlib.nullcontext():
            parts = self._threads.map(self._documents, window.fragments) or [self._nothing()]
        found = self._sequences(parts, _runs_of(parts, window, self._packing.length), window.rows)
        return DecodedWindow(columns=found.columns(), table=None, size_bytes=found.size_bytes)

    def groups(self, window: Window) -> list[int]:
        """Return the row groups that are read for ``window``, but for one in which the window before it ended."""
        return [part.group for part in window.fragments if not part.start]

    def _documents(self, part: Fragment) -> _Documents:
        """Return the documents of tokens [start, stop) of a row group, cut at both ends."""
        tokens, ends = self._whole(part)
        first = int(np.searchsorted(ends, part.start, side="right")) - 1
        last = int(np.searchsorted(ends, part.stop, side="left"))
        bounds = np.clip(ends[first : last + 1], part.start, part.stop)
        follow = np.full(len(bounds) - 1, NO_LABEL, np.int64)
        known = bounds[1:] < len(tokens)
        follow[known] = tokens[bounds[1:][known]]
        if self._packing.masks_ends:
            follow[bounds[1:] == ends[first + 1 : last + 1]] = NO_LABEL
        return _Documents(tokens=tokens[part.start : part.stop], bounds=bounds - part.start, follow=follow)

    def _whole(self, part: Fragment) -> tuple[Array, Int64Array]:
        """Return the tokens and the documents of a fragment's row group, decoded once for two windows that share it."""
        group = part.group
        if part.rows == self._counted.group_rows[group]:
            return self._decoded(group)
        with self._lock:
            found = self._kept.pop(group, None)
            if found is None:
                mine = self._kept[group] = Future()
                while len(self._kept) > self._most_kept:
                    self._kept.popitem(last=False)
        if found is not None:
            return found.result()  # of a thread that decodes it, and waits for nothing
        try:
            mine.set_result(self._decoded(group))
        except BaseException as error:
            mine.set_exception(error)
            with self._lock:
                self._kept.pop(group, None)
        return mine.result()

    def _decoded(self, group: int) -> tuple[Array, Int64Array]:
        index, packing, counted = self.rows.table.index, self._packing, int(self._counted.group_rows[group])
        table = self.rows.decode(group, 0, int(self._rows_of[group]))
        file, row_group = place = place_of(index, group)
        tokens, ends = documents_of(table, packing, place)
        if len(tokens) != counted:
            raise DataFileChanged(
                f"row group {row_group} of {file!r} has {len(tokens)} tokens in {packing.column!r}, and {counted} were "
                "counted: "
                "its statistics count nulls otherwise than Parquet's definition, or the file was changed. Write the "
                "file again"
            )
        return tokens, ends

    def _nothing(self) -> _Documents:
        tokens, ends = documents_of(self.rows.schema.empty_table(), self._packing, ("", 0))
        return _Documents(tokens=tokens, bounds=ends, follow=np.zeros(0, np.int64))

    def _sequences(self, parts: list[_Documents], runs: _Runs, count: int) -> Sequences:
        """Return the ``count`` sequences that ``runs`` make up."""
        tokens = self._tokens(parts, runs)
        return Sequences.of(
            tokens.reshape(count, self._packing.length),
            np.append(runs.begins, len(tokens)),
            padding=runs.padding,
            follows=self._follows(tokens, parts, runs) if self._packing.labels else None,
        )

    def _tokens(self, parts: list[_Documents], runs: _Runs) -> Array:
        sources = [part.tokens for part in parts]
        if runs.padding >= 0:
            sources.append(np.full(runs.lengths[runs.padding], self._packing.padding, sources[0].dtype))
        return copy_runs(sources, runs.places, runs.starts, runs.lengths) if len(runs.places) else sources[0][:0].copy()

    def _follows(self, tokens: Array, parts: list[_Documents], runs: _Runs) -> Int64Array:
        """Return the label of the last token of each run: the next token of its document, else of its sequence."""
        follows = np.append(np.concatenate([part.follow for part in parts]), NO_LABEL)[runs.documents]
        inside = np.flatnonzero(~runs.ends)
        for place, part in enumerate(parts):  # a document that the end of a sequence cuts
            mine = inside[runs.places[inside] == place]
            follows[mine] = part.tokens[runs.starts[mine] + runs.lengths[mine]]
        if not self._packing.masks_ends:
            after = runs.begins + runs.lengths
            goes_on = after % self._packing.length > 0
            if runs.padding >= 0:
                goes_on[runs.padding - 1] = False  # the run before padding ends its sequence's tokens
            follows[goes_on] = tokens[after[goes_on]]
        return follows


def _runs_of(parts: list[_Documents], window: Window, length: int) -> _Runs:
    """Return the runs that ``parts`` become in the sequences of ``window``."""
    starts = np.concatenate([part.bounds[:-1] for part in parts])
    lengths = np.concatenate([np.diff(part.bounds) for part in parts])
    places = np.repeat(np.arange(len(parts)), [len(part.follow) for part in parts])
    count = window.rows
    order, rank = np.arange(len(lengths)), np.arange(count)
    if window.key is not None:
        order = permutation(window.key, len(lengths))
        rank[permutation(derive_key("sequences", *window.key), count)] = np.arange(count)
    ends = np.cumsum(lengths[order])
    begins, total = ends - lengths[order], int(ends[-1]) if len(ends) else 0
    cuts = np.sort(np.concatenate([begins, np.arange(count) * length]))
    cuts = cuts[np.diff(cuts, prepend=-1) > 0]
    document = np.searchsorted(begins, cuts, side="right") - 1
    inner = cuts - begins[document]
    sizes = np.diff(np.append(cuts, total))
    is_end = cuts + sizes == ends[document]
    number = order[document]
    if total < count * length:  # padding is one more run
        cuts, sizes = np.append(cuts, total), np.append(sizes, count * length - total)
        number, inner, is_end = np.append(number, -1), np.append(inner, 0), np.append(is_end, True)
    sequence = cuts // length
    final = np.argsort(rank[sequence], kind="stable")
    return _Runs(
        places=np.append(places, len(parts))[number][final],
        starts=(np.append(starts, 0)[number] + inner)[final],
        lengths=sizes[final],
        begins=(rank[sequence] * length + cuts % length)[final],
        documents=number[final],
        ends=is_end[final],
    )
