"""This module reads ``--filters`` from JSON.

JSON has no times and decimals: text that is compared with a column of such a type is read as one.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from lakeckpt.errors import ConfigError
from lakeckpt.reading.filters.row_filter import RowFilter, row_filter

__all__ = ["filter_of_json"]


def filter_of_json(text: str, schema: pa.Schema) -> RowFilter:
    """Return the filter that ``text`` says: a JSON list of [column, operator, value], or a list of such lists.

    `ConfigError` where ``text`` is no filter, `SchemaError` where the filter does not fit the table.
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
