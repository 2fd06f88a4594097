"""This module decides for row groups whether a filter keeps none or all of their rows, without reading the rows.

Three steps. `constant_values` and `stored_values` say what is known of one column in a row group: its values lie
between two bounds, or are null, or NaN. `guarantees_of` makes a pyarrow expression of each combination of these cases
over several columns: each row satisfies one of them. `Pruner.verdicts` then asks pyarrow's dataset layer: each
expression becomes the partition expression of a fragment that does not exist, and ``Dataset.get_fragments`` lists the
fragments in which some row may satisfy the filter. A row group of which no fragment is listed keeps no row. A row group
keeps every row if each of its fragments is listed for the filter, and none for the filter's negation.

pyarrow's own statistics of Parquet fragments are not used: they ignore NaN. For a case of one value (a bound, null,
NaN) pyarrow evaluates the filter; only for the values in between it compares bounds. The two must agree: pyarrow 26
errs between bounds where a number is compared with NaN, and where ``isin`` rounds its values to the column's type. In
both, a wrong answer for the values in between is wrong for a bound as well, and there the evaluation shows it. So a row
group that the bounds settle is asked about once more, with each bound as a case of its own.

Bounds are taken from a footer only where their meaning is certain:

* none where pyarrow itself distrusts them, of crossed bounds, of INT96, float16, nested or unknown types;
* unsigned numbers and decimals stored as bytes only from writers that are known to compare them rightly, text and bytes
  only where the file names its writer: older ones compared bytes as signed numbers;
* only where the file's type is the table's, or the cast to it keeps the order;
* text whose bounds were cut in the middle of a character has none. Cut bounds are bounds, not values that occur.

The module reads no file and starts no thread.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as fs
import pyarrow.parquet as pq

from lakeckpt.lake.table.scalars import Value, arrow_scalar
from lakeckpt.reading.filters.row_filter import RowFilter

__all__ = ["Pruner", "Values", "Verdicts", "constant_values", "guarantees_of", "stored_values"]

Flags = npt.NDArray[np.bool_]
_MOST_GUARANTEES = 64
_CREATOR = re.compile(r"\s*(\S+) version (\d+)\.(\d+)")
_COMPARES_RIGHTLY = {"parquet-cpp-arrow": (4, 0), "parquet-mr": (1, 10), "parquet-rs": (30, 0)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdicts:
    """For each of G row groups, bool: whether surely no row stays, and whether surely every row stays."""

    none: Flags
    every: Flags


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Values:
    """What is known of the values of one column in a row group."""

    name: str
    low: pa.Scalar | None = None
    """No value is below, save nulls and NaN; None: there are no other values."""
    high: pa.Scalar | None = None
    is_one: bool = False
    """Whether every value is ``low``."""
    nulls: bool = False
    """Whether some value may be null."""
    nan: bool = False
    """Whether some value may be NaN, whatever the bounds are."""

    def cases(self, *, bounds: bool) -> list[pc.Expression]:
        """Return expressions of which each value satisfies one; with ``bounds``, each bound is a case, too."""
        column = pc.field(self.name)
        found = []
        if self.is_one:
            found.append(column == self.low)
        elif self.low is not None:
            found.append((column >= self.low) & (column <= self.high))
            found += [column == self.low, column == self.high] if bounds else []
        if self.nulls:
            found.append(column.is_null())
        if self.nan and self.low is not None:
            found.append(column == pa.scalar(float("nan"), self.low.type))
        return found


class Pruner:
    """Compares a filter with what is known of row groups of tables of ``schema``. Threads may share it."""

    def __init__(self, keep: RowFilter, schema: pa.Schema) -> None:
        self._schema = pa.schema([schema.field(name) for name in keep.columns])
        self._expression = keep.expression
        self._format = ds.ParquetFileFormat()
        self._nowhere = fs.LocalFileSystem()

    def verdicts(self, groups: Sequence[Sequence[Values]]) -> Verdicts:
        """Return the verdicts on row groups. Of each, the known columns are given."""
        try:
            first = self._settled([guarantees_of(group, bounds=False) for group in groups])
            is_settled = (first.none | first.every).tolist()
            again = [
                guarantees_of(group, bounds=True) if ask else [] for group, ask in zip(groups, is_settled, strict=True)
            ]
            second = self._settled(again)
        except pa.ArrowException:  # the filter cannot be evaluated for a bound: decoding raises that where it matters
            nothing = np.zeros(len(groups), np.bool_)
            return Verdicts(none=nothing, every=nothing)
        return Verdicts(none=first.none & second.none, every=first.every & second.every)

    def _settled(self, groups: Sequence[list[pc.Expression]]) -> Verdicts:
        """Return the verdicts on row groups, of which each is given by its guarantees."""
        may_stay = self._listed(self._expression, groups)
        whole = may_stay == [len(one) for one in groups]
        asked = [one if ask else [] for one, ask in zip(groups, whole.tolist(), strict=True)]
        may_go = self._listed(~self._expression, asked)
        return Verdicts(none=may_stay == 0, every=whole & (may_go == 0))

    def _listed(self, expression: pc.Expression, groups: Sequence[list[pc.Expression]]) -> npt.NDArray[np.int64]:
        """Return for each row group how many of its guarantees leave room for a row that satisfies ``expression``."""
        fragments = [
            self._format.make_fragment(str(number), self._nowhere, partition_expression=one)
            for number, group in enumerate(groups)
            for one in group
        ]
        found = ds.FileSystemDataset(fragments, self._schema, self._format, self._nowhere).get_fragments(expression)
        return np.bincount(np.array([int(one.path) for one in found], np.int64), minlength=len(groups))


def guarantees_of(columns: Iterable[Values], *, bounds: bool) -> list[pc.Expression]:
    """Return the combinations of the cases of several columns: each row satisfies one.

    A column that would make more than 64 is passed over. ``bounds``: see `Values.cases`.
    """
    known: list[list[pc.Expression]] = []
    for one in columns:
        cases = one.cases(bounds=bounds)
        if len(cases) * math.prod(map(len, known)) <= _MOST_GUARANTEES:
            known.append(cases)
    return [reduce(operator.and_, some) if some else pc.scalar(True) for some in itertools.product(*known)]


def constant_values(name: str, value: Value, kind: pa.DataType) -> Values:
    """Return what is known of a column that is ``value``, or null, in every row."""
    if value is None:
        return Values(name=name, nulls=True)
    return Values(name=name, low=arrow_scalar(value, kind), is_one=True)


def stored_values(
    name: str, kind: pa.DataType, stored: pa.DataType, metadata: pq.FileMetaData, group: int, place: int
) -> Values | None:
    """Return what is known of column ``name``, of type ``kind`` in the table, in row group ``group`` of a file.

    The file stores the column as ``stored``, as the leaf number ``place``. None: nothing is known.
    """
    of_group, leaf = metadata.row_group(group), metadata.schema.column(place)
    if not _is_understood(kind, stored, leaf, metadata.created_by or ""):
        return None
    chunk = of_group.column(place)
    statistics = chunk.statistics if chunk.is_stats_set and chunk.num_values == of_group.num_rows else None
    if statistics is None:
        return None
    nulls = _nulls(statistics, leaf, chunk.num_values)
    if nulls == chunk.num_values:
        return Values(name=name, nulls=True)
    found = _bounds(statistics, kind)
    if found is None:
        return None
    low, high = found
    nan = pa.types.is_floating(kind)  # 0.0 equals -0.0, too, and pyarrow's isin tells them apart
    return Values(name=name, low=low, high=high, is_one=low == high and not nan, nulls=nulls != 0, nan=nan)


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
        return (low, high) if pc.less_equal(low, high).as_py() else None  # not where they cross, or are NaN
    except (pa.ArrowException, ValueError, TypeError, OverflowError):  # UnicodeDecodeError is a ValueError
        return None


def _is_understood(kind: pa.DataType, stored: pa.DataType, leaf: pq.ColumnSchema, creator: str) -> bool:
    """Say whether bounds of a column mean what they say."""
    types = pa.types
    if leaf.physical_type == "INT96" or leaf.max_repetition_level or not _widens(stored, kind):
        return False
    if types.is_unsigned_integer(stored) or (types.is_decimal(stored) and not leaf.physical_type.startswith("INT")):
        return _compares_rightly(creator)
    if types.is_integer(stored) or types.is_decimal(stored) or types.is_boolean(stored):
        return True
    if _is_text(stored):
        return bool(creator.strip())
    is_time = types.is_date32(stored) or types.is_timestamp(stored) or types.is_time(stored)
    return bool(is_time or types.is_float32(stored) or types.is_float64(stored))


def _compares_rightly(creator: str) -> bool:
    match = _CREATOR.match(creator)
    least = _COMPARES_RIGHTLY.get(match.group(1)) if match else None
    return match is not None and least is not None and (int(match.group(2)), int(match.group(3))) >= least


def _widens(stored: pa.DataType, kind: pa.DataType) -> bool:
    """Say whether the cast of values of ``stored`` to ``kind`` keeps each value."""
    types = pa.types
    if types.is_integer(stored) and types.is_integer(kind):
        return True
    if types.is_float32(stored) and types.is_float64(kind):
        return True
    return bool(stored == kind or (_is_text(stored) and _is_text(kind)))


def _is_text(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )
