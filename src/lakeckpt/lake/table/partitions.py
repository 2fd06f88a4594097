"""This module holds columns that have one value for each file, by the table's metadata or by the names of its folders.

A table format gives the values in the type of the column. `PartitionColumn` keeps each value once, with a code for each
file. For plain Parquet, `partition_columns` reads the values from the paths: folders named ``key=value``,
percent-decoded, as Hive writes them (``year=2024/month=7/part-0.parquet``). ``__HIVE_DEFAULT_PARTITION__`` is null, and
so is a key that the path of a file does not have. A column is int64 if all of its values are integers, else string.
Only the path below the root of the table counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from lakeckpt.errors import SchemaError
from lakeckpt.lake.table.scalars import Value, from_plain, to_plain

__all__ = ["STORED", "PartitionColumn", "Value", "coded", "is_partition_folder", "partition_columns", "partition_names"]

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_INT64 = range(-(2**63), 2**63)
Int32Array = np.ndarray[tuple[int], np.dtype[np.int32]]

STORED = -1
"""The code of a file that stores the column itself: a table's partitioning may have changed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionColumn:
    """A column whose value is one per file: file ``i`` has ``values[codes[i]]``, all of ``type``; see `value_of`.

    ``codes`` is int32[files]; `STORED` if the file has the column like any other. ``values`` are distinct, each as
    ``pyarrow.scalar(value, type)`` takes it.
    """

    name: str
    values: tuple[Value, ...]
    codes: Int32Array
    type: pa.DataType

    @property
    def field(self) -> pa.Field:
        """The column as a field of the table's schema."""
        stored = len(self.codes) > 0 and int(self.codes.min()) == STORED
        return pa.field(self.name, self.type, nullable=stored or None in self.values)

    def is_stored(self, file: int) -> bool:
        """Return whether the file stores the column itself, so that its rows may have different values."""
        return int(self.codes[file]) == STORED

    def value_of(self, file: int) -> Value:
        """Return the value of all rows of a file; ``ValueError`` if the file stores the column itself."""
        code = int(self.codes[file])
        if code == STORED:
            raise ValueError(f"file {file} stores the column {self.name!r}")
        return self.values[code]

    def plain_values(self) -> list[object]:
        """Return the values in a form that the wire can carry."""
        return [to_plain(value, self.type) for value in self.values]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], codes: Int32Array, schema: pa.Schema) -> PartitionColumn:
        """Return the column of a document: its name and `plain_values`."""
        kind = schema.field(plain["name"]).type
        values = tuple(from_plain(value, kind) for value in plain["values"])
        return cls(name=plain["name"], values=values, codes=codes, type=kind)


def is_partition_folder(name: str) -> bool:
    """Return whether a folder's name is ``key=value`` with a key."""
    return name.find("=") > 0


def partition_columns(paths: Sequence[str]) -> tuple[PartitionColumn, ...]:
    """The partition columns of files at these paths (relative to the table's root), in the order they first appear.

    `SchemaError` if one path has a key twice.
    """
    found = [_of_path(path) for path in paths]
    names = list(dict.fromkeys(name for pairs in found for name in pairs))
    return tuple(_column(name, [pairs.get(name) for pairs in found]) for name in names)


def partition_names(path: str) -> set[str]:
    """Return the names of the partition columns in a path."""
    return set(_of_path(path))


def _of_path(path: str) -> dict[str, str | None]:
    pairs: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        if not is_partition_folder(folder):
            continue
        name, _, raw = folder.partition("=")
        name = _decoded(name, path)
        if name in pairs:
            raise SchemaError(f"the path {path!r} has the partition {name!r} twice: rename one of the folders")
        pairs[name] = None if raw == NULL_PARTITION else _decoded(raw, path)
    return pairs


def _decoded(text: str, path: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise SchemaError(
            f"the path {path!r} has a partition that is not UTF-8 when it is percent-decoded ({error}): rename it"
        ) from error


def _column(name: str, raw: Sequence[str | None]) -> PartitionColumn:
    texts = {text for text in raw if text is not None}
    if texts and all(_INTEGER.fullmatch(text) and int(text) in _INT64 for text in texts):
        numbers = [None if text is None else int(text) for text in raw]  # "07" and "7" are one integer
        return coded(name, pa.int64(), numbers, [False] * len(raw))
    return coded(name, pa.string(), raw, [False] * len(raw))


def coded(name: str, kind: pa.DataType, values: Sequence[Value], stored: Sequence[bool]) -> PartitionColumn:
    """The column of these values, one per file in their order; those of files that are ``stored`` do not matter."""
    plain = [None if own else to_plain(value, kind) for value, own in zip(values, stored, strict=True)]
    known = {key: value for key, value, own in zip(plain, values, stored, strict=True) if not own}
    order = sorted(known, key=lambda key: (key is None, key))
    place = {key: i for i, key in enumerate(order)}
    codes = [STORED if own else place[key] for key, own in zip(plain, stored, strict=True)]
    return PartitionColumn(
        name=name, values=tuple(known[key] for key in order), codes=np.array(codes, np.int32), type=kind
    )
