"""Where do column chunks lie, how large are they, and are any encrypted?  What a footer says of them, without pyarrow.

pyarrow ends the process where a damaged or encrypted footer is asked about a column chunk (an exception of C++ that it
does not catch), so the bytes of the footer are read here: a few numbers for each column chunk, as an array. What is
regular is found by patterns (``chunk_patterns``), the rest is walked. Decides nothing: whether the numbers can be true
is for whoever decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lakeckpt.lake.chunk_patterns import NOT_SAID, numbers_of, skipped, taken
from lakeckpt.lake.thrift import LIST, SET, STRUCT, list_header, read_struct, read_value, skip_value

__all__ = ["ChunkFacts", "chunk_facts", "encrypted_columns"]

# Numbers of fields in Parquet's format: FileMetaData, RowGroup, ColumnChunk, ColumnMetaData.
_ROW_GROUPS, _COLUMNS, _METADATA, _CRYPTO, _COLUMN_KEY = 4, 1, 3, 8, 2
_TYPE, _CODEC, _VALUES, _UNCOMPRESSED, _COMPRESSED, _DATA_PAGE, _DICTIONARY_PAGE = 1, 4, 5, 6, 7, 9, 11
_FIELDS = (_TYPE, _CODEC, _VALUES, _UNCOMPRESSED, _COMPRESSED, _DATA_PAGE, _DICTIONARY_PAGE)
_WANTED = {_METADATA: dict.fromkeys(_FIELDS)}
_WANTED_OF_KEYS = {_ROW_GROUPS: {_COLUMNS: {_CRYPTO: None}}}
_MOST = 2**54
"""No number of a footer is as large, unless it is damaged: they are offsets, sizes and counts."""
_KEYS = tuple(union + chunk for union in (b"\x2c", b"\x0c\x04") for chunk in (b"\x19", b"\x09\x02"))
"""How the key of an encrypted column begins: the second member of a union, whose first field is a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFacts:
    """What the footer says of one column chunk; sizes in bytes, offsets from the start of the file."""

    physical_type: int
    """As Parquet numbers them: 0 BOOLEAN, 1 INT32, 2 INT64, 3 INT96, 4 FLOAT, 5 DOUBLE, 6 BYTE_ARRAY, 7 FIXED."""
    codec: int
    """As Parquet numbers them: 0 none, 1 SNAPPY, 2 GZIP, 3 LZO, 4 BROTLI, 5 LZ4, 6 ZSTD, 7 LZ4_RAW."""
    values: int
    """Values of the lowest level, nulls included."""
    uncompressed_bytes: int
    compressed_bytes: int
    data_page: int
    dictionary_page: int
    """-1: none."""

    @property
    def start(self) -> int:
        """The first byte of its pages."""
        return self.dictionary_page if 0 < self.dictionary_page < self.data_page else self.data_page

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.start + self.compressed_bytes


def chunk_facts(footer: bytes, leaves: Sequence[int]) -> npt.NDArray[np.int64]:
    """What ``footer`` says of the ``leaves`` (columns of the lowest level) of every row group.

    int64, shape (row groups, leaves, 7), in the order of the fields of `ChunkFacts`; -1 for what is not said, or is no
    number that fits. ``ValueError`` where the footer is malformed, or a row group lacks one of the leaves.
    """
    columns = _Columns(leaves)
    groups = read_struct(memoryview(footer), 0, wanted={_ROW_GROUPS: {_COLUMNS: columns}})[0].get(_ROW_GROUPS, [])
    for place, group in enumerate(groups):
        listed = group.get(_COLUMNS) if isinstance(group, dict) else None
        if type(listed) is not int or listed <= max(leaves, default=-1):
            raise ValueError(f"row group {place} does not list the column chunks that its schema has")
    return columns.facts(len(groups))


class _Columns:
    """Reads the list of a row group's column chunks: keeps what is said of ``leaves``, returns how many there are."""

    def __init__(self, leaves: Sequence[int]) -> None:
        self._numbers = {leaf: number for number, leaf in enumerate(leaves)}
        self._told: list[bytes] = []
        self._order: list[int] = []

    def __call__(self, data: memoryview, at: int, kind: int, depth: int) -> tuple[int | None, int]:
        if kind not in (LIST, SET):
            return None, skip_value(data, at, kind, depth)
        size, kind, at = list_header(data, at, depth)
        for leaf in range(size):
            number = self._numbers.get(leaf)
            if number is None:
                end = skipped(data, at) if kind == STRUCT else None
                at = skip_value(data, at, kind, depth + 1) if end is None else end
                continue
            found = taken(data, at) if kind == STRUCT else None
            told, at = self._walked(data, at, kind, depth + 1, leaf) if found is None else found
            self._told.append(told)
            self._order.append(number)
        return size, at

    def facts(self, groups: int) -> npt.NDArray[np.int64]:
        """What was kept, of so many row groups that list all of the leaves."""
        leaves = len(self._numbers)
        facts = np.empty((groups, leaves, len(_FIELDS)), np.int64)
        in_order = numbers_of(self._told).reshape(groups, leaves, len(_FIELDS))
        facts[:, self._order[:leaves]] = np.where((in_order >= 0) & (in_order < _MOST), in_order, -1)
        return facts

    def _walked(self, data: memoryview, at: int, kind: int, depth: int, leaf: int) -> tuple[bytes, int]:
        """As `taken`, of a column chunk that is not regular."""
        column, end = read_value(data, at, kind, depth, _WANTED)
        metadata = column.get(_METADATA) if isinstance(column, dict) else None
        if not isinstance(metadata, dict):
            raise ValueError(f"a row group says nothing of its column chunk {leaf}")
        said = [metadata.get(field) for field in _FIELDS]
        return b"".join(_encoded(v) if type(v) is int and 0 <= v < _MOST else NOT_SAID for v in said), end


def _encoded(number: int) -> bytes:
    """A number as thrift writes it."""
    word, out = number << 1, bytearray()
    while word >= 0x80:
        out.append(word & 0x7F | 0x80)
        word >>= 7
    return bytes([*out, word])


def encrypted_columns(footer: bytes, schema_leaves: int) -> list[int]:
    """Which leaves have a key of their own in any row group. ``ValueError`` where the footer is malformed."""
    if not any(key in footer for key in _KEYS):
        return []
    found = set()
    for group in read_struct(memoryview(footer), 0, wanted=_WANTED_OF_KEYS)[0].get(_ROW_GROUPS, []):
        for leaf, column in enumerate(group.get(_COLUMNS, []) if isinstance(group, dict) else []):
            crypto = column.get(_CRYPTO) if isinstance(column, dict) else None
            if isinstance(crypto, dict) and _COLUMN_KEY in crypto:
                found.add(leaf)
    return sorted(leaf for leaf in found if leaf < schema_leaves)
