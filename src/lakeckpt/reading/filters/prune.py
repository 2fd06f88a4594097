"""This module decides for row groups whether a filter keeps none or all of their rows, without reading the rows.

Two steps. `constant_cases` and `stored_cases` make pyarrow expressions of what is known of one column in a row group:
each value of the column satisfies one of them. `verdicts` combines the cases of several columns and asks pyarrow's
dataset layer. Each combination becomes the partition expression of a fragment that does not exist, and
``Dataset.get_fragments`` lists the fragments in which some row may satisfy the filter. A row group without a listed
fragment keeps no row. A row group keeps every row if each of its fragments is listed for the filter, and none for the
filter's negation.

pyarrow's own statistics of Parquet fragments are not used: they ignore NaN. For a case of one value (a bound, null)
pyarrow evaluates the filter; only for the values in between it compares bounds. The two must agree: pyarrow 26 errs
between bounds if a number is compared with NaN, and if ``isin`` rounds its values to the column's type. In both,
a wrong answer for the values in between is wrong for a bound as well. So each bound is a case of its own, and there the
evaluation shows the error.

Bounds are taken from a footer only if their meaning is certain:

* none of floating-point numbers (NaN has no place in the order), unsigned numbers and decimals (old writers compared
  them wrongly), INT96, nested or unknown types; none if pyarrow itself distrusts them, and none that cross;
* of text and bytes only if the file names its writer: older writers compared bytes as signed numbers;
* only if the file's type is the table's, or the cast to it keeps the order;
* text whose bounds were cut in the middle of a character has none. Cut bounds are bounds, not values that occur.

The module reads no file and starts no thread.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as fs
import pyarrow.parquet as pq

from lakeckpt.lake.table.scalars import Value, arrow_scalar
from lakeckpt.reading.filters.row_filter import RowFilter

__all__ = ["Cases", "constant_cases", "stored_cases", "verdicts"]

Flags: TypeAlias = npt.NDArray[np.bool_]
Cases: TypeAlias = list[pc.Expression]
"""Expressions; each value of one column satisfies at least one of them."""
_MOST_COMBINATIONS = 64


def verdicts(keep: RowFilter, schema: pa.Schema, groups: Sequence[Sequence[Cases]]) -> tuple[Flags, Flags]:
    """Return for each row group whether surely no row stays, and whether surely every row stays: bool, shape (groups,).

    ``groups`` has for each row group the cases of the columns with known facts. ``schema`` is the table's.
    """
    combined = [_combined(group) for group in groups]
    try:
        may_stay = _listed(keep.expression, combined, schema)
        is_listed = may_stay == [len(one) for one in combined]
        asked = [one if ask else [] for one, ask in zip(combined, is_listed.tolist(), strict=True)]
        may_go = _listed(~keep.expression, asked, schema)
    except pa.ArrowException:  # the filter cannot be evaluated for a bound: decoding raises that where it matters
        unknown = np.zeros(len(groups), np.bool_)
        return unknown, unknown
    return may_stay == 0, is_listed & (may_go == 0)


def _combined(columns: Sequence[Cases]) -> list[pc.Expression]:
    """Return the combinations of the cases of several columns: each row satisfies one.

    A column that would make more than 64 combinations is passed over.
    """
    known: list[Cases] = []
    for cases in columns:
        if len(cases) * math.prod(map(len, known)) <= _MOST_COMBINATIONS:
            known.append(cases)
    return [reduce(operator.and_, some) if some else pc.scalar(True) for some in itertools.product(*known)]


def _listed(
    expression: pc.Expression, groups: Sequence[list[pc.Expression]], schema: pa.Schema
) -> npt.NDArray[np.int64]:
    """Return for each row group how many of its combinations leave room for a row that satisfies ``expression``."""
    kind, nowhere = ds.ParquetFileFormat(), fs.LocalFileSystem()
    fragments = [
        kind.make_fragment(str(number), nowhere, partition_expression=one)
        for number, group in enumerate(groups)
        for one in group
    ]
    found = ds.FileSystemDataset(fragments, schema, kind, nowhere).get_fragments(expression)
    return np.bincount(np.array([int(one.path) for one in found], np.int64), minlength=len(groups))


def constant_cases(name: str, value: Value, kind: pa.DataType) -> Cases:
    """Return the case of a column that is ``value``, or null, in every row."""
    column = pc.field(name)
    return [column.is_null() if value is None else column == arrow_scalar(value, kind)]


def stored_cases(
    name: str, kind: pa.DataType, stored: pa.DataType, metadata: pq.FileMetaData, group: int, place: int
) -> Cases | None:
    """Return the cases of column ``name``, of type ``kind`` in the table, in row group ``group`` of a file.

    The file stores the column as ``stored``, as the leaf number ``place``. None: nothing is known.
    """
    of_group, leaf = metadata.row_group(group), metadata.schema.column(place)
    if not _is_understood(kind, stored, leaf, metadata.created_by or ""):
        return None
    chunk, column = of_group.column(place), pc.field(name)
    statistics = chunk.statistics if chunk.is_stats_set and chunk.num_values == of_group.num_rows else None
    if statistics is None:
        return None
    nulls = _nulls(statistics, leaf, chunk.num_values)
    if nulls == chunk.num_values:
        return [column.is_null()]
    found = _bounds(statistics, kind)
    if found is None:
        return None
    low, high = found
    values = [column == low] if low == high else [(column >= low) & (column <= high), column == low, column == high]
    return values if nulls == 0 else [*values, column.is_null()]


def _nulls(statistics: pq.Statistics, leaf: pq.ColumnSchema, rows: int) -> int | None:
    """Return how many values are null; None: unknown."""
    if leaf.max_definition_level == 0:
        return 0
    found = statistics.null_count if statistics.has_null_count else None
    return found if found is not None and 0 <= found <= rows else None


def _bounds(statistics: pq.Statistics, kind: pa.DataType) -> tuple[pa.Scalar, pa.Scalar] | None:
    if not statistics.has_min_max:
        return None
    try:
        low, high = pa.scalar(statistics.min, kind), pa.scalar(statistics.max, kind)
        return (low, high) if pc.less_equal(low, high).as_py() else None
    except (pa.ArrowException, ValueError, TypeError, OverflowError):  # UnicodeDecodeError is a ValueError
        return None


def _is_understood(kind: pa.DataType, stored: pa.DataType, leaf: pq.ColumnSchema, creator: str) -> bool:
    """Say whether bounds of a column mean what they say, and the cast to ``kind`` keeps each value."""
    types = pa.types
    if leaf.physical_type == "INT96" or leaf.max_repetition_level:
        return False
    if types.is_signed_integer(stored):
        return bool(types.is_signed_integer(kind))
    if _is_text(stored):
        return _is_text(kind) and bool(creator.strip())
    has_order = types.is_boolean(stored) or types.is_date32(stored) or types.is_timestamp(stored)
    return bool(stored == kind and (has_order or types.is_time(stored)))


def _is_text(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )
