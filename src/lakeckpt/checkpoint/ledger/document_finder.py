"""This module names the documents of packed sequences.

The documents of a sequence depend on their lengths, which the table has and a run does not. So `DocumentFinder` reads
the lists of the windows that it names. It reads the version of the table that the run pinned, also if the table has a
newer version, and each file must still have the footer that the run recorded.

The module never imports torch, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lakeckpt.checkpoint.consumed.rows import RowOrder
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.order import EpochLayout, Window
from lakeckpt.errors import ConfigError
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.packed.packing import DTYPES, Packing
from lakeckpt.reading.packed.runs import DocumentRuns
from lakeckpt.reading.packed.token_counts import place_of
from lakeckpt.reading.packed.window import SequenceDecoder
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.threads import Threads

__all__ = ["DocumentFinder", "DocumentTokens"]

_WINDOWS_KEPT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentTokens:
    """Tokens [start, stop) of a document, which stand one after another in a packed sequence."""

    epoch: int
    sequence: int
    """The number of the sequence in the epoch."""
    file: str
    """Path of the file, relative to the table."""
    row_group: int
    """Its ordinal in the file."""
    row: int
    """The row of the document, counted from the start of the row group as the file stores it."""
    start: int
    """Counted from the start of the document; the tokens that ``pack(before=…, after=…)`` adds count, too."""
    stop: int


class DocumentFinder:
    """Names documents of ``table`` that `lakeckpt.pack` packed with these arguments.

    ``reader``: the name of the reader that read them; None: the only one of the run that reads packed sequences.
    """

    def __init__(
        self,
        table: Table,
        *,
        column: str,
        before: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
        reader: str | None = None,
    ) -> None:
        self.reader = reader
        self._table, self._column, self._before, self._after = table, column, before, after
        self._decoder = lru_cache(maxsize=None)(self._new_decoder)
        self._runs = lru_cache(maxsize=_WINDOWS_KEPT)(self._named)

    def of(self, order: RowOrder, layout: EpochLayout, positions: Intervals) -> list[DocumentTokens]:
        """Return what stands in the sequences at ``positions`` of ``layout``, which is one of ``order``.

        The order is that in which the tokens were delivered. Padding is not named.

        Raises `ConfigError` if ``order`` is not of documents packed so, `TableVersionGone` and `DataFileChanged`
        if the table does not have the files of the run, and what decoding raises.
        """
        found: list[DocumentTokens] = []
        for low, high in positions.pairs():
            for window in layout.windows(low, high):
                found += _between(low, high, self._runs(order, window), order, layout.epoch)
        return found

    def _named(self, order: RowOrder, window: Window) -> DocumentRuns:
        return self._decoder(order).name(window)

    def _new_decoder(self, order: RowOrder) -> SequenceDecoder:
        counted = order.selection
        assert counted is not None
        packed, _, kept = counted.expression.partition("/")
        if kept:
            raise ConfigError(
                f"this run reads {counted.text}: which rows the filter keeps is known to the script that has the "
                "filter, and documents cannot be named without it. Leave --table out"
            )
        packing = next((one for one in self._packings(order.unit) if one.digest == packed), None)
        if packing is None:
            raise ConfigError(
                f"this run reads {counted.text}, and not with column {self._column!r}, before={list(self._before)} and "
                f"after={list(self._after)}: give --column, --before and --after as pack(…) got them"
            )
        table = self._table.at(order.index)
        packing.check(table.schema)
        rows = RowGroupDecoder(table, [self._column], use_threads=False)
        return SequenceDecoder(rows, packing, counted, order.index.group_rows, 1, Threads(1))

    def _packings(self, length: int) -> Iterator[Packing]:
        """Yield how the run may have packed the column: lists, or bytes of each type."""
        for dtype in (None, *DTYPES):
            yield Packing(column=self._column, length=length, before=self._before, after=self._after, dtype=dtype)


def _between(low: int, high: int, runs: DocumentRuns, order: RowOrder, epoch: int) -> list[DocumentTokens]:
    """Return the runs in sequences [low, high)."""
    found = []
    for run in np.flatnonzero((low <= runs.positions) & (runs.positions < high)).tolist():
        group, row = runs.groups.item(run), runs.rows.item(run)
        surviving = order.index.surviving(group)
        file, row_group = place_of(order.index, group)
        found.append(
            DocumentTokens(
                epoch=epoch,
                sequence=runs.positions.item(run),
                file=file,
                row_group=row_group,
                row=row if surviving is None else np.flatnonzero(surviving).item(row),
                start=runs.starts.item(run),
                stop=runs.stops.item(run),
            )
        )
    return found
