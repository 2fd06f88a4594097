"""In which files of another version of a table are these rows?  Found by a unique key, and proved.

Files that both versions have, with the same deleted rows, need no look. Of all others the key's columns are read in
both versions: no null, no key twice, and the same keys on both sides; else it raises. Values of other columns are not
compared. Holds the keys of the files that differ in memory, of both versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lakeckpt.errors import TableError
from lakeckpt.lake.deletes import Deletes
from lakeckpt.lake.footer import Progress
from lakeckpt.lake.index import TableIndex
from lakeckpt.lake.table import Table
from lakeckpt.reading.decode import RowGroupDecoder

__all__ = ["FoundRows", "find_by_key"]

_FILE, _ROW = "lakeckpt.file", "lakeckpt.row"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRows:
    """Where rows are in another version."""

    rows: Deletes
    """Stored rows by the other version's files."""
    compared: int
    """Rows of the other version whose keys were read."""


def find_by_key(
    old: Table, new: Table, rows: Deletes, *, key: Sequence[str], progress: Progress | None = None
) -> FoundRows:
    """Find ``rows`` (stored rows of ``old`` that exist) in ``new``.

    ``progress(row groups done, row groups)`` is called while keys are read. Raises `TableError` where the two versions
    do not hold the same keys, each once, and none null; `DataFileChanged` where a file is not the pinned one any more.
    """
    same = _same_files(old.index, new.index)
    found = {there: rows.rows(file) for file, there in same.items()}
    old_files = [file for file in range(len(old.index.paths)) if file not in same]
    new_files = [file for file in range(len(new.index.paths)) if file not in set(same.values())]
    keys = _Keys(list(key), progress, _groups(old.index, old_files) + _groups(new.index, new_files))
    before, after = keys.read(old, old_files), keys.read(new, new_files)
    wanted = pa.table({name: before[name] for name in key}).filter(pa.array(_among(before, rows)))
    _compare(before, after, list(key), old, new)
    hit = after.join(wanted, keys=list(key), join_type="left semi")
    files = np.asarray(hit[_FILE].to_numpy(), np.int64)
    stored = np.asarray(hit[_ROW].to_numpy(), np.int64)
    found.update({int(file): stored[files == file] for file in np.unique(files)})
    return FoundRows(rows=Deletes.of(found), compared=len(after))


class _Keys:
    """Reads the keys of files, with where each row is stored."""

    def __init__(self, key: list[str], progress: Progress | None, total: int) -> None:
        self._key, self._progress, self._total, self._done = key, progress, total, 0

    def read(self, table: Table, files: Sequence[int]) -> pa.Table:
        """The key, the file and the stored row of each existing row of ``files``."""
        places = [(file, table.index.existing(file)) for file in files]
        schema = pa.schema([table.schema.field(name) for name in self._key])
        parts = [part.cast(schema) for file in files for part in self._decoded(table, file)]
        found = pa.concat_tables([schema.empty_table(), *parts])
        none = np.zeros(0, np.int64)
        ordinals = np.concatenate([none, *(np.full(len(stored), file, np.int64) for file, stored in places)])
        found = found.append_column(_FILE, pa.array(ordinals))
        found = found.append_column(_ROW, pa.array(np.concatenate([none, *(stored for _, stored in places)])))
        self._check(found, table)
        return found

    def _decoded(self, table: Table, file: int) -> Iterator[pa.Table]:
        decoder = RowGroupDecoder(table, self._key)
        for group in range(int(table.index.first_group[file]), int(table.index.first_group[file + 1])):
            yield decoder.decode(group, 0, int(table.index.group_rows[group]))
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _check(self, found: pa.Table, table: Table) -> None:
        where = f"{table.index.version} of {table.uri!r}"
        for name in self._key:
            if found[name].null_count:
                raise TableError(
                    f"column {name!r} of {where} has {found[name].null_count:,} nulls: it does not tell rows apart"
                )
        distinct = len(found.select(self._key).group_by(self._key).aggregate([]))
        if distinct != len(found):
            raise TableError(
                f"{', '.join(map(repr, self._key))} is no unique key in {where}: {len(found):,} rows have {distinct:,} "
                "different values; name more columns, or another one"
            )


def _compare(before: pa.Table, after: pa.Table, key: list[str], old: Table, new: Table) -> None:
    both = len(after.join(before.select(key), keys=key, join_type="left semi"))
    if not both == len(before) == len(after):
        raise TableError(
            f"of {len(before):,} keys of the files of {old.index.version} that {new.index.version} has not got, "
            f"{both:,} are among the {len(after):,} of its other files: rows were added, deleted or given other keys, "
            "not only moved, and the place cannot be carried over; go on at the next epoch"
        )


def _among(found: pa.Table, rows: Deletes) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of ``found`` are ``rows``: bool, shape (len(found),)."""
    files, stored = (np.asarray(found[name].to_numpy(), np.int64) for name in (_FILE, _ROW))
    are = np.zeros(len(found), np.bool_)
    for file in np.unique(files):
        mine = files == file
        are[mine] = np.isin(stored[mine], rows.rows(int(file)))
    return are


def _same_files(old: TableIndex, new: TableIndex) -> dict[int, int]:
    """old file → new file, of those that both versions have with the same rows."""
    at = {path: file for file, path in enumerate(new.paths)}
    found = {}
    for file, path in enumerate(old.paths):
        there = at.get(path)
        if there is None or old.files[file].footer_digest != new.files[there].footer_digest:
            continue
        if np.array_equal(old.deletes.rows(file), new.deletes.rows(there)):
            found[file] = there
    return found


def _groups(index: TableIndex, files: Sequence[int]) -> int:
    return sum(int(index.first_group[file + 1] - index.first_group[file]) for file in files)
