"""Which footers were read before, by this run or an earlier one, and need not be read again?

`SavedFooters` is what an index needs of the footers of a table's files, as one document that lies beside a run's
checkpoints (``footers/<digest of the table's place>-<digest>.lkc``). A file that is listed with the same path, size and
ETag (where a store has none: the same modification time) has the footer that it had; all others are read. So a table
that grew costs its new files, and one that did not, a listing. It is a cache: damaged or foreign documents are passed
over, and whoever opens a file compares its footer with the pinned digest all the same.

Reads and writes its storage only when asked; keeps the newest documents and removes older ones.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from lakeckpt.errors import StorageError, WireError
from lakeckpt.lake.footer import DIGEST_BYTES, FileSummary, Int64Array, Progress, summarize_all
from lakeckpt.lake.storage import ObjectInfo, Storage, describe
from lakeckpt.wire.codec import Limits, dumps, loads

__all__ = ["SavedFooters", "cached_summaries", "newest", "save"]

FOLDER = "footers"
KIND, VERSION = "footers", (1, 0)
LIMITS = Limits(total_bytes=2**30)
KEPT = 2
_NO_TIME = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedFooters:
    """Summaries of the footers of files, with what tells that a file is still the same."""

    files: tuple[ObjectInfo, ...]
    summaries: tuple[FileSummary, ...]
    _places: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.files) != len(self.summaries):
            raise ValueError(f"{len(self.summaries)} footers of {len(self.files)} files")
        object.__setattr__(self, "_places", {info.path: i for i, info in enumerate(self.files)})

    def find(self, info: ObjectInfo) -> FileSummary | None:
        """The summary of the footer of a file as it is listed now; None where the file is another, or may be."""
        place = self._places.get(info.path)
        if place is None:
            return None
        known = self.files[place]
        if known.size_bytes != info.size_bytes:
            return None
        if known.etag is not None or info.etag is not None:
            return self.summaries[place] if known.etag == info.etag else None
        same = known.mtime_ns is not None and known.mtime_ns == info.mtime_ns
        return self.summaries[place] if same else None

    def dumps(self) -> bytes:
        """The document."""
        # To hash a schema takes the longer the more columns it has, and most files share the object that the first has.
        objects = {id(summary.schema): summary.schema for summary in self.summaries}
        schemas = list(dict.fromkeys(objects.values()))
        place = {schema: code for code, schema in enumerate(schemas)}
        code_of = {key: place[schema] for key, schema in objects.items()}
        times = [_NO_TIME if info.mtime_ns is None else info.mtime_ns for info in self.files]
        value = {
            "paths": [info.path for info in self.files],
            "sizes": np.array([info.size_bytes for info in self.files], np.int64),
            "etags": [info.etag for info in self.files],
            "mtimes": np.array(times, np.int64),
            "digests": b"".join(summary.digest for summary in self.summaries),
            "schemas": [schema.serialize().to_pybytes() for schema in schemas],
            "schema_codes": np.array([code_of[id(summary.schema)] for summary in self.summaries], np.int64),
            "groups_per_file": np.array([len(summary.group_rows) for summary in self.summaries], np.int64),
            "group_rows": _joined([summary.group_rows for summary in self.summaries]),
            "group_bytes": _joined([summary.group_bytes for summary in self.summaries]),
        }
        return dumps(value, kind=KIND, version=VERSION, limits=LIMITS)

    @classmethod
    def loads(cls, data: bytes) -> SavedFooters:
        """What `dumps` wrote; `WireError` or `ValueError` where it is something else."""
        value: dict[str, Any] = loads(data, kind=KIND, supported=VERSION, limits=LIMITS).value
        try:
            return cls._of_document(value)
        except (KeyError, TypeError, AttributeError, IndexError, pa.ArrowException) as error:
            raise ValueError(f"malformed footers: {error!r}") from error

    @classmethod
    def _of_document(cls, value: Mapping[str, Any]) -> SavedFooters:
        schemas = [pa.ipc.read_schema(pa.py_buffer(one)) for one in value["schemas"]]
        ends = np.cumsum(value["groups_per_file"], dtype=np.int64).tolist()
        sizes, times, digests = value["sizes"].tolist(), value["mtimes"].tolist(), value["digests"]
        rows, sized, codes = value["group_rows"], value["group_bytes"], value["schema_codes"].tolist()
        if len({len(sizes), len(times), len(ends), len(codes), len(value["paths"])}) != 1:
            raise ValueError("the parts of the footers do not agree")
        if len(rows) != (ends[-1] if ends else 0) or len(sized) != len(rows):
            raise ValueError("the row groups of the footers do not add up")
        if len(digests) != DIGEST_BYTES * len(sizes):
            raise ValueError("the digests of the footers do not add up")
        files = [
            ObjectInfo(path=path, size_bytes=size, etag=etag, mtime_ns=None if time == _NO_TIME else time)
            for path, size, etag, time in zip(value["paths"], sizes, value["etags"], times, strict=True)
        ]
        summaries = [
            FileSummary(
                digest=digests[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)],
                schema=schemas[code],
                group_rows=rows[begin:end],
                group_bytes=sized[begin:end],
            )
            for i, (code, begin, end) in enumerate(zip(codes, [0, *ends], ends, strict=False))
        ]
        return cls(files=tuple(files), summaries=tuple(summaries))


def cached_summaries(
    cache: Storage | None,
    storage: Storage,
    files: Sequence[ObjectInfo],
    *,
    threads: int,
    progress: Progress | None,
) -> list[FileSummary]:
    """The summaries of ``files``, in their order; those that ``cache`` does not have are read, and then saved there.

    A cache that cannot be written to is done without, with a warning.
    """
    if cache is None:
        return summarize_all(storage, files, threads=threads, progress=progress)
    saved = newest(cache, storage)
    known = [None if saved is None else saved.find(info) for info in files]
    missing = [info for info, summary in zip(files, known, strict=True) if summary is None]
    read = iter(summarize_all(storage, missing, threads=threads, progress=progress))
    summaries = [next(read) if summary is None else summary for summary in known]
    if missing:
        try:
            save(cache, storage, SavedFooters(files=tuple(files), summaries=tuple(summaries)))
        except StorageError as error:
            warnings.warn(f"the footers that were read could not be kept: {error}", RuntimeWarning, stacklevel=3)
    return summaries


def newest(cache: Storage, storage: Storage) -> SavedFooters | None:
    """The footers of the table at ``storage`` that were saved last, of those that can be read; None where there are
    none."""
    with contextlib.suppress(StorageError):
        for info in _listed(cache, storage):
            with contextlib.suppress(StorageError, WireError, ValueError):
                return SavedFooters.loads(cache.read(info.path))
    return None


def save(cache: Storage, storage: Storage, footers: SavedFooters) -> str:
    """Save the footers of the table at ``storage`` under the digest of the content, and remove all but the newest few
    of that table; the path. `StorageError`."""
    data = footers.dumps()
    path = f"{_prefix(storage)}{blake2b(data, digest_size=DIGEST_BYTES).hexdigest()}.lkc"
    cache.put(path, [data])
    with contextlib.suppress(StorageError):  # what is left over costs room only
        for info in [info for info in _listed(cache, storage) if info.path != path][KEPT - 1 :]:
            cache.delete(info.path)
    return path


def _prefix(storage: Storage) -> str:
    # Paths are below a table's root, so that two tables of one run may have a file of one path, size and time.
    return f"{FOLDER}/{blake2b(describe(storage).encode(), digest_size=8).hexdigest()}-"


def _listed(cache: Storage, storage: Storage) -> Sequence[ObjectInfo]:
    """The documents of one table, the newest first."""
    prefix = _prefix(storage)
    found = [info for info in cache.list(FOLDER) if info.path.startswith(prefix) and info.path.endswith(".lkc")]
    return sorted(found, key=lambda info: (info.mtime_ns or 0, info.path), reverse=True)


def _joined(arrays: Sequence[Int64Array]) -> Int64Array:
    return np.concatenate([np.zeros(0, np.int64), *arrays])
