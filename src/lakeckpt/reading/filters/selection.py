"""This module identifies the rows that a filter keeps.

A `RowSelection` holds, for each row group of a pinned table, how many rows stay and a digest of which rows stay. Rows
that the pinned version deletes do not exist here. The digest of the selection covers both arrays: two filters that keep
the same rows are one selection, and a filter that keeps other rows is another one even if the counts agree. Only
rows that stay have positions.

A selection may instead count the tokens of packed documents (`lakeckpt.reading.packed`): ``unit`` tokens make a
position then, and the rows of this module are tokens.

A selection also records which expression was counted, and by which release of pyarrow. A run saves selections, and
`RowSelection.was_counted_by` says whether a saved one may be used without counting again. The module never reads a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakeckpt.errors import WireDamaged
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["EVERY", "NONE", "CountingRule", "RowSelection", "digested"]

Int64Array = npt.NDArray[np.int64]
Uint64Array = npt.NDArray[np.uint64]
KIND, VERSION = "row-selection", (1, 0)
_TEXTS = ("table", "text", "expression", "pyarrow", "digest")
NONE, EVERY = 0, 2**64 - 1
"""The digests of a row group that keeps no row, or every row: neither needs a bitmap."""


def digested(mask: pa.ChunkedArray) -> tuple[int, int]:
    """Return how many rows of a row group stay, and a digest of which: `NONE`, `EVERY`, or BLAKE2b-64 of the bitmap.

    ``mask`` is bool without nulls.

    >>> digested(pa.chunked_array([[False, False]])), digested(pa.chunked_array([[True, True]])) == (2, EVERY)
    ((0, 0), True)
    """
    kept = int(pc.sum(mask).as_py() or 0)
    if kept in (0, len(mask)):
        return kept, EVERY if kept else NONE
    packed = np.packbits(mask.cast(pa.uint8()).to_numpy(), bitorder="little")  # Arrow casts faster than it unpacks
    return kept, int.from_bytes(blake2b(packed.tobytes(), digest_size=8).digest(), "little")


class CountingRule(Protocol):
    """A rule that rows are counted by: a filter, or a packing."""

    @property
    def digest(self) -> str:
        """A digest of all that the counts depend on, besides the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """The rows of a pinned table that a filter keeps. Two are equal if their tables and digests are."""

    table: str
    """Digest of the table's index."""
    text: str = field(compare=False)
    """The filter, for people."""
    expression: str = field(compare=False)
    """`RowFilter.digest` of the filter that was counted."""
    pyarrow: str = field(compare=False)
    """The release of pyarrow that evaluated the filter."""
    group_rows: Int64Array = field(compare=False, repr=False)
    """int64[G], read-only: how many rows of each row group stay."""
    group_digests: Uint64Array = field(compare=False, repr=False)
    """uint64[G], read-only: the digest of `digested` of each row group."""
    unit: int = 1
    """Rows of a position: 1, or the tokens of a packed sequence."""
    digest: str = field(init=False)
    """BLAKE2b-128 (hex) over ``group_rows`` and ``group_digests``, little-endian."""

    def __post_init__(self) -> None:
        rows = np.ascontiguousarray(self.group_rows, dtype=np.int64).view()
        digests = np.ascontiguousarray(self.group_digests, dtype=np.uint64).view()
        if rows.ndim != 1 or (len(rows) and int(rows.min()) < 0):
            raise ValueError("a row selection has a count of at least 0 for each row group")
        if digests.shape != rows.shape or bool(((digests == NONE) != (rows == 0)).any()):
            raise ValueError("a row selection has a digest for each row group, and 0 exactly where no row stays")
        rows.flags.writeable = digests.flags.writeable = False
        found = blake2b(b"lakeckpt row selection 1", digest_size=16)
        found.update(rows.astype("<i8").tobytes())
        found.update(digests.astype("<u8").tobytes())
        object.__setattr__(self, "group_rows", rows)
        object.__setattr__(self, "group_digests", digests)
        object.__setattr__(self, "digest", found.hexdigest())

    @property
    def num_rows(self) -> int:
        """The positions of an epoch: all rows that stay, or the packed sequences."""
        return -(-int(self.group_rows.sum()) // self.unit)

    def was_counted_by(self, keep: CountingRule) -> bool:
        """Say whether the very expression of ``keep`` was counted, by the release of pyarrow that runs now."""
        return (self.expression, self.pyarrow) == (keep.digest, pa.__version__)

    def check(self, *, table: str, existing: Int64Array) -> None:
        """Raise ``ValueError`` if this is no selection of the table whose row groups have ``existing`` rows."""
        if self.table != table:
            raise ValueError(f"a selection of the table {self.table[:12]} was given for the table {table[:12]}")
        if len(self.group_rows) != len(existing) or (self.unit == 1 and bool((self.group_rows > existing).any())):
            raise ValueError(f"the selection {self.digest[:12]} keeps more rows than the row groups have")

    def of_index(self, table: str, existing: Int64Array) -> RowSelection:
        """Return the selection of the table ``table``, which is the same without some row groups: ``existing`` are its
        rows of each row group."""
        rows, digests = (np.where(existing > 0, one, 0) for one in (self.group_rows, self.group_digests))
        return replace(self, table=table, group_rows=rows, group_digests=digests.astype(np.uint64))

    def dumps(self) -> bytes:
        """Return the selection as a versioned, checksummed document (`docs/reference/row-selection.md`)."""
        rows = self.group_rows
        narrow = not len(rows) or int(rows.max()) < 2**32
        value = {name: getattr(self, name) for name in _TEXTS} | {
            "unit": self.unit,
            "group_rows": rows.astype("<u4" if narrow else "<i8"),
            "group_digests": self.group_digests.astype("<u8"),
        }
        return dumps(value, kind=KIND, version=VERSION)

    @classmethod
    def loads(cls, data: bytes) -> RowSelection:
        """Read what `dumps` wrote. Raises `WireError` if it is damaged, newer, or no selection; nothing else."""
        value = loads(data, kind=KIND, supported=VERSION)
        try:
            found = cls(**{one.name: value[one.name] for one in fields(cls) if one.init})
            digest = value["digest"]
        except (TypeError, ValueError, KeyError) as error:
            raise WireDamaged(f"this row selection is malformed: {type(error).__name__}: {error}") from error
        if found.digest != digest:
            raise WireDamaged(f"this row selection says that its digest is {digest!r:.80}, but it is {found.digest!r}")
        return found
