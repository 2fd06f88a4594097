"""This module decodes row groups into Arrow tables of the columns asked for, in the types of the table.

A row group is the unit of decoding: the column chunks of the wanted columns (and no others) are read, pages are
compared with their checksums if the file has them (`lakeckpt.lake.parquet.row_group`), and the rows are cut out. Rows
that the pinned version deletes do not exist, and are not counted. A column that a file lacks or stores in another type
is made to fit by `lakeckpt.lake.parquet.fit`; partition columns are constants. A file is opened when it is first
needed, and its footer must be the pinned one. Footers that were read are kept (`lakeckpt.lake.parquet.kept_footers`).
If something cannot be decoded, the file is opened again and read once more before it counts as damaged. A file that was
written again is `DataFileChanged`.

The module never caches rows: every call decodes anew, so the memory that it returns belongs to the caller alone.
Threads may share a decoder.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Hashable, Iterable, Sequence, Set
from contextlib import nullcontext
from functools import partial
from io import FileIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import ConfigError, DataFileDamaged, LakeckptError, SchemaError, StorageError
from lakeckpt.lake.parquet.column_chunks import leaves_of
from lakeckpt.lake.parquet.fit import FileFit, FileFits, constant
from lakeckpt.lake.parquet.kept_footers import kept_footers
from lakeckpt.lake.parquet.prefetch import AheadBytes, OpenedFile, Prefetcher
from lakeckpt.lake.parquet.ranges import read_pinned
from lakeckpt.lake.parquet.row_group import DEFAULT_MAX_ROW_GROUP_BYTES, RowGroupPlan, RowGroupReader
from lakeckpt.lake.parquet.types import plain_type
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.schema import check_agreed
from lakeckpt.lake.table.table import Table

__all__ = ["DEFAULT_AHEAD_BYTES", "RowGroupDecoder", "select_columns"]

DEFAULT_AHEAD_BYTES = 256 * 2**20
"""The default of the bytes, as they are stored, that are held of row groups that are expected and not decoded yet."""


def select_columns(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the schema of ``columns`` in the order asked for (None: all), in the types that are delivered.

    The types are the table's, but views, dictionaries and extension types become the types of their values. Raises
    `ConfigError` for what is no list of names or names a column twice, `SchemaError` for a column that the table lacks
    or that its files do not agree about.
    """
    names = schema.names if columns is None else _listed(columns)
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ConfigError(f"columns are named twice: {', '.join(map(repr, twice))}")
    if not names and columns is None:
        raise SchemaError("the table has no columns: there is nothing to read")
    if not names:
        raise ConfigError("columns must name at least one column, got none")
    known = set(schema.names)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, schema.names, n=3) or schema.names[:10]
            raise SchemaError(f"the table has no column {name!r}; it has {', '.join(map(repr, near))}, …")
    check_agreed(schema, names)
    fields = [schema.field(name) for name in names]
    return pa.schema([pa.field(field.name, plain_type(field.type), field.nullable) for field in fields])


def _listed(columns: Any) -> list[str]:
    is_ordered = isinstance(columns, Iterable) and not isinstance(columns, (str, bytes, Set))
    names = list(columns) if is_ordered else []
    if not is_ordered or not all(isinstance(name, str) for name in names):
        advice = (
            f", got the text {columns!r}: write [{columns!r}]" if isinstance(columns, str) else f", got {columns!r}"
        )
        raise ConfigError(f"columns must be a list of names{advice}")
    return names


