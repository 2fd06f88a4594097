"""This module decodes windows of packed sequences.

`SequenceDecoder.decode` is a pure function of a layout and one of its windows. The tokens of the window's fragments are
cut into documents, and these into the runs of its sequences (`lakeckpt.reading.packed.runs`). Every run is copied once
to where it belongs. In order and without labels, the tokens stay where they are: one copy of the tokens of several row
groups, none of one. `SequenceDecoder.name` says which documents these are.

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
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.core.order import Fragment, Window
from lakeckpt.errors import DataFileChanged
from lakeckpt.reading.columns.gather import copy_runs
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.packed.documents import Documents, documents_of
from lakeckpt.reading.packed.packing import Packing
from lakeckpt.reading.packed.runs import DocumentRuns, FragmentDocuments, TokenRuns, cuts_of, part_of, runs_of
from lakeckpt.reading.packed.sequences import NO_LABEL, Sequences
from lakeckpt.reading.packed.token_counts import NUM_TOKENS, place_of
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.threads import Threads
from lakeckpt.reading.windows.window import DecodedWindow

__all__ = ["SequenceDecoder"]

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]


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
        self._kept: OrderedDict[int, Future[Documents]] = OrderedDict()
        """Row groups that one of two windows has read, or is reading. The other window may be read first."""
        self._most_kept, self._lock = kept, threading.Lock()
        self.room_bytes: float = math.inf
        """See `Decoding`: row groups are kept for a second window while they fit into it."""

    def decode(self, window: Window) -> DecodedWindow:
        """Return the sequences of ``window``.

        Raises as `RowGroupDecoder.decode`; `NullValueError` for a null token; `DataFileChanged` for another number of
        tokens than was counted.
        """
        parts, packing, whole = self._parts(window), self._packing, window.whole
        if window.key is None and not packing.labels:
            found = self._in_order(parts, whole.rows)
        else:
            found = self._sequences(parts, runs_of(parts, whole, packing.length), whole.rows)
        if window.outer is not None:
            found = found.part(window.start - whole.start, window.stop - whole.start)
        return DecodedWindow(columns=found.columns(packing.columns), table=None, size_bytes=found.size_bytes)

    def name(self, window: Window) -> DocumentRuns:
        """Return which documents stand in the sequences of ``window``. Raises as `decode`."""
        parts, length = self._parts(window), self._packing.length
        return DocumentRuns.of(runs_of(parts, window, length), parts, window, length)

    def groups(self, window: Window) -> list[int]:
        """Return the row groups that are read for ``window``, but for one in which the window before it ended."""
        return [part.group for part in window.fragments if not part.start]

    def kept_bytes(self) -> int:
        """Return the bytes of the row groups that are kept for a second window."""
        return _bytes_of(self._kept)

    def release(self) -> None:
        """Keep no row group any more. It takes no lock: the garbage collector may call it in a thread that has it."""
        self._kept = OrderedDict()

    def _parts(self, window: Window) -> list[FragmentDocuments]:
        with self._threads.decoding if len(window.fragments) > 1 else contextlib.nullcontext():
            return self._threads.map(self._part, window.fragments) or [self._nothing()]

    def _part(self, part: Fragment) -> FragmentDocuments:
        """Return the documents of tokens [start, stop) of a row group, cut at both ends."""
        return part_of(self._whole(part), part, labels=self._packing.labels, masks_ends=self._packing.masks_ends)

    def _whole(self, part: Fragment) -> Documents:
        """Return the documents of a fragment's row group, decoded once for two windows that share it."""
        group = part.group
        if part.rows == self._counted.group_rows[group]:
            return self._decoded(group)
        with self._lock:
            kept = self._kept
            found = kept.pop(group, None)
            if found is None:
                mine = kept[group] = Future()
                while len(kept) > self._most_kept:
                    kept.popitem(last=False)
        if found is not None:
            return found.result()  # of a thread that decodes it, and waits for nothing
        try:
            mine.set_result(self._decoded(group))
        except BaseException as error:
            mine.set_exception(error)
            with self._lock:
                kept.pop(group, None)
        with self._lock:
            while kept and _bytes_of(kept) > self.room_bytes:
                kept.popitem(last=False)
        return mine.result()

    def _decoded(self, group: int) -> Documents:
        index, packing, counted = self.rows.table.index, self._packing, int(self._counted.group_rows[group])
        table = self.rows.decode(group, 0, int(self._rows_of[group]))
        file, row_group = place = place_of(index, group)
        found = documents_of(table, packing, place)
        if len(found.tokens) != counted:
            raise DataFileChanged(
                f"row group {row_group} of {file!r} has {len(found.tokens)} tokens in {packing.column!r}, and "
                f"{counted} were counted: its statistics count nulls otherwise than Parquet's definition, its column "
                f"{NUM_TOKENS!r} has other numbers, or the file was changed. Write the file again"
            )
        return found

    def _nothing(self) -> FragmentDocuments:
        none = documents_of(self.rows.schema.empty_table(), self._packing, ("", 0))
        rows = none.rows
        return FragmentDocuments(
            group=0, tokens=none.tokens, bounds=none.ends, origins=rows, rows=rows, follows=rows, goes_on=False
        )

    def _in_order(self, parts: list[FragmentDocuments], count: int) -> Sequences:
        """Return the ``count`` sequences of the tokens of ``parts`` as they stand: a view of a single part."""
        length, starts = self._packing.length, np.cumsum([0, *(len(part.tokens) for part in parts)])
        begins = [part.bounds[:-1] + start for part, start in zip(parts, starts[:-1], strict=True)]
        bounds, _ = cuts_of(np.concatenate(begins), np.arange(count) * length)
        total, sources = int(starts[-1]), [part.tokens for part in parts]
        paddings = np.arange(0)
        if total < count * length:
            paddings, bounds = np.array([len(bounds)]), np.append(bounds, total)
            sources.append(np.full(count * length - total, self._packing.padding, sources[0].dtype))
        tokens = np.concatenate(sources) if len(sources) > 1 else sources[0]
        bounds = np.append(bounds, count * length)
        return Sequences(tokens.reshape(count, length), bounds, paddings=paddings, follows=None)

    def _sequences(self, parts: list[FragmentDocuments], runs: TokenRuns, count: int) -> Sequences:
        """Return the ``count`` sequences that ``runs`` make up."""
        tokens = self._tokens(parts, runs)
        return Sequences(
            tokens.reshape(count, self._packing.length),
            np.append(runs.begins, len(tokens)),
            paddings=np.flatnonzero(runs.documents < 0),
            follows=self._follows(tokens, parts, runs) if self._packing.labels else None,
        )

    def _tokens(self, parts: list[FragmentDocuments], runs: TokenRuns) -> Array:
        sources = [part.tokens for part in parts]
        if runs.padding >= 0:
            sources.append(np.full(runs.lengths[runs.padding], self._packing.padding, sources[0].dtype))
        return copy_runs(sources, runs.places, runs.starts, runs.lengths) if len(runs.places) else sources[0][:0].copy()

    def _follows(self, tokens: Array, parts: list[FragmentDocuments], runs: TokenRuns) -> Int64Array:
        """Return the label of the last token of each run: the next token of its document, else of its sequence."""
        known = [part.follows for part in parts if part.follows is not None]
        follows = np.append(np.concatenate(known), NO_LABEL)[runs.documents]
        inside = np.flatnonzero(~runs.ends)
        for place, part in enumerate(parts):  # a document that the end of a sequence cuts
            mine = inside[runs.places[inside] == place]
            follows[mine] = part.tokens[runs.starts[mine] + runs.lengths[mine]]
        if not self._packing.masks_ends:
            after = runs.begins + runs.lengths
            is_inside = after % self._packing.length > 0
            if runs.padding >= 0:
                is_inside[runs.padding - 1] = False  # the run before padding ends its sequence's tokens
            last = np.cumsum([len(part.rows) for part in parts]) - 1
            cut = last[[part.goes_on for part in parts]]  # a window or a lane cuts these documents
            is_inside &= ~(runs.ends & np.isin(runs.documents, cut))
            follows[is_inside] = tokens[after[is_inside]]
        return follows


def _bytes_of(kept: OrderedDict[int, Future[Documents]]) -> int:
    done = [one for one in list(kept.values()) if one.done() and one.exception() is None]
    return sum(one.result().size_bytes for one in done)
