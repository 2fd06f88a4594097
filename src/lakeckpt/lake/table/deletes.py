"""This module holds which stored rows of a table's files the pinned version deletes.

Tables delete rows without writing files again, by deletion vectors and position deletes. Such rows do not exist: they
have no position. `Deletes` keeps, for each file that has any, the deleted rows as ordinals in the file (0 is its first
row), packed into a bitmap or into sorted ordinals, whichever is smaller. `surviving` returns which rows of a row group
are left; it looks at the rows of that row group only. The module reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Deletes"]

Int64Array = npt.NDArray[np.int64]
_BITMAP, _ORDINALS = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletes:
    """Deleted rows by the file's ordinal in the index; files without any have no entry. Make it with `of`."""

    packed: Mapping[int, tuple[int, int, bytes]] = field(default_factory=dict)
    """File → (kind, number of deleted rows, bytes): little-endian bitmap, or ascending uint32 or uint64 ordinals."""

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
        """Return the deleted rows of a file, ascending (int64); empty if it has none."""
        if file not in self.packed:
            return np.zeros(0, np.int64)
        kind, count, data = self.packed[file]
        if kind == _BITMAP:
            return np.asarray(np.flatnonzero(_bits(data, 0, 8 * len(data))), np.int64)
        return _ordinals(count, data).astype(np.int64)

    def surviving(self, file: int, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Return which of the file's rows [start, stop) are left: bool, shape (stop - start,); None if all are.

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


def _bits(data: bytes, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """Bits [start, stop) of a bitmap, fewer if it ends before, as 0 and 1."""
    octets = np.frombuffer(data, np.uint8)[start // 8 : -(-stop // 8)]
    return np.unpackbits(octets, bitorder="little")[start % 8 :][: stop - start]


def _ordinals(count: int, data: bytes) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Packed ordinals, where they lie."""
    return np.frombuffer(data, f"<u{len(data) // count}")


def _below(ordinals: npt.NDArray[np.unsignedinteger[Any]], row: int) -> int:
    """Return how many of the ascending ``ordinals`` are less than ``row``."""
    if row > np.iinfo(ordinals.dtype).max:
        return len(ordinals)
    return int(ordinals.searchsorted(ordinals.dtype.type(row)))  # of another type, all would be converted first