class RowGroupDecoder:
    """Decodes row groups of ``table``, ``columns`` of them (None: all), knowing the ``open_files`` files used last.

    The wanted columns of one row group may take ``max_row_group_bytes`` uncompressed, as the footer states it. Up to
    ``ahead_bytes``, as they are stored, are prefetched of row groups in a store that are expected; decoders may share
    an `AheadBytes`.
    """

    def __init__(
        self,
        table: Table,
        columns: Sequence[str] | None = None,
        *,
        open_files: int = 16,
        use_threads: bool = True,
        ahead_bytes: int | AheadBytes = DEFAULT_AHEAD_BYTES,
        max_row_group_bytes: int = DEFAULT_MAX_ROW_GROUP_BYTES,
    ) -> None:
        if open_files < 1:
            raise ConfigError(f"open_files must be at least 1, got {open_files}")
        self.table = table
        self.schema = select_columns(table.schema, columns)
        """The schema of the tables that `decode` returns: the columns in the order asked for."""
        self._every_column = self.schema
        """All columns that are read of some row group."""
        self._partitions = {column.name: column for column in table.index.partitions}
        self._fits = FileFits(table.index.schema, table.index.columns)
        self._use_threads = use_threads
        self._most = max_row_group_bytes
        is_local = isinstance(table.storage, LocalStorage)
        self.fetches = not is_local
        """True if row groups that are expected are fetched from a store."""
        ahead = ahead_bytes if isinstance(ahead_bytes, AheadBytes) else AheadBytes(ahead_bytes)
        self._prefetcher = Prefetcher(
            table.index, self._opened, most_open=open_files, ahead=AheadBytes(0) if is_local else ahead
        )

    def expect(self, groups: Iterable[int]) -> None:
        """Prefetch the bytes of ``groups`` from a store. `decode` is called for them later, in this order.

        The method never waits and never raises. Row groups that were expected before and are not among ``groups`` are
        dropped.
        """
        self._prefetcher.expect(group for group in groups if self._is_fetched(group))

    def decode(self, group: int, start: int, stop: int) -> pa.Table:
        """Return rows [start, stop) of those of row group ``group`` (its ordinal in the table) that are not deleted.

        The memory is shared with nothing else that this returns. Raises `DataFileDamaged` (file, row group and column
        named), `TableError` (more than ``max_row_group_bytes``), `DataFileChanged` (the file is not the pinned
        one), `SchemaError` (values do not fit the table's type), `TableError` (pyarrow lacks the codec),
        `StorageError` (the store failed), `ValueError` (no such rows).
        """
        index = self.table.index
        left = int(index.group_rows[group])
        if not 0 <= start <= stop <= left:
            raise ValueError(f"rows [{start}, {stop}) of row group {group}, which has {left} rows")
        return self._existing(group).slice(start, stop - start)

    def footer(self, ordinal: int) -> pq.FileMetaData:
        """Return the footer of a file of the index, which is opened if it is not open. Raises what opening raises."""
        return self._prefetcher.opened(ordinal).reader.metadata

    def elements(self, group: int, column: str) -> tuple[int, int] | None:
        """Return how many elements the lists of ``column`` have in a row group, and how many nulls are among them.

        Both are of the footer, in which an empty list and a null list count as one null element each. None if the
        footer does not state them, or the file stores no such column. Raises what opening the file raises.
        """
        ordinal, inside = self.table.index.group(group)
        if column not in self._stored_in(ordinal, [column]):
            return None
        file = self._prefetcher.opened(ordinal)
        plan, metadata = file.fit.plans[column], file.reader.metadata
        leaves = list(leaves_of(metadata.schema, [plan.name])) if plan.index is not None else []
        if len(leaves) != 1:
            return None
        chunk = metadata.row_group(inside).column(leaves[0])
        if not chunk.is_stats_set or not chunk.statistics.has_null_count:
            return None
        return int(chunk.num_values), int(chunk.statistics.null_count)

    def close(self) -> None:
        """Drop what was prefetched and close the files that are open; a later `decode` opens them again."""
        self._prefetcher.close()

    def forget(self) -> None:
        """In a forked process, before anything else: open all files anew."""
        self._prefetcher.forget()

    def _wanted(self, group: int) -> pa.Schema:
        """Return the columns to read of a row group: all of `_every_column`, or fewer."""
        return self.schema

    def _is_fetched(self, group: int) -> bool:
        """Return whether anything of a row group is read."""
        return bool(self.table.index.group_rows[group]) and bool(self._stored(group))

    def _existing(self, group: int) -> pa.Table:
        """Return the rows of a row group that are not deleted, in the columns of `_wanted`."""
        index = self.table.index
        schema = self._wanted(group)
        if not index.group_rows[group]:  # rows of which none is left need no read
            return schema.empty_table()
        ordinal, inside = index.group(group)
        try:
            columns = self._read(group, schema)
        except MemoryError as error:
            rows = int(index.stored_rows[group])
            error.add_note(f"while decoding row group {inside} of {index.paths[ordinal]!r} ({rows} rows)")
            raise
        except OSError as error:
            if not {errno.EMFILE, errno.ENFILE} & {getattr(one, "errno", None) for one in (error, error.__cause__)}:
                raise
            raise StorageError(
                f"no file descriptor is left to open {index.paths[ordinal]!r}: each thread that decodes opens a local "
                "file. Raise the limit (`ulimit -n 65536`, LimitNOFILE= of systemd, or "
                "--ulimit nofile of a container), mix fewer sources, or write them as fewer files"
            ) from error
        stored = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
        surviving = index.surviving(group)
        return stored if surviving is None else stored.filter(pa.array(surviving))

    def _read(self, group: int, schema: pa.Schema) -> dict[str, Any]:
        """Return what `_fitted` returns. Damage is raised only if the file, opened again, still has it."""
        try:
            return self._fitted(group, schema)
        except DataFileDamaged:
            ordinal = self.table.index.group(group)[0]
            self.table.footer(ordinal)  # if the file was written again, its footer is another
            self._prefetcher.drop(ordinal)
            return self._fitted(group, schema)

    def _fitted(self, group: int, schema: pa.Schema) -> dict[str, Any]:
        """Return the columns of ``schema`` of a row group, with all its stored rows, by the table's names."""
        ordinal, inside = self.table.index.group(group)
        rows, stored = int(self.table.index.stored_rows[group]), self._stored(group)
        columns: dict[str, Any] = {
            name: constant(schema.field(name).type, self._partitions[name].value_of(ordinal), rows)
            for name in set(schema.names).difference(stored)
        }
        if not stored:
            return columns
        file, plan, source = self._prefetcher.fetch(group)
        try:
            found, fit = file.reader.decode(source, plan, rows, use_threads=self._use_threads), file.fit
        finally:
            source.close()
        for name in stored:
            field = self.table.schema.field(name)
            try:
                columns[name] = fit.column(field, found, rows)
            except (pa.ArrowException, ValueError) as error:
                raise SchemaError(
                    f"column {name!r} of row group {inside} of {self.table.index.paths[ordinal]!r} is "
                    f"{found[fit.plans[name].name].type} and does not fit the table's {field.type} ({error}): write "
                    "that file again, or leave the column out"
                ) from error
        return columns

    def _stored(self, group: int) -> list[str]:
        """Return the columns to read of a row group that its file stores; all others are constant in the file."""
        return self._stored_in(self.table.index.group(group)[0], self._wanted(group).names)

    def _stored_in(self, ordinal: int, names: Iterable[str]) -> list[str]:
        partitions = self._partitions
        return [name for name in names if name not in partitions or partitions[name].is_stored(ordinal)]

    def _plan(self, reader: RowGroupReader, fit: FileFit, group: int) -> RowGroupPlan:
        plans = (fit.plans[name] for name in self._stored(group))
        names = tuple(dict.fromkeys(plan.name for plan in plans if plan.index is not None))
        return reader.plan(self.table.index.group(group)[1], names)

    def _opened(self, ordinal: int) -> OpenedFile:
        index, path = self.table.index, self.table.index.paths[ordinal]
        try:
            key = self._key(ordinal)
            metadata = kept_footers.get(key, partial(self.table.footer, ordinal))
        except LakeckptError:
            raise
        except OSError as error:
            raise StorageError(f"the data file {path!r} could not be opened: {error}") from error
        fit = self._fits.fit(self._stored_in(ordinal, self._every_column.names), metadata, path)
        reader = RowGroupReader(
            metadata,
            path=path,
            size_bytes=int(index.size_bytes[ordinal]),
            columns=fit.stored,
            int96_unit=fit.int96_unit,
            most_bytes=self._most,
        )
        is_local = isinstance(self.table.storage, LocalStorage)
        return OpenedFile(
            reader=reader,
            fit=fit,
            plan=partial(self._plan, reader, fit),
            local=partial(self._local, ordinal, key) if is_local else None,
            read=partial(read_pinned, self.table.storage, self.table.uri, index.file(ordinal)),
        )

    def _key(self, ordinal: int, file: FileIO | None = None) -> Hashable:
        """Return what differs for a file that was written again; ``file``: the local file, if it is open.

        Each read from a store compares the ETag, if the store has ETags.
        """
        index, storage = self.table.index, self.table.storage
        place = self.table.uri, getattr(storage, "place", ""), index.paths[ordinal], index.footer_digest(ordinal)
        if not isinstance(storage, LocalStorage):
            return place, index.etags[ordinal]
        with nullcontext(file) if file else self.table.open_file(ordinal) as opened:
            stat = os.fstat(opened.fileno())
        return place, stat.st_dev, stat.st_ino, stat.st_mtime_ns

    def _local(self, ordinal: int, key: Hashable) -> FileIO:
        """Open a local file, whose footer is read again if the file is not the one of ``key``."""
        file = self.table.open_file(ordinal)
        try:
            if self._key(ordinal, file) != key:
                self.table.footer(ordinal)
        except BaseException:
            file.close()
            raise
        return file
