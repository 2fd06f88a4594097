"""How many rows of each row group does a filter keep?  A value that is counted once, saved beside the index, and read.

`RowSelection` holds the rows that survive the pinned version's deletes and the filter, row group by row group: only
these have positions. Its digest, which reader states name, is the digest of the filter followed by one of the counts:
so that a state of another filter is told from one of the same filter that kept other rows. It holds the filter as text
(with its constants) for people, and never a value of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.errors import WireDamaged
from lakeckpt.wire.codec import Limits, dumps, loads

__all__ = ["FILTER_DIGITS", "RowSelection", "filter_of"]

Int64Array = npt.NDArray[np.int64]
KIND, VERSION = "row-selection", (1, 0)
LIMITS = Limits(total_bytes=2**28)
FILTER_DIGITS = 32
"""How many hexadecimal digits of a selection's digest are the filter's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSelection:
    """The rows of a pinned table that a filter keeps. Two are equal if their tables and digests are."""

    table: str
    """Digest of the table's index."""
    filter: str
    """Digest of the filter."""
    text: str
    """The filter, for people."""
    group_rows: Int64Array
    """int64[G], read-only: the surviving rows of each row group of the index."""
    digest: str = field(init=False)
    """The filter's digest, then BLAKE2b-64 over ``group_rows`` as little-endian int64; hex."""

    def __post_init__(self) -> None:
        rows = np.ascontiguousarray(self.group_rows, dtype=np.int64).view()
        if rows.ndim != 1 or (len(rows) and int(rows.min()) < 0):
            raise ValueError("a row selection has a count of at least 0 for each row group")
        if len(self.filter) != FILTER_DIGITS or bytes.fromhex(self.filter).hex() != self.filter:
            raise ValueError(f"the digest of a filter has {FILTER_DIGITS} hexadecimal digits, got {self.filter!r:.80}")
        rows.flags.writeable = False
        counts = blake2b(b"lakeckpt row selection 1" + rows.astype("<i8").tobytes(), digest_size=8).hexdigest()
        object.__setattr__(self, "group_rows", rows)
        object.__setattr__(self, "digest", self.filter + counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowSelection):
            return NotImplemented
        return (self.table, self.digest) == (other.table, other.digest)

    def __hash__(self) -> int:
        return hash((self.table, self.digest))

    def __repr__(self) -> str:
        return f"RowSelection({self.text!r:.200}, rows={self.num_rows}, digest={self.digest!r})"

    @property
    def num_rows(self) -> int:
        """All surviving rows."""
        return int(self.group_rows.sum())

    def check(self, *, table: str, existing: Int64Array) -> None:
        """``ValueError`` where this cannot be a selection of the table whose row groups have ``existing`` rows."""
        if self.table != table:
            raise ValueError(f"a selection of the table {self.table[:12]} was given for the table {table[:12]}")
        if len(self.group_rows) != len(existing) or bool((self.group_rows > existing).any()):
            raise ValueError(f"the selection {self.digest[:12]} keeps more rows than the row groups have")

    def dumps(self) -> bytes:
        """The selection as a versioned, checksummed document (`docs/reference/row-selection.md`)."""
        rows = self.group_rows
        narrow = not len(rows) or int(rows.max()) < 2**32
        value = {
            "table": self.table,
            "filter": self.filter,
            "text": self.text,
            "group_rows": rows.astype("<u4" if narrow else "<i8"),
            "digest": self.digest,
        }
        return dumps(value, kind=KIND, version=VERSION, limits=LIMITS)

    @classmethod
    def loads(cls, data: bytes) -> RowSelection:
        """Read what `dumps` wrote. `WireError` where it is damaged, newer, or no selection; nothing else."""
        value = loads(data, kind=KIND, supported=VERSION, limits=LIMITS).value
        try:
            found = cls._of_document(value)
            digest = value["digest"]
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise WireDamaged(f"this row selection is malformed: {type(error).__name__}: {error}") from error
        if found.digest != digest:
            raise WireDamaged(f"this row selection says that its digest is {digest!r:.80}, but it is {found.digest!r}")
        return found

    @classmethod
    def _of_document(cls, value: Any) -> RowSelection:
        table, kind, text, rows = (value[name] for name in ("table", "filter", "text", "group_rows"))
        if not all(isinstance(one, str) for one in (table, kind, text)):
            raise TypeError("digests and the filter's text are texts")
        if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "iu":
            raise TypeError("an array of integers was expected")
        return cls(table=table, filter=kind, text=text, group_rows=rows)


def filter_of(selection: str) -> str:
    """The digest of the filter in that of a selection; ``""`` where there is none.

    >>> filter_of("a" * 32 + "b" * 16) == "a" * 32, filter_of("")
    (True, '')
    """
    return selection[:FILTER_DIGITS]
