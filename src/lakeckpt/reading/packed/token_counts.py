"""This module counts the tokens of each row group of a table whose documents are packed into sequences.

A row group's share of the order is the number of its tokens. Of lists, the footer states it: the values of the list's
elements, less the nulls among them, which stand for empty lists and null lists. Of bytes, the table's integer column
`NUM_TOKENS` has the tokens of each row, if there is one. Else data are read, and also of row groups with deleted rows
or a filter, and of row groups whose footer lacks statistics.

`count_tokens` starts and joins the threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.core.hashing import hash64
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import THREADS_LOCAL, THREADS_REMOTE, Table
from lakeckpt.progress import Progress
from lakeckpt.reading.filters.decoder import FilteredDecoder
from lakeckpt.reading.filters.row_filter import RowFilter
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.packed.documents import lengths_of
from lakeckpt.reading.packed.packing import Packing
from lakeckpt.reading.windows.decode import RowGroupDecoder

__all__ = ["NUM_TOKENS", "count_tokens", "place_of"]

Int64Array = npt.NDArray[np.int64]

NUM_TOKENS = "num_tokens"
"""A column of the number of each document's tokens, as many pre-tokenized corpora have it."""


def count_tokens(
    table: Table,
    packing: Packing,
    kept: tuple[RowFilter, RowSelection] | None = None,
    *,
    progress: Progress | None = None,
) -> RowSelection:
    """Return how many tokens each row group of ``table`` has, those that ``packing`` adds included.

    With ``kept``, a filter and the rows that it keeps, only the documents of these rows count. Raises as
    `RowGroupDecoder.decode` does, and `NullValueError`. Of whole documents nothing is counted: each row group that has
    rows counts as 1, because a position is a row group then. ``progress`` counts files.
    """
    packing.check(table.schema)
    index = table.index
    if packing.whole:
        rows = index.group_rows if kept is None else kept[1].group_rows
        return _selection(table, packing, kept, (rows > 0).astype(np.int64))
    threads = THREADS_LOCAL if isinstance(table.storage, LocalStorage) else THREADS_REMOTE
    counts = np.zeros(len(index.group_rows), np.int64)
    with closing(_decoder(table, packing, kept)) as decoder, ThreadPoolExecutor(threads) as pool:
        counter = _Counter(index, packing, kept, decoder)
        for file, found in enumerate(pool.map(counter.count_file, range(len(index.paths)))):
            counts[index.first_group[file] : index.first_group[file + 1]] = found
            if progress is not None:
                progress(file + 1, len(index.paths), "files counted")
    return _selection(table, packing, kept, counts)


def _selection(
    table: Table, packing: Packing, kept: tuple[RowFilter, RowSelection] | None, counts: Int64Array
) -> RowSelection:
    return RowSelection(
        table=table.index.digest,
        text=str(packing) if kept is None else f"{packing} of the rows with {kept[0]}",
        expression="/".join([packing.digest, *([] if kept is None else [kept[0].digest])]),
        pyarrow=pa.__version__,
        group_rows=counts,
        group_digests=_digests(counts, packing, kept),
        unit=1 if packing.whole else packing.length,
    )


def _decoder(table: Table, packing: Packing, kept: tuple[RowFilter, RowSelection] | None) -> RowGroupDecoder:
    if kept is not None:
        return FilteredDecoder(table, [_counted_column(table.schema, packing)], *kept)
    return RowGroupDecoder(table, [_counted_column(table.schema, packing)], use_threads=False)


def _counted_column(schema: pa.Schema, packing: Packing) -> str:
    """Return the column that is read to count tokens."""
    has_counts = NUM_TOKENS in schema.names and pa.types.is_integer(schema.field(NUM_TOKENS).type)
    return NUM_TOKENS if packing.dtype is not None and has_counts else packing.column


def _digests(
    counts: Int64Array, packing: Packing, kept: tuple[RowFilter, RowSelection] | None
) -> npt.NDArray[np.uint64]:
    """Return a number for each row group that differs between packings, counts and kept rows; 0: no tokens."""
    key = int(packing.digest[:16], 16), int(packing.digest[16:], 16)
    words = counts.astype(np.uint64)
    if kept is not None:
        words ^= kept[1].group_digests
    return np.where(counts > 0, hash64(key, words) | np.uint64(1), np.uint64(0))


@dataclass(frozen=True, slots=True)
class _Counter:
    index: TableIndex
    packing: Packing
    kept: tuple[RowFilter, RowSelection] | None
    decoder: RowGroupDecoder

    def count_file(self, file: int) -> list[int]:
        """Return the tokens of each row group of a file."""
        return [self._count(group) for group in range(*self.index.first_group[file : file + 2].tolist())]

    def _count(self, group: int) -> int:
        rows, packing = self.index.group_rows if self.kept is None else self.kept[1].group_rows, self.packing
        if not rows[group]:
            return 0
        if packing.dtype is None and rows[group] == self.index.stored_rows[group]:
            stated = self.decoder.elements(group, packing.column)
            if stated is not None:
                values, nulls = stated  # each null stands for a list without elements
                return int(values - nulls + packing.added * (rows[group] - nulls))
        table = self.decoder.decode(group, 0, int(rows[group]))
        if table.schema.names == [packing.column]:
            lengths = lengths_of(table, packing, place_of(self.index, group))
        else:
            lengths = pc.fill_null(table.column(0), 0).to_numpy().astype(np.int64)
        return int(lengths.sum() + packing.added * np.count_nonzero(lengths))


def place_of(index: TableIndex, group: int) -> tuple[str, int]:
    """Return the file of a row group of the table, and its number there."""
    file, row_group = index.group(group)
    return index.paths[file], row_group
