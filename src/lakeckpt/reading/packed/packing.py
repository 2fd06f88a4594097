"""This module describes how documents are packed into sequences.

A document is one row of a column of lists of tokens, or of their bytes. The tokens of the documents of an epoch, one
document after another, are cut into sequences of equal length. The module reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from lakeckpt.errors import SchemaError, shown

__all__ = ["COLUMNS", "DTYPES", "Packing"]

COLUMNS = ("tokens", "position_ids", "document_ids", "loss_mask", "labels", "cu_seqlens")
"""The columns that a packed batch may hold; the first four, if nothing else is asked for."""
DTYPES = ("uint16", "uint32", "int32", "int64")
"""The types that the bytes of a token may have: little-endian integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How documents become sequences. `lakeckpt.pack` checks and documents the values."""

    column: str
    """The list column that holds the tokens of a document."""
    length: int
    """Tokens of a sequence."""
    before: tuple[int, ...] = ()
    """Tokens that are put before each document that has tokens."""
    after: tuple[int, ...] = ()
    """Tokens that are put after each document that has tokens."""
    padding: int = 0
    """The token that fills up the last sequence of an epoch."""
    dtype: str | None = None
    """The type of a token's bytes, one of `DTYPES`, if ``column`` is of bytes. None: it is of lists."""
    columns: tuple[str, ...] = COLUMNS[:4]
    """The columns of a batch, some of `COLUMNS`."""
    masks_ends: bool = True
    """True if the last token of a document has no label."""
    whole: bool = False
    """True if documents stand in sequences as a whole (`lakeckpt.reading.packed.whole`), and not one after another."""
    drops_long: bool = False
    """True if whole documents that are longer than a sequence are dropped. False: they are cut."""

    def __str__(self) -> str:
        if not self.whole:
            return f"sequences of {self.length} tokens of {self.column!r}"
        longer = "dropped" if self.drops_long else "cut"
        added = f" between {self.before} and {self.after}" if self.added else ""
        return f"whole documents of {self.column!r}{added} in sequences of {self.length} tokens, longer ones {longer}"

    @property
    def added(self) -> int:
        """How many tokens each document that has tokens gets beside its own."""
        return len(self.before) + len(self.after)

    @property
    def labels(self) -> bool:
        """True if a batch has labels."""
        return "labels" in self.columns

    @property
    def digest(self) -> str:
        """BLAKE2b-128 (hex) of all that decides which tokens stand in which sequence."""
        text = repr((self.column, self.length, self.before, self.after))
        if self.dtype is not None:
            text += f" of {self.dtype}"
        if self.whole:
            text += f" whole, drops {self.drops_long}"
        return blake2b(text.encode(), digest_size=16, person=b"lakeckpt-pack1").hexdigest()

    def check(self, schema: pa.Schema) -> None:
        """Raise `SchemaError` if the column does not hold tokens."""
        if self.column not in schema.names:
            names = ", ".join(schema.names[:10])
            raise SchemaError(f"the table has no column {shown(self.column)} to pack; it has {names}")
        kind = schema.field(self.column).type
        is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
        if self.dtype is not None and not is_bytes:
            raise SchemaError(
                f"column {self.column!r} is {kind}, and pack(…, dtype={self.dtype!r}) takes a column of bytes: leave "
                "dtype= out, or name the column that holds the bytes of the tokens"
            )
        if self.dtype is None and is_bytes:
            raise SchemaError(
                f"column {self.column!r} is {kind}: say what the bytes of a token are, pack(…, dtype=…), one of "
                f"{', '.join(DTYPES)}, or name the column that holds lists of tokens"
            )
        if self.dtype is None and not _is_list_of_integers(kind):
            raise SchemaError(
                f"column {self.column!r} is {kind}, and packing needs a list of integers of at most 63 bits: name the "
                "column that holds the tokens of a document, pack(…, column=…)"
            )

    def dtype_in(self, schema: pa.Schema) -> np.dtype[Any]:
        """Return the type of delivered tokens: int32, or int64 if 32 signed bits do not hold the stored type."""
        stored = schema.field(self.column).type.value_type.to_pandas_dtype() if self.dtype is None else self.dtype
        return np.promote_types(stored, np.int32)


def _is_list_of_integers(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and pa.types.is_integer(kind.value_type) and kind.value_type != pa.uint64())
