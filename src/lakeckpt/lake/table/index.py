"""This module holds the index of a table: the files and row groups of the pinned version, in arrays, with one digest.

`TableIndex` holds one array for each property (paths, sizes, rows of every row group, …) instead of an object for each
row group: a million row groups are a few megabytes. The digest depends on the content alone: relative paths, sizes,
footer digests, partition values, row counts, deleted rows, and the schema by which a table format reads the files. It
does not depend on the place, the machine, modification times, or the format's name of the version. A run writes the
index once. Paths are confined to the table that the user opened. The module reads no file and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.errors import ConfigError, WireDamaged
from lakeckpt.lake.parquet.footer import DIGEST_BYTES, Int64Array
from lakeckpt.lake.storage.base import ObjectInfo, check_key
from lakeckpt.lake.table.column_mapping import ColumnMapping
from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.partitions import PartitionColumn
from lakeckpt.lake.table.scalars import type_text
from lakeckpt.lake.table.version import PLAIN, TableVersion
from lakeckpt.wire.documents import Count, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads
from lakeckpt.wire.values import pack

__all__ = ["MARK_BYTES", "RestOfEpoch", "TableIndex"]

KIND, VERSION = "table-index", (1, 0)
_NO_TIME = -1
MARK_BYTES = 16
"""The length of the mark of a file (`lakeckpt.lake.table.joined.mark_of`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestOfEpoch:
    """The rest of one epoch: the rows that were read in an earlier version are treated as deleted."""

    epoch: Count
    taken: Deletes
    """The rows that were read, by the file of this index in which they are now. The version itself still has them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableIndex:
    """The files of a table in the bytewise order of their paths, F of them, with G row groups.

    ``size_bytes``, ``mtime_ns`` (-1: unknown): int64[F]; ``footer_digests``: 16 bytes each, joined; ``first_group``:
    int64[F + 1], the row groups of file ``i`` are ``[first_group[i], first_group[i + 1])``; ``stored_rows`` and
    ``group_bytes`` (uncompressed): int64[G], of the footers, row groups without rows included; ``deletes``: the
    stored rows that do not exist in ``version``; ``columns``: by what the files store the columns of ``schema``;
    ``rest``: the index is of what is left of an epoch (`whole` is of the version). ``excluded``: ordinals of row groups
    that are never read, ascending; ``known``: of a growing table of plain Parquet files, the marks of all files that a
    reader knows, sorted and joined (`lakeckpt.lake.table.joined`). Arrays are read-only. Two indexes are equal if their
    digests are.
    """

    paths: tuple[str, ...]
    size_bytes: Int64Array
    etags: tuple[str | None, ...]
    mtime_ns: Int64Array
    footer_digests: bytes
    first_group: Int64Array
    stored_rows: Int64Array
    group_bytes: Int64Array
    partitions: tuple[PartitionColumn, ...]
    schema: pa.Schema
    version: TableVersion = PLAIN
    deletes: Deletes = field(default_factory=Deletes)
    columns: ColumnMapping = field(default_factory=ColumnMapping)
    rest: RestOfEpoch | None = None
    excluded: tuple[int, ...] = ()
    known: bytes = b""
    gone: Deletes = field(init=False)
    """The stored rows that have no position: ``deletes``, those of ``rest``, and those of ``excluded`` row groups."""
    group_rows: Int64Array = field(init=False)
    """int64[G]: the rows of each row group that are not deleted. These have positions."""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        for name in ("size_bytes", "mtime_ns", "first_group", "stored_rows", "group_bytes"):
            object.__setattr__(self, name, _read_only(np.ascontiguousarray(getattr(self, name), dtype=np.int64)))
        self._check()
        gone = self.deletes if self.rest is None else self.deletes.union(self.rest.taken)
        object.__setattr__(self, "gone", gone.union(self._excluded_rows()))
        object.__setattr__(self, "group_rows", self._group_rows())
        digest = blake2b(pack(self._content()), digest_size=DIGEST_BYTES)
        object.__setattr__(self, "digest", digest.hexdigest())

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, TableIndex) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"TableIndex(files={len(self.paths)}, row_groups={len(self.group_rows)}, rows={self.num_rows}, "
            f"digest={self.digest!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (TableIndex.loads, (self.dumps(),))

    def file(self, ordinal: int) -> ObjectInfo:
        """Return a file as it was listed, ``0 <= ordinal < F``. No object is kept for it. Its time is a hint only."""
        mtime_ns = int(self.mtime_ns[ordinal])
        return ObjectInfo(
            path=self.paths[ordinal],
            size_bytes=int(self.size_bytes[ordinal]),
            etag=self.etags[ordinal],
            mtime_ns=None if mtime_ns == _NO_TIME else mtime_ns,
        )

    def footer_digest(self, ordinal: int) -> bytes:
        """Return the BLAKE2b-128 of the footer of a file."""
        return self.footer_digests[DIGEST_BYTES * ordinal : DIGEST_BYTES * (ordinal + 1)]

    @property
    def whole(self) -> TableIndex:
        """The index of the version, with all its rows."""
        return self if self.rest is None else replace(self, rest=None)

    def excluding(self, row_groups: Iterable[tuple[str, int]]) -> TableIndex:
        """Return this index without ``row_groups`` (path, ordinal in the file), and no others.

        A file that the version does not have excludes nothing. `ConfigError` for an ordinal that a file does not have.
        """
        files = {path: file for file, path in enumerate(self.paths)}
        ordinals = {self._ordinal(path, files[path], group) for path, group in row_groups if path in files}
        return replace(self, excluded=tuple(sorted(ordinals)))

    def _ordinal(self, path: str, file: int, group: int) -> int:
        first, end = self.first_group[file : file + 2].tolist()
        if not 0 <= group < end - first:
            raise ConfigError(
                f"exclude= names row group {group} of {path!r}, which has {end - first} row groups, counted from 0: "
                "name the one that the error named"
            )
        return int(first) + group

    def _excluded_rows(self) -> Deletes:
        rows: dict[int, list[Int64Array]] = {}
        for ordinal in self.excluded:
            start = self.stored_start(ordinal)
            rows.setdefault(self.group(ordinal)[0], []).append(
                np.arange(start, start + int(self.stored_rows[ordinal]), dtype=np.int64)
            )
        return Deletes.of({file: np.concatenate(some) for file, some in rows.items()})

    @property
    def version_digest(self) -> str:
        """The digest of the version with all its rows, whatever is excluded: equal for the same files and deletes."""
        return replace(self, rest=None, excluded=()).digest

    def rows_excluded(self) -> list[tuple[str, int, int]]:
        """Return (path, row group in the file, rows) of what is excluded; rows that exist, and are not of `rest`."""
        every = replace(self, excluded=()).group_rows
        at = [(self.group(ordinal), int(every[ordinal])) for ordinal in self.excluded]
        return [(self.paths[file], group, rows) for (file, group), rows in at]

    @property
    def num_rows(self) -> int:
        return int(self.group_rows.sum())

    def group(self, ordinal: int) -> tuple[int, int]:
        """Return (file, row group in that file) of a row group of the table, ``0 <= ordinal < G``; ``IndexError``."""
        if not 0 <= ordinal < len(self.stored_rows):
            raise IndexError(f"row group {ordinal} of a table of {len(self.stored_rows)}")
        file = int(self.first_group.searchsorted(ordinal, side="right")) - 1
        return file, ordinal - int(self.first_group[file])

    def _content(self) -> dict[str, Any]:
        """Return the fields of the document that the digest covers."""
        content: dict[str, Any] = {
            "paths": "\0".join(self.paths),
            "sizes": _narrow(self.size_bytes),
            "footer_digests": self.footer_digests,
            "first_groups": _narrow(self.first_group),
            "group_rows": _narrow(self.stored_rows),
            "partitions": [
                {"name": p.name, "type": type_text(p.type), "values": p.plain_values(), "codes": p.codes}
                for p in self.partitions
            ],
            "deletes": to_plain(self.deletes),
            "columns": self.columns.to_plain(self.schema),
            "rest": to_plain(self.rest, RestOfEpoch | None),
            "excluded": list(self.excluded),
        }
        if self.known:
            content["known"] = self.known
        if self.version.format != "parquet":  # files do not define how a format reads them
            content["types"] = [[one.name, type_text(one.type)] for one in self.schema]
        return content

    def dumps(self) -> bytes:
        """Return the index as a versioned, checksummed document (`docs/reference/table-index.md`)."""
        value = {
            **self._content(),
            "etags": "\0".join(etag or "" for etag in self.etags),
            "mtimes": self.mtime_ns,
            "group_bytes": _narrow(self.group_bytes),
            "schema": self.schema.serialize().to_pybytes(),
            "version": to_plain(self.version),
            "digest": self.digest,
        }
        return dumps(value, kind=KIND, version=VERSION)

    @classmethod
    def loads(cls, data: bytes) -> TableIndex:
        """Read what `dumps` wrote. `WireError` if it is damaged, newer, or not an index; nothing else."""
        value = loads(data, kind=KIND, supported=VERSION)
        try:
            index, digest = cls._of_document(value), value["digest"]
        except Exception as error:  # a foreign document makes numpy and pyarrow raise anything
            raise WireDamaged(f"this table index is malformed: {type(error).__name__}: {error}") from error
        if index.digest != digest:
            raise WireDamaged(f"this table index records the digest {digest!r}, but has {index.digest!r}")
        return index

    @classmethod
    def _of_document(cls, value: dict[str, Any]) -> TableIndex:
        schema = pa.ipc.read_schema(pa.py_buffer(value["schema"]))
        codes = [one["codes"].astype(np.int32) for one in value["partitions"]]
        files = len(value["sizes"])
        return cls(
            paths=_split(value["paths"], files),
            size_bytes=value["sizes"],
            etags=tuple(etag or None for etag in _split(value["etags"], files)),
            mtime_ns=value["mtimes"],
            footer_digests=value["footer_digests"],
            first_group=value["first_groups"],
            stored_rows=value["group_rows"],
            group_bytes=value["group_bytes"],
            partitions=tuple(map(PartitionColumn.from_plain, value["partitions"], codes, repeat(schema))),
            schema=schema,
            version=from_plain(TableVersion, value["version"], "version"),
            deletes=from_plain(Deletes, value["deletes"], "deletes"),
            columns=ColumnMapping.from_plain(value["columns"], schema),
            rest=from_plain(RestOfEpoch | None, value["rest"], "rest"),
            excluded=tuple(value["excluded"]),
            known=value.get("known", b""),
        )

    def stored_start(self, ordinal: int) -> int:
        """Return the first stored row of row group ``ordinal``, counted from the start of its file."""
        inside = self.group(ordinal)[1]
        return int(self.stored_rows[ordinal - inside : ordinal].sum())

    def surviving(self, ordinal: int) -> npt.NDArray[np.bool_] | None:
        """Return which stored rows of row group ``ordinal`` are not deleted: bool, shape (stored rows,); None: all."""
        if self.group_rows[ordinal] == self.stored_rows[ordinal]:
            return None
        start = self.stored_start(ordinal)
        return self.gone.surviving(self.group(ordinal)[0], start, start + int(self.stored_rows[ordinal]))

    def existing(self, file: int) -> Int64Array:
        """Return the stored rows of a file that have positions, ascending, counted from its start (int64)."""
        first, end = int(self.first_group[file]), int(self.first_group[file + 1])
        total = int(self.stored_rows[first:end].sum())
        left = self.gone.surviving(file, 0, total)
        return np.arange(total, dtype=np.int64) if left is None else np.asarray(np.flatnonzero(left), np.int64)

    def _group_rows(self) -> Int64Array:
        if not self.gone:
            return self.stored_rows
        left = self.stored_rows.copy()
        for file in self.gone.packed:
            if file >= len(self.paths):
                raise ValueError(f"rows are deleted of file {file}, and there are {len(self.paths)}")
            first, end = int(self.first_group[file]), int(self.first_group[file + 1])
            ends = np.cumsum(self.stored_rows[first:end])
            deleted = self.gone.rows(file)
            if len(deleted) and (not len(ends) or deleted[-1] >= ends[-1]):
                raise ValueError(
                    f"row {deleted[-1]} of {self.paths[file]!r} is deleted, but it has {ends[-1] if len(ends) else 0}"
                )
            which = np.searchsorted(ends, deleted, side="right")
            left[first:end] -= np.bincount(which, minlength=end - first)
        return _read_only(left)

    def _check(self) -> None:
        count, groups = len(self.paths), len(self.stored_rows)
        lengths = {len(self.size_bytes), len(self.etags), len(self.mtime_ns), len(self.first_group) - 1}
        lengths |= {len(column.codes) for column in self.partitions}
        if lengths != {count} or len(self.footer_digests) != DIGEST_BYTES * count:
            raise ValueError(f"an index of {count} files needs every property of each file")
        if any(a >= b for a, b in pairwise(self.paths)):
            raise ValueError("the paths of an index must be sorted, each once")
        for path in self.paths:
            check_key(path)
        bounds = self.first_group
        if len(self.group_bytes) != groups or bounds[0] != 0 or bounds[-1] != groups or (np.diff(bounds) < 0).any():
            raise ValueError(f"the row groups of the files do not add up to {groups}")
        if len(self.known) % MARK_BYTES:
            raise ValueError(f"marks of {MARK_BYTES} bytes each cannot take {len(self.known)} bytes")
        if any(a >= b for a, b in pairwise((-1, *self.excluded, groups))):
            raise ValueError(f"row groups {self.excluded[:8]} are excluded, of {groups}")


def _read_only(array: Int64Array) -> Int64Array:
    if not array.flags.writeable:
        return array
    array = array.view()
    array.flags.writeable = False
    return array


def _narrow(array: Int64Array) -> np.ndarray[Any, Any]:
    """Return the same numbers in four bytes each if they fit."""
    return array.astype("<u4") if not len(array) or int(array.max()) < 2**32 else array.astype("<i8")


def _split(text: str, count: int) -> tuple[str, ...]:
    return tuple(text.split("\0")) if count else ()
