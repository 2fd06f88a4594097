"""What are the rows [start, stop) of a row group?  An Arrow table of the columns asked for, in the table's own types.

The row group is the unit of decode: its column chunks of those columns (and no others) are read, their pages' checksums
verified where the file has them, in bounded memory (`lakeckpt.reading.row_groups`), and the rows cut out. Rows that
the pinned version deletes do not exist, and are not counted. What a file lacks or stores otherwise is made to fit by
`lakeckpt.reading.fitting`; partition columns are constants. A file is opened once, when first needed, and its footer
must be the pinned one; the files used last stay open. Where something cannot be decoded, the file is
opened again (one that was written again meanwhile is `DataFileChanged`) and read once more before it counts as damaged.

Row groups that are announced are fetched from stores ahead of being decoded (`lakeckpt.reading.fetching`).

It never caches rows: every call decodes anew, so the memory that it returns is the caller's alone. Threads may share a
decoder.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lakeckpt.errors import ConfigError, DataFileDamaged, LakeckptError, SchemaError, StorageError
from lakeckpt.lake.chunk_digests import Uint64Array
from lakeckpt.lake.local import LocalStorage
from lakeckpt.lake.table import Table
from lakeckpt.lake.values import Value
from lakeckpt.reading.arrays import plain_type
from lakeckpt.reading.fetching import RowGroupFetcher
from lakeckpt.reading.fitting import FileFits, constant
from lakeckpt.reading.open_files import OpenedFile, OpenFiles
from lakeckpt.reading.row_groups import DEFAULT_MAX_ROW_GROUP_BYTES, RowGroupReader

__all__ = ["DEFAULT_AHEAD_BYTES", "RowGroupDecoder", "select_columns"]

DEFAULT_AHEAD_BYTES = 256 * 2**20
"""What is held of row groups that were announced and are not decoded yet, as they are stored, if not told otherwise."""


def select_columns(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the schema of ``columns`` in the order asked for (None: all), in the types that are delivered.

    These are the table's, save that views, dictionaries and extension types become the types of their values. Raises
    `ConfigError` for a name given twice, `SchemaError` for one that the table does not have.
    """
    if isinstance(columns, str):
        raise ConfigError(f"columns must be a list of names, got the text {columns!r}: write [{columns!r}]")
    names = schema.names if columns is None else list(columns)
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ConfigError(f"columns asked for more than once: {', '.join(map(repr, twice))}")
    if not names and columns is None:
        raise SchemaError("the table has no columns: there is nothing to read")
    if not names:
        raise ConfigError("no columns were asked for: name at least one")
    known = set(schema.names)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, schema.names, n=3) or schema.names[:10]
            raise SchemaError(f"the table has no column {name!r}; it has {', '.join(map(repr, near))}, …")
    fields = [schema.field(name) for name in names]
    return pa.schema([pa.field(field.name, plain_type(field.type), field.nullable) for field in fields])


