"""Are the bytes of a column chunk those that they were?  Digests of our own, for files whose pages have no checksums.

`ChunkDigests` holds one number for each column chunk of a pinned table, recorded once (`lakeckpt.record_digests`) and
kept beside a run. They cover the whole chunk, headers of pages included. They are CRC-32, as the checksums of pages
are: it notices accidents, not forgery, and costs a fraction of what a cryptographic digest would while reading. Which
columns are which is not kept: digests stand in the order of the files' leaves, and 0 stands for one not recorded.

Never reads a data file.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.errors import ConfigError, ObjectMissing, WireDamaged
from lakeckpt.lake.storage import Storage, describe
from lakeckpt.wire.codec import Limits, dumps, loads

__all__ = ["ChunkDigests", "Uint64Array", "chunk_digest", "digests_path", "load_digests"]

Uint64Array = npt.NDArray[np.uint64]
KIND, VERSION = "chunk-digests", (1, 0)
LIMITS = Limits(total_bytes=2**31)
_ALGORITHM, _RECORDED = "crc32", 1 << 32


def chunk_digest(content: memoryview) -> int:
    """CRC-32 of the bytes of a column chunk, with bit 32 set: never 0."""
    return _RECORDED | zlib.crc32(content)


def digests_path(table: str) -> str:
    """Where the digests of the table with this digest lie."""
    return f"digests/{table}.lkc"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkDigests:
    """The digests of the column chunks of a pinned table."""

    table: str
    """Digest of the table's index."""
    groups: npt.NDArray[np.int64]
    """int64[F]: row groups of each file of the index."""
    leaves: npt.NDArray[np.int64]
    """int64[F]: columns of the lowest level of each file."""
    digests: Uint64Array
    """uint64: file after file, row group after row group, leaf after leaf."""
    begins: npt.NDArray[np.int64] = field(init=False, repr=False)
    """int64[F + 1]: where the digests of each file begin."""

    def __post_init__(self) -> None:
        if self.groups.shape != self.leaves.shape or min(self.groups.min(initial=0), self.leaves.min(initial=0)) < 0:
            raise ValueError("digests are of row groups and leaves of each file")
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.groups * self.leaves)])
        if self.digests.shape != (int(begins[-1]),):
            raise ValueError(f"{self.digests.shape} digests of {begins[-1]} column chunks")
        object.__setattr__(self, "begins", begins)

    def of_file(self, ordinal: int) -> Uint64Array:
        """The digests of one file: uint64[row groups, leaves]."""
        start, stop = int(self.begins[ordinal]), int(self.begins[ordinal + 1])
        return self.digests[start:stop].reshape(int(self.groups[ordinal]), int(self.leaves[ordinal]))

    def joined(self, other: ChunkDigests) -> ChunkDigests:
        """These, and of ``other``, of the same table, those of column chunks that these have none of."""
        return replace(self, digests=np.where(self.digests != 0, self.digests, other.digests))

    def dumps(self) -> bytes:
        """The digests as a versioned, checksummed document."""
        value = {
            "table": self.table,
            "algorithm": _ALGORITHM,
            "groups": self.groups.astype("<u4"),
            "leaves": self.leaves.astype("<u4"),
            "digests": self.digests.astype("<u8"),
        }
        return dumps(value, kind=KIND, version=VERSION, limits=LIMITS)

    @classmethod
    def loads(cls, data: bytes) -> ChunkDigests:
        """Read what `dumps` wrote. `WireError` where it is damaged, newer, or no digests; nothing else."""
        value: Any = loads(data, kind=KIND, supported=VERSION, limits=LIMITS).value
        try:
            arrays = [value[name] for name in ("groups", "leaves", "digests")]
            if not isinstance(value["table"], str) or any(
                not isinstance(one, np.ndarray) or one.dtype.kind != "u" or one.ndim != 1 for one in arrays
            ):
                raise TypeError("a text and three arrays of numbers were expected")
            if value["algorithm"] != _ALGORITHM:
                raise ValueError(f"digests of an unknown kind {value['algorithm']!r:.40}")
            groups, leaves = (one.astype(np.int64) for one in arrays[:2])
            return cls(table=value["table"], groups=groups, leaves=leaves, digests=arrays[2].astype(np.uint64))
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise WireDamaged(f"these digests are malformed: {type(error).__name__}: {error}") from error


def load_digests(storage: Storage, table: str, group_counts: npt.NDArray[np.int64]) -> ChunkDigests:
    """Read the digests of the table with that digest, whose files have so many row groups.

    `ConfigError` where none were recorded, `WireDamaged` where they are of another table.
    """
    try:
        found = ChunkDigests.loads(storage.read(digests_path(table)))
    except ObjectMissing as error:
        raise ConfigError(
            f"no digests of this version of the table are at {describe(storage)}: record them once, with "
            "lakeckpt.record_digests(table, place), or leave digests= out"
        ) from error
    if found.table != table or not np.array_equal(found.groups, group_counts):
        raise WireDamaged(f"{digests_path(table)} holds the digests of another table: remove it, and record them anew")
    return found
