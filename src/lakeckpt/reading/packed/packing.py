"""This module describes how documents are packed into sequences, and counts the tokens of each row group.

A document is one row of a list column. The tokens of the documents of an epoch, one document after another, are cut
into sequences of equal length. So a row group's share of the order is the number of its tokens, which its footer
states: the values of the list's elements, less the nulls among them, which stand for empty lists and null lists. Data
are read only of row groups with deleted rows or a filter, and of row groups whose footer lacks statistics.

`count_tokens` starts and joins the threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.core.hashing import hash64
from lakeckpt.errors import NullValueError, SchemaError, shown
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import THREADS_LOCAL, THREADS_REMOTE, Table
from lakeckpt.progress import Progress
from lakeckpt.reading.filters.decoder import FilteredDecoder
from lakeckpt.reading.filters.row_filter import RowFilter
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.windows.decode import RowGroupDecoder

__all__ = ["Documents", "Packing", "count_tokens", "documents_of", "dtype_of", "place_of"]

Int64Array = npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How documents become sequences. `lakeckpt.pack` checks and documents the values."""

    column: str
    """The list column that holds the tokens of a document."""
    length: int
    """Tokens of a sequence."""
    before: tuple[int, ...] = ()
    """Tokens that are put before each document that has tokens."""
    after: tuple[int, ...] = ()
    """Tokens that are put after each document that has tokens."""
    padding: int = 0
    """The token that fills up the last sequence of an epoch."""
    labels: bool = False
    """True if sequences have labels."""
    masks_ends: bool = True
    """True if the last token of a document has no label."""
    whole: bool = False
    """True if documents stand in sequences as a whole (`lakeckpt.reading.packed.whole`), and not one after another."""
    drops_long: bool = False
    """True if whole documents that are longer than a sequence are dropped. False: they are cut."""

    def __str__(self) -> str:
        if not self.whole:
            return f"sequences of {self.length} tokens of {self.column!r}"
        longer = "dropped" if self.drops_long else "cut"
        added = f" between {self.before} and {self.after}" if self.added else ""
        return f"whole documents of {self.column!r}{added} in sequences of {self.length} tokens, longer ones {longer}"

    @property
    def added(self) -> int:
        """How many tokens each document that has tokens gets beside its own."""
        return len(self.before) + len(self.after)

    @property
    def digest(self) -> str:
        """BLAKE2b-128 (hex) of all that decides which tokens stand in which sequence."""
        text = repr((self.column, self.length, self.before, self.after))
        if self.whole:
            text += f" whole, drops {self.drops_long}"
        return blake2b(text.encode(), digest_size=16, person=b"lakeckpt-pack1").hexdigest()

    def check(self, schema: pa.Schema) -> None:
        """Raise `SchemaError` where the column is no list of integers that 64 signed bits hold."""
        if self.column not in schema.names:
            names = ", ".join(schema.names[:10])
            raise SchemaError(f"the table has no column {shown(self.column)} to pack; it has {names}")
        kind = schema.field(self.column).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not pa.types.is_integer(kind.value_type) or kind.value_type == pa.uint64():
            raise SchemaError(
                f"column {self.column!r} is {kind}, and packing needs a list of integers of at most 63 bits: name the "
                "column that holds the tokens of a document, pack(…, column=…)"
            )


def dtype_of(kind: pa.DataType) -> np.dtype[Any]:
    """Return the type of delivered tokens: int32, or int64 where 32 signed bits do not hold the stored type."""
    fits = kind.value_type.bit_width < 32 or kind.value_type == pa.int32()
    return np.dtype(np.int32 if fits else np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of a row group that have tokens."""

    tokens: Array
    """Shape (tokens,): those of one document after another. The tokens that `Packing` adds are in their places."""
    ends: Int64Array
    """Where each document begins, and their end: int64, shape (documents + 1,)."""
    rows: Int64Array
    """The row of each: int64, shape (documents,)."""

    @property
    def size_bytes(self) -> int:
        """The bytes of the arrays."""
        return int(self.tokens.nbytes + self.ends.nbytes + self.rows.nbytes)


def documents_of(table: pa.Table, packing: Packing, place: tuple[str, int]) -> Documents:
    """Return the documents of ``table``.

    The table holds a row group: ``place`` is its file, and its number there. Raises `NullValueError` for a null token.
    """
    kind = table.schema.field(packing.column).type
    chunks = table.column(packing.column).chunks
    column = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks or [pa.array([], kind)])
    values = column.flatten()
    if values.null_count:
        file, row_group = place
        raise NullValueError(
            f"column {packing.column!r} has {values.null_count} null tokens in row group {row_group} of the data file "
            f"{file!r}: packing needs a value for each token. Write the lists without nulls",
            file=file,
            row_group=row_group,
            column=packing.column,
        )
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    tokens = values.to_numpy(zero_copy_only=False).astype(dtype_of(kind), copy=False)
    rows = np.flatnonzero(lengths)
    ends = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths[rows], out=ends[1:])
    if packing.added:
        tokens, ends = _with_added(tokens, ends, packing)
    return Documents(tokens=tokens, ends=ends, rows=rows)


def _with_added(tokens: Array, ends: Int64Array, packing: Packing) -> tuple[Array, Int64Array]:
    """Put the tokens before and after each document into their places."""
    documents = np.arange(len(ends) - 1)
    wider = ends + np.arange(len(ends)) * packing.added
    found = np.empty(int(wider[-1]), tokens.dtype)
    shift = documents * packing.added + len(packing.before)
    found[np.arange(len(tokens)) + np.repeat(shift, np.diff(ends))] = tokens
    for place, token in enumerate(packing.before):
        found[wider[:-1] + place] = token
    for place, token in enumerate(reversed(packing.after), 1):
        found[wider[1:] - place] = token
    return found, wider


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
        return FilteredDecoder(table, [packing.column], *kept)
    return RowGroupDecoder(table, [packing.column], use_threads=False)


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
        rows = self.index.group_rows if self.kept is None else self.kept[1].group_rows
        if not rows[group]:
            return 0
        if rows[group] == self.index.stored_rows[group]:
            stated = self.decoder.elements(group, self.packing.column)
            if stated is not None:
                values, nulls = stated  # each null stands for a list without elements
                return int(values - nulls + self.packing.added * (rows[group] - nulls))
        table = self.decoder.decode(group, 0, int(rows[group]))
        return len(documents_of(table, self.packing, place_of(self.index, group)).tokens)


def place_of(index: TableIndex, group: int) -> tuple[str, int]:
    """Return the file of a row group of the table, and its number there."""
    file, row_group = index.group(group)
    return index.paths[file], row_group
