"""Which columns do the folders of a table spell out (``year=2024/month=7/part-0.parquet``)?

Folders named ``key=value``, percent-decoded, as Hive wrote them; ``__HIVE_DEFAULT_PARTITION__`` is null, and so is a
key that a file's path does not have. A column is int64 where all of its values are integers, else string. Values are
kept once each, with a code per file. Only the path below the table's root counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from lakeckpt.errors import SchemaError

__all__ = ["PartitionColumn", "is_partition_folder", "partition_columns"]

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_INT64 = range(-(2**63), 2**63)

Value = str | int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionColumn:
    """A column whose value is one per file: file ``i`` has ``values[codes[i]]``; ``codes`` is int32[files]."""

    name: str
    values: tuple[Value, ...]
    codes: np.ndarray[tuple[int], np.dtype[np.int32]]

    def __post_init__(self) -> None:
        if len({type(value) for value in self.values if value is not None}) > 1:
            raise ValueError(f"the partition column {self.name!r} mixes types: {self.values[:8]!r}")
        if len(self.codes) and (int(self.codes.min()) < 0 or int(self.codes.max()) >= len(self.values)):
            raise ValueError(f"the partition column {self.name!r} has codes outside of its {len(self.values)} values")

    @property
    def field(self) -> pa.Field:
        """The column as a field of the table's schema."""
        integers = any(isinstance(value, int) for value in self.values)
        return pa.field(self.name, pa.int64() if integers else pa.string(), nullable=None in self.values)


def is_partition_folder(name: str) -> bool:
    """Whether a folder's name is ``key=value`` with a key."""
    return name.find("=") > 0


def partition_columns(paths: Sequence[str]) -> tuple[PartitionColumn, ...]:
    """The partition columns of files at these paths (relative to the table's root), in the order they first appear.

    `SchemaError` where one path has a key twice.
    """
    found = [_of_path(path) for path in paths]
    names = list(dict.fromkeys(name for pairs in found for name in pairs))
    return tuple(_column(name, [pairs.get(name) for pairs in found]) for name in names)


def _of_path(path: str) -> dict[str, str | None]:
    pairs: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        if not is_partition_folder(folder):
            continue
        name, _, raw = folder.partition("=")
        name = unquote(name)
        if name in pairs:
            raise SchemaError(f"the path {path!r} has the partition {name!r} twice: rename one of the folders")
        pairs[name] = None if raw == NULL_PARTITION else unquote(raw)
    return pairs


def _column(name: str, raw: Sequence[str | None]) -> PartitionColumn:
    distinct = sorted({value for value in raw if value is not None})
    integers = bool(distinct) and all(_INTEGER.fullmatch(text) and int(text) in _INT64 for text in distinct)
    values: list[Value] = []
    code_of: dict[str | None, int] = {}
    code_of_value: dict[Value, int] = {}
    for text in [*distinct, *([None] if None in raw else [])]:
        value: Value = int(text) if integers and text is not None else text
        if value not in code_of_value:  # "07" and "7" are one integer
            code_of_value[value] = len(values)
            values.append(value)
        code_of[text] = code_of_value[value]
    codes = np.fromiter((code_of[text] for text in raw), dtype=np.int32, count=len(raw))
    return PartitionColumn(name=name, values=tuple(values), codes=codes)
