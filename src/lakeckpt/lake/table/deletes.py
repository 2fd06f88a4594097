"""This module holds which stored rows of a table's files the pinned version deletes.

Tables delete rows without writing files again, by deletion vectors and position deletes. Such rows do not exist: they
have no position. `Deletes` keeps, for each file that has any, the deleted rows as ordinals in the file (0 is its first
row), packed into a bitmap or into sorted ordinals, whichever is smaller. `surviving` returns which rows of a row group
are left; it looks at the rows of that row group only. The module reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Deletes"]

Int64Array = npt.NDArray[np.int64]
_BITMAP, _ORDINALS = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deletes:
    """Deleted rows by the file's ordinal in the index; files without any have no entry. Make it with `of`."""

    packed: Mapping[int, tuple[int, int, bytes]] = field(default_factory=dict)
    """File → (kind, number of deleted rows, bytes): little-endian bitmap, or ascending uint32 or uint64 ordinals."""

    def __post_init__(self) -> None:
        for file, (kind, count, data) in self.packed.items():
            if file < 0 or kind not in (_BITMAP, _ORDINALS) or count < 1:
                raise ValueError(f"malformed deletes of file {file}: kind {kind}, {count} rows, {len(data)} bytes")
            rows = self.rows(file)
            if len(rows) != count or bool((np.diff(rows) <= 0).any()):
                raise ValueError(f"the deletes of file {file} are not {count} ascending rows")

    @classmethod
    def of(cls, rows: Mapping[int, Int64Array]) -> Deletes:
        """Pack ordinals (int64, any order, repeats allowed) by file."""
        packed = {}
        for file, ordinals in sorted(rows.items()):
            distinct = np.unique(np.asarray(ordinals, np.int64))
            if not len(distinct):
                continue
            if int(distinct[0]) < 0:
                raise ValueError(f"file {file} cannot have deleted row {int(distinct[0])}")
            last = int(distinct[-1])
            width = 4 if last < 2**32 else 8
            if last // 8 + 1 < width * len(distinct):
                bits = np.zeros(last + 1, np.uint8)
                bits[distinct] = 1
                packed[file] = (_BITMAP, len(distinct), np.packbits(bits, bitorder="little").tobytes())
            else:
                packed[file] = (_ORDINALS, len(distinct), distinct.astype(f"<u{width}").tobytes())
        return cls(packed=packed)

    def union(self, other: Deletes) -> Deletes:
        """Return the rows that either deletes."""
        if not other:
            return self
        both = {*self.packed, *other.packed}
        return Deletes.of({file: np.concatenate([self.rows(file), other.rows(file)]) for file in both})

    def __bool__(self) -> bool:
        return bool(self.packed)

    @property
    def total(self) -> int:
        """The number of deleted rows of all files."""
        return sum(count for _, count, _ in self.packed.values())

    def rows(self, file: int) -> Int64Array:
        """Return the deleted rows of a file, ascending (int64); empty where it has none."""
        if file not in self.packed:
            return np.zeros(0, np.int64)
        kind, count, data = self.packed[file]
        if kind == _BITMAP:
            return np.asarray(np.flatnonzero(_bits(data, 0, 8 * len(data))), np.int64)
        return _ordinals(count, data).astype(np.int64)

    def surviving(self, file: int, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Return which of the file's rows [start, stop) are left: bool, shape (stop - start,); None where all are.

        It looks only at these rows, however many the file has: it is asked for every row group of the file.
        """
        if file not in self.packed:
            return None
        kind, count, data = self.packed[file]
        left = np.ones(stop - start, np.bool_)
        if kind == _BITMAP:
            bits = _bits(data, start, stop)
            left[: len(bits)] = bits == 0
        else:
            ordinals = _ordinals(count, data)
            inside = ordinals[_below(ordinals, start) : _below(ordinals, stop)]
            left[inside.astype(np.int64) - start] = False
        return None if left.all() else left

    def digest(self) -> bytes:
        """BLAKE2b-128 over the deleted rows of each file, however they are packed."""
        total = blake2b(digest_size=16)
        for file in sorted(self.packed):
            rows = self.rows(file)
            total.update(file.to_bytes(8, "little") + len(rows).to_bytes(8, "little"))
            total.update(rows.astype("<i8").tobytes())
        return total.digest()

    def to_plain(self) -> list[list[object]]:
        """Return values that the wire can carry."""
        return [[file, kind, count, data] for file, (kind, count, data) in sorted(self.packed.items())]

    @classmethod
    def from_plain(cls, plain: object) -> Deletes:
        """Return what `to_plain` gave; ``ValueError`` or ``TypeError`` where it is something else."""
        if not isinstance(plain, list):
            raise TypeError("a list of deletes was expected")
        packed: dict[int, tuple[int, int, bytes]] = {}
        for file, kind, count, data in plain:
            if type(file) is not int or type(kind) is not int or type(count) is not int or not isinstance(data, bytes):
                raise TypeError("malformed deletes")
            packed[file] = (kind, count, data)
        return cls(packed=packed)


def _bits(data: bytes, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """Bits [start, stop) of a bitmap, fewer where it ends before, as 0 and 1."""
    octets = np.frombuffer(data, np.uint8)[start // 8 : -(-stop // 8)]
    return np.unpackbits(octets, bitorder="little")[start % 8 :][: stop - start]


def _ordinals(count: int, data: bytes) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Packed ordinals, where they lie."""
    if len(data) not in (4 * count, 8 * count):
        raise ValueError(f"{len(data)} bytes cannot be {count} ordinals of deleted rows")
    return np.frombuffer(data, f"<u{len(data) // count}")


def _below(ordinals: npt.NDArray[np.unsignedinteger[Any]], row: int) -> int:
    """Return how many of the ascending ``ordinals`` are less than ``row``."""
    if row > np.iinfo(ordinals.dtype).max:
        return len(ordinals)
    return int(ordinals.searchsorted(ordinals.dtype.type(row)))  # of another type, all would be converted first
