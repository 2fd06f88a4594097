"""This module finds rows of one version of a table in another version, by a unique key.

Files that both versions have, with the same deleted rows, are not read. The columns of the key of all other files are
read in both versions and joined. The key must have no null and no value twice, and both versions must have the same
values; else `TableError` says what is wrong. Values of other columns are not compared. The keys of the files that
differ, of both versions, are held in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
import pyarrow as pa

from lakeckpt.errors import TableError
from lakeckpt.lake.parquet.footer import Progress
from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.windows.decode import RowGroupDecoder

__all__ = ["find_by_key"]

_FILE, _ROW = "lakeckpt.file", "lakeckpt.row"
_WHERE = [pa.field(_FILE, pa.int64()), pa.field(_ROW, pa.int64())]


def find_by_key(
    old: Table, new: Table, rows: Deletes, *, key: Sequence[str], progress: Progress | None = None
) -> tuple[Deletes, int]:
    """Return ``rows`` (stored rows of ``old`` that exist) as stored rows of ``new``, and how many keys of it were read.

    ``progress(row groups done, row groups)`` is called while keys are read. Raises `TableError` if the two versions
    do not hold the same keys, each once, and none null; `DataFileChanged` if a file is not the pinned one any more.
    """
    key, same = list(key), _same_files(old.index, new.index)
    here = [group for group in range(len(old.index.group_rows)) if old.index.group(group)[0] not in same]
    there = [group for group in range(len(new.index.group_rows)) if new.index.group(group)[0] not in same.values()]
    done, total = iter(range(1, len(here) + len(there) + 1)), len(here) + len(there)

    def advance() -> None:
        if progress is not None:
            progress(next(done), total)

    before, after = _keys(old, here, key, advance), _keys(new, there, key, advance)
    both = len(after.join(before.select(key), keys=key, join_type="left semi"))
    if not both == len(before) == len(after):
        raise TableError(
            f"{old.index.version} and {new.index.version} have {len(before):,} and {len(after):,} keys in the files "
            f"that differ, {both:,} of them the same: rows were added, deleted or given other keys, not only moved, "
            "and the place cannot be carried over; go on at the next epoch"
        )
    stored = pa.concat_tables([_WHERE_NONE, *(_places(file, rows.rows(file)) for file in rows.packed)])
    wanted = before.join(stored, keys=[_FILE, _ROW], join_type="left semi").select(key)
    hits = after.join(wanted, keys=key, join_type="left semi")
    files, ordinals = (np.asarray(hits[name].to_numpy(), np.int64) for name in (_FILE, _ROW))
    found = {file_there: rows.rows(file) for file, file_there in same.items()}
    found.update({int(file): ordinals[files == file] for file in np.unique(files)})
    return Deletes.of(found), len(after)


_WHERE_NONE = pa.schema(_WHERE).empty_table()


def _places(file: int, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Table:
    return pa.table([np.full(len(rows), file, np.int64), rows], schema=pa.schema(_WHERE))


def _keys(table: Table, groups: Sequence[int], key: list[str], advance: Callable[[], None]) -> pa.Table:
    """Return the key, the file and the stored row of each existing row of ``groups``. `TableError`: it is no key."""
    index, schema = table.index, pa.schema([table.schema.field(name) for name in key])
    parts = []
    with closing(RowGroupDecoder(table, key)) as decoder:
        for group in groups:
            values = decoder.decode(group, 0, int(index.group_rows[group])).cast(schema)
            left, start = index.surviving(group), index.stored_start(group)
            inside = np.arange(index.stored_rows[group]) if left is None else np.flatnonzero(left)
            where = _places(index.group(group)[0], start + inside)
            parts.append(pa.Table.from_arrays([*values.columns, *where.columns], names=[*key, _FILE, _ROW]))
            advance()
    found = pa.concat_tables([pa.schema([*schema, *_WHERE]).empty_table(), *parts], promote_options="permissive")
    text = f"{index.version} of {table.uri!r}"
    for name in key:
        if found[name].null_count:
            raise TableError(
                f"column {name!r} of {text} has {found[name].null_count:,} nulls: it does not tell rows apart"
            )
    distinct = len(found.select(key).group_by(key).aggregate([]))
    if distinct != len(found):
        raise TableError(
            f"{', '.join(map(repr, key))} is no unique key in {text}: {len(found):,} rows have {distinct:,} "
            "different values; name more columns, or another one"
        )
    return found


def _same_files(old: TableIndex, new: TableIndex) -> dict[int, int]:
    """Return old file → new file, of the files that both versions have with the same rows."""
    at = {path: file for file, path in enumerate(new.paths)}
    found = {}
    for file, path in enumerate(old.paths):
        there = at.get(path)
        if there is None or old.footer_digest(file) != new.footer_digest(there):
            continue
        if np.array_equal(old.deletes.rows(file), new.deletes.rows(there)):
            found[file] = there
    return found
