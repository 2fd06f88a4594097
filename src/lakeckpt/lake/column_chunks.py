"""Where do column chunks lie, how large are they, and are any encrypted?  What a footer says of them, without pyarrow.

pyarrow ends the process where a damaged or encrypted footer is asked about a column chunk (an exception of C++ that it
does not catch), so the bytes of the footer are read here: a few numbers for each column chunk, as an array. Decides
nothing: whether the numbers can be true is for whoever decodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lakeckpt.lake.thrift import read_struct

__all__ = ["ChunkFacts", "chunk_facts", "encrypted_columns"]

# Numbers of fields in Parquet's format: FileMetaData, RowGroup, ColumnChunk, ColumnMetaData.
_ROW_GROUPS, _COLUMNS, _METADATA, _CRYPTO, _COLUMN_KEY = 4, 1, 3, 8, 2
_TYPE, _CODEC, _VALUES, _UNCOMPRESSED, _COMPRESSED, _DATA_PAGE, _DICTIONARY_PAGE = 1, 4, 5, 6, 7, 9, 11
_FIELDS = (_TYPE, _CODEC, _VALUES, _UNCOMPRESSED, _COMPRESSED, _DATA_PAGE, _DICTIONARY_PAGE)
_WANTED = {_ROW_GROUPS: {_COLUMNS: {_METADATA: dict.fromkeys(_FIELDS), _CRYPTO: None}}}
_WANTED_OF_KEYS = {_ROW_GROUPS: {_COLUMNS: {_CRYPTO: None}}}
_KEY = re.compile(rb"(?:\x2c|\x0c\x04)(?:\x19|\x09\x02)")
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
    groups = read_struct(memoryview(footer), 0, wanted=_WANTED)[0].get(_ROW_GROUPS, [])
    facts = np.full((len(groups), len(leaves), len(_FIELDS)), -1, np.int64)
    for place, group in enumerate(groups):
        columns = group.get(_COLUMNS) if isinstance(group, dict) else None
        if not isinstance(columns, list) or len(columns) <= max(leaves, default=-1):
            raise ValueError(f"row group {place} does not list the column chunks that its schema has")
        for number, leaf in enumerate(leaves):
            metadata = columns[leaf].get(_METADATA) if isinstance(columns[leaf], dict) else None
            if not isinstance(metadata, dict):
                raise ValueError(f"row group {place} says nothing of its column chunk {leaf}")
            said = [metadata.get(field) for field in _FIELDS]
            facts[place, number] = [v if type(v) is int and 0 <= v < 2**62 else -1 for v in said]
    return facts


def encrypted_columns(footer: bytes, schema_leaves: int) -> list[int]:
    """Which leaves have a key of their own in any row group. ``ValueError`` where the footer is malformed."""
    if _KEY.search(footer) is None:
        return []
    found = set()
    for group in read_struct(memoryview(footer), 0, wanted=_WANTED_OF_KEYS)[0].get(_ROW_GROUPS, []):
        for leaf, column in enumerate(group.get(_COLUMNS, []) if isinstance(group, dict) else []):
            crypto = column.get(_CRYPTO) if isinstance(column, dict) else None
            if isinstance(crypto, dict) and _COLUMN_KEY in crypto:
                found.add(leaf)
    return sorted(leaf for leaf in found if leaf < schema_leaves)
