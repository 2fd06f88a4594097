"""Rows that can be counted: what a loader delivers of a table, and what a format's own reader says."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from lakeckpt import LakeDataset, LakeLoader, open_table
from lakeckpt.lake.table.table import Table


def delivered(source: Any, *, columns: list[str] | None = None, **asked: Any) -> Counter[Hashable]:
    """The rows that an epoch over the table delivers."""
    return delivered_of(open_table(source, **asked), columns=columns)


def delivered_of(table: Table, *, columns: list[str] | None = None) -> Counter[Hashable]:
    """The rows that an epoch over an opened table delivers."""
    dataset = LakeDataset(table, batch_size=5, columns=columns, output="arrow", shuffle=True, rank=0, world_size=1)
    return sum((rows_of(batch) for batch in LakeLoader(dataset)), Counter())


def rows_of(table: pa.Table) -> Counter[Hashable]:
    """The rows of an Arrow table."""
    return bag(table.to_pylist())


def bag(rows: Iterable[Mapping[str, Any]]) -> Counter[Hashable]:
    """Rows as a multiset."""
    return Counter(tuple((name, countable(row[name])) for name in sorted(row)) for row in rows)


def countable(value: Any) -> Hashable:
    """A value that can be counted, and equals another exactly if their types and values are the same."""
    if isinstance(value, dict):
        return tuple(sorted((key, countable(one)) for key, one in value.items()))
    if isinstance(value, list | tuple):
        return tuple(countable(one) for one in value)
    if isinstance(value, uuid.UUID):
        return ("bytes", value.bytes)
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else value.hex())
    return (type(value).__name__, value)