class RowGroupDecoder:
    """Decodes row groups of ``table``, ``columns`` of them (None: all), keeping at most ``open_files`` files open.

    The wanted columns of one row group may decode to ``max_row_group_bytes``; of those announced, up to ``ahead_bytes``
    are held as they are stored.
    """

    def __init__(
        self,
        table: Table,
        columns: Sequence[str] | None = None,
        *,
        open_files: int = 16,
        use_threads: bool = True,
        ahead_bytes: int = DEFAULT_AHEAD_BYTES,
        max_row_group_bytes: int = DEFAULT_MAX_ROW_GROUP_BYTES,
    ) -> None:
        if open_files < 1:
            raise ConfigError(f"open_files must be at least 1, got {open_files}")
        self.table = table
        self.schema = select_columns(table.schema, columns)
        """What `decode` returns: the columns in the order asked for."""
        self._partitions = {column.name: column for column in table.index.partitions}
        self._fits = FileFits(table.index.schema, table.index.columns)
        self._use_threads = use_threads
        self._most = max_row_group_bytes
        self._files = OpenFiles(self._opened, most=open_files)
        is_local = isinstance(table.storage, LocalStorage)
        self._fetcher = RowGroupFetcher(table.index, self._files, ahead=not is_local, ahead_bytes=ahead_bytes)

    def announce(self, groups: Iterable[int]) -> None:
        """Say that `decode` will be called for ``groups``, in this order, after those that were announced before.

        Their bytes are fetched ahead from stores, as far as ``ahead_bytes`` go. It never waits and never raises.
        """
        self._fetcher.announce(group for group in groups if self._is_fetched(group))

    @property
    def has_room(self) -> bool:
        """Whether row groups that are announced now would be fetched ahead; never of local files."""
        return self._fetcher.has_room

    def forget(self) -> None:
        """Let go of what was announced and not decoded."""
        self._fetcher.forget()

    def decode(self, group: int, start: int, stop: int) -> pa.Table:
        """Return rows [start, stop) of those of row group ``group`` (its ordinal in the table) that are not deleted.

        The memory is shared with nothing else that this returns. Raises `DataFileDamaged` (file, row group and column
        named), `RowGroupTooLarge` (more than ``max_row_group_bytes``), `DataFileChanged` (the file is not the pinned
        one), `SchemaError` (values do not fit the table's type), `TableFeatureUnsupported` (pyarrow lacks the codec),
        `StorageError` (the store failed), `ValueError` (no such rows).
        """
        index = self.table.index
        left = int(index.group_rows[group])
        if not 0 <= start <= stop <= left:
            raise ValueError(f"rows [{start}, {stop}) of row group {group}, which has {left} rows")
        # Rows of which none is left need no read.
        rows = int(index.stored_rows[group]) if left else 0
        ordinal, inside = index.group(group)
        path = index.paths[ordinal]
        try:
            fitted = self._read(group, ordinal, inside, rows) if rows else {}
        except MemoryError as error:
            error.add_note(f"while decoding row group {inside} of {path!r} ({rows} rows)")
            raise
        columns = [fitted.get(field.name, pa.chunked_array([], field.type)) for field in self.schema]
        stored = pa.Table.from_arrays(columns, schema=self.schema)
        surviving = index.surviving(group) if rows else None
        return (stored if surviving is None else stored.filter(pa.array(surviving))).slice(start, stop - start)

    def digests(self, ordinal: int) -> Uint64Array:
        """Decode the row groups of file ``ordinal``, and return the digests of their column chunks of the columns.

        uint64[row groups, leaves of the file], 0 for other columns and for row groups without rows. Raises as `decode`.
        """
        first, end = self.table.index.first_group[ordinal : ordinal + 2].tolist()
        stored_rows = self.table.index.stored_rows[first:end].tolist()
        lease, must_open = self._files.lease(ordinal)
        try:
            if must_open:
                self._files.open(lease)
            reader = lease.file.result().reader
            every = [reader.digests(group, rows) for group, rows in enumerate(stored_rows)]
        finally:
            self._files.release(lease)
        return np.stack(every) if every else np.zeros((0, 0), np.uint64)

    def close(self) -> None:
        """Close the files that are open and `forget`; a later `decode` opens them again."""
        self._fetcher.forget()
        self._files.close()

    def _is_fetched(self, group: int) -> bool:
        """Whether anything of a row group is read."""
        return bool(self.table.index.group_rows[group]) and bool(self._split(self.table.index.group(group)[0])[1])

    def _read(self, group: int, ordinal: int, inside: int, rows: int) -> dict[str, Any]:
        """As `_fitted`. Damage is believed only of the pinned file (opened again, it must be that), read so twice."""
        try:
            return self._fitted(group, ordinal, inside, rows)
        except DataFileDamaged:
            self._files.drop(ordinal)
            return self._fitted(group, ordinal, inside, rows)

    def _fitted(self, group: int, ordinal: int, inside: int, rows: int) -> dict[str, Any]:
        """The columns of a row group with all its stored rows, by the table's names."""
        constants, stored = self._split(ordinal)
        columns = {name: constant(self.schema.field(name).type, value, rows) for name, value in constants.items()}
        if not stored:
            return columns
        path = self.table.index.paths[ordinal]
        file, held = self._fetcher.fetch(group)
        try:
            found, fit = file.reader.decode(held, rows, use_threads=self._use_threads), file.fit
        finally:
            held.release()
        for name in stored:
            field = self.table.schema.field(name)
            try:
                columns[name] = fit.column(field, found, rows)
            except (pa.ArrowException, ValueError) as error:
                raise SchemaError(
                    f"column {name!r} of row group {inside} of {path!r} is {found[fit.plans[name].name].type} and "
                    f"does not fit the table's {field.type} ({error}): write that file again, or leave the column out"
                ) from error
        return columns

    def _split(self, ordinal: int) -> tuple[dict[str, Value], list[str]]:
        """The columns asked for that are constant in a file, and those that it stores."""
        constants: dict[str, Value] = {}
        stored: list[str] = []
        for name in self.schema.names:
            partition = self._partitions.get(name)
            if partition is None or partition.is_stored(ordinal):
                stored.append(name)
            else:
                constants[name] = partition.value_of(ordinal)
        return constants, stored

    def _opened(self, ordinal: int) -> OpenedFile:
        index = self.table.index
        path = index.paths[ordinal]
        try:
            footer = self.table.whole_footer(ordinal)
        except LakeckptError:
            raise
        except OSError as error:
            raise StorageError(f"the data file {path!r} could not be opened: {error}") from error
        fit = self._fits.fit(self._split(ordinal)[1], footer.metadata, path)
        reader = RowGroupReader(
            self.table.open_bytes(ordinal),
            footer,
            path=path,
            size_bytes=int(index.size_bytes[ordinal]),
            columns=fit.stored,
            int96_unit=fit.int96_unit,
            most=self._most,
            digests=None if self.table.digests is None else self.table.digests.of_file(ordinal),
        )
        return OpenedFile(reader=reader, fit=fit)
