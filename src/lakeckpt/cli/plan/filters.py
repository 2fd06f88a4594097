"""This module reads ``--filters`` from JSON, and sizes what is read for the rows that a filter keeps.

JSON has no times and decimals: text that is compared with a column of such a type is read as one. Rows are counted as a
dataset counts them (`lakeckpt.reading.filters.count`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from lakeckpt.cli.plan.columns import ColumnBytes, column_bytes
from lakeckpt.errors import ConfigError
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.filters.count import Counted
from lakeckpt.reading.filters.row_filter import RowFilter, row_filter
from lakeckpt.reading.filters.selection import RowSelection

__all__ = ["Kept", "filter_of_json", "kept_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a filter leaves, and how that was found."""

    selection: RowSelection
    counted: Counted


def filter_of_json(text: str, schema: pa.Schema) -> RowFilter:
    """The filter that ``text`` says: a JSON list of [column, operator, value], or a list of such lists.

    `ConfigError` where it is none, `SchemaError` where it does not fit the table.
    """
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f'--filters must be JSON, such as [["user", "<", 20]]: {error}') from None
    if not isinstance(given, list):
        raise ConfigError(f'--filters must be a JSON list, such as [["user", "<", 20]], got {text!r:.200}')
    return row_filter(_typed(given, schema), schema)


def _typed(given: list[Any], schema: pa.Schema) -> list[Any]:
    if len(given) == 3 and all(isinstance(one, str) for one in given[:2]):
        name, operation, value = given
        kind = schema.field(name).type if name in schema.names else None
        if kind is None or not (pa.types.is_temporal(kind) or pa.types.is_decimal(kind)):
            return given
        return [name, operation, [_read(v, kind) for v in value] if isinstance(value, list) else _read(value, kind)]
    return [_typed(one, schema) if isinstance(one, list) else one for one in given]


def _read(value: Any, kind: pa.DataType) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return pa.scalar(value).cast(kind)
    except pa.ArrowException as error:
        raise ConfigError(f"--filters: {value!r} cannot be read as {kind}: {error}") from None


def kept_bytes(
    table: Table,
    columns: Sequence[str] | None,
    keep: RowFilter,
    kept: Kept,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ColumnBytes:
    """Sizes of ``columns`` (None: all) as a filtered epoch reads them.

    Of row groups of which no row stays, nothing is read; of those that stay in part, the filter's columns too, and what
    is decoded is held as far as it stays.
    """
    sizes = column_bytes(table, columns, progress=progress)
    rows, existing = kept.selection.group_rows, table.index.group_rows
    in_part = (rows > 0) & (rows < existing)
    stored = sizes.stored
    if in_part.any() and not set(keep.columns) <= set(sizes.names):
        wide = column_bytes(table, list(dict.fromkeys([*sizes.names, *keep.columns])), progress=progress)
        stored = np.where(in_part, wide.stored, stored)
    share = rows / np.maximum(existing, 1)
    return replace(
        sizes,
        stored=np.where(rows > 0, stored, 0),
        decoded=np.rint(sizes.decoded * share).astype(np.int64),
    )
