"""Random tables and random filters, for tests that compare with pyarrow's own filter of the same rows."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import reject
from hypothesis import strategies as st

from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table

UTC = datetime.UTC
_WORDS = ["", "a", "ab", "abc", "b", "é", "日本", "\U0001f30a", "a" * 70, "a" * 70 + "b", "\x7f", "zz"]
_FLOATS = [0.0, -0.0, 1.5, -2.0, float("nan"), float("inf"), float("-inf"), 2.0**24, 2.0**53, 1e300]
_MOMENTS = [datetime.datetime(2020, 1, day, hour, tzinfo=UTC) for day in (1, 2, 9) for hour in (0, 7)]
_DAYS = [datetime.date(1969, 12, 31), datetime.date(2020, 1, 1), datetime.date(2020, 2, 29)]

KINDS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int8": (pa.int8(), [-128, -1, 0, 1, 5, 127]),
    "int64": (pa.int64(), [-(2**63), -7, 0, 3, 2**53 + 1, 2**63 - 1]),
    "uint32": (pa.uint32(), [0, 1, 2**31 - 1, 2**31, 2**32 - 1]),
    "uint64": (pa.uint64(), [0, 1, 2**63 - 1, 2**63, 2**64 - 1]),
    "float": (pa.float32(), _FLOATS[:8]),
    "double": (pa.float64(), _FLOATS),
    "string": (pa.string(), _WORDS),
    "binary": (pa.binary(), [b"", b"\x00", b"\x7f", b"\x80", b"\xff\xff", b"a" * 80]),
    "bool": (pa.bool_(), [True, False]),
    "decimal": (pa.decimal128(9, 2), [decimal.Decimal(n) / 4 for n in (-900, -1, 0, 1, 9, 4000)]),
    "day": (pa.date32(), _DAYS),
    "moment": (pa.timestamp("us", tz="UTC"), _MOMENTS),
    "naive": (pa.timestamp("ms"), [one.replace(tzinfo=None) for one in _MOMENTS]),
}
"""Column name → type, values."""

_BIG = [pa.scalar(n, pa.int64()) for n in (-129, -128, 3, 128, 300, 2**24 + 1, 2**53 + 1, 2**63 - 1)]
_REAL = [pa.scalar(x, pa.float64()) for x in (0.1, 0.5, -0.0, 3.0, 1e300, float("inf"), float("nan"))]
_STAMPS = [
    pa.scalar(one, kind)
    for one in (_MOMENTS[0], _MOMENTS[3])
    for kind in (pa.timestamp("s", tz="UTC"), pa.timestamp("ns", tz="Europe/Berlin"), pa.timestamp("ms", tz="UTC"))
]
_NAIVE_STAMPS = [
    pa.scalar(_MOMENTS[2].replace(tzinfo=None), pa.timestamp("s")),
    pa.scalar(1577836800000000001, pa.timestamp("ns")),
]
_DECIMALS = [pa.scalar(decimal.Decimal(text)) for text in ("0.25", "2.250", "-225", "0.123456", "99999999999")]
OTHERS: dict[str, list[pa.Scalar]] = {
    "int8": [*_BIG, *_REAL],
    "int64": [*_BIG, *_REAL, pa.scalar(5, pa.uint8()), *_DECIMALS],
    "uint32": [*_BIG, *_REAL],
    "uint64": [pa.scalar(3, pa.int8()), pa.scalar(2**31, pa.int64()), pa.scalar(2**64 - 1, pa.uint64())],
    "float": [*_REAL, *_BIG],
    "double": [*_REAL, *_BIG, pa.scalar(0.1, pa.float32())],
    "string": [pa.scalar("ab", pa.large_string()), pa.scalar(b"ab", pa.binary())],
    "binary": [pa.scalar("ab"), pa.scalar(b"\x80", pa.large_binary())],
    "decimal": [*_DECIMALS, pa.scalar(1, pa.int64()), pa.scalar(1, pa.int8())],
    "day": [_NAIVE_STAMPS[0], pa.scalar(_DAYS[1], pa.date64())],
    "moment": _STAMPS,
    "naive": [*_NAIVE_STAMPS, pa.scalar(_DAYS[1])],
}
"""Column name → constants of other types, with which pyarrow compares them (or refuses to)."""

COMPARISONS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a == b,
    lambda a, b: a != b,
    lambda a, b: a < b,
    lambda a, b: a <= b,
    lambda a, b: a > b,
    lambda a, b: a >= b,
]


@st.composite
def tables(draw: st.DrawFn, *, max_rows: int = 24) -> pa.Table:
    """A table of some columns of `KINDS` and the row's number, ``id``; stretches of few distinct values, and nulls."""
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4, unique=True))
    rows = draw(st.integers(1, max_rows))
    columns: dict[str, pa.Array] = {"id": pa.array(range(rows), pa.int64())}
    for name in names:
        kind, values = KINDS[name]
        some = draw(st.lists(st.sampled_from([*values, None]), min_size=1, max_size=4))
        runs = draw(st.lists(st.integers(0, len(some) - 1), min_size=rows, max_size=rows))
        if draw(st.booleans()):
            runs.sort()
        columns[name] = pa.array([some[one] for one in runs], kind)
    return pa.table(columns)


@st.composite
def expressions(draw: st.DrawFn, schema: pa.Schema, *, depth: int = 2) -> pc.Expression:
    """A filter over a table of `tables`."""
    if depth and draw(st.integers(0, 2)):
        left = draw(expressions(schema, depth=depth - 1))
        how = draw(st.sampled_from(["and", "or", "not"]))
        if how == "not":
            return ~left
        right = draw(expressions(schema, depth=depth - 1))
        return left & right if how == "and" else left | right
    name = draw(st.sampled_from([one for one in schema.names if one != "id"]))
    kind, values = KINDS[name]
    column = pc.field(name)
    how = draw(st.sampled_from(["compare", "compare", "compare", "in", "null", "valid", "flag"]))
    if how == "null":
        return column.is_null()
    if how == "valid":
        return column.is_valid()
    if how == "flag" and name == "bool":
        return column
    if how == "in":
        listed = draw(st.lists(st.sampled_from([*values, None]), max_size=3))
        many = draw(st.sampled_from([0, 0, 0, 100])) if name in ("int64", "double") else 0
        return column.isin(pa.array([*listed, *(kind.to_pandas_dtype()(i) for i in range(many))], kind))
    scalars = [pa.scalar(one, kind) for one in values]
    if name in OTHERS and draw(st.booleans()):
        scalars = OTHERS[name]
    value = pc.scalar(draw(st.sampled_from(scalars)))
    compare = draw(st.sampled_from(COMPARISONS))
    return compare(value, column) if draw(st.booleans()) else compare(column, value)


def kept_by_pyarrow(table: pa.Table, expression: pc.Expression) -> pa.Table:
    """The rows that pyarrow's own filter keeps; examples that it cannot compare are passed over."""
    try:
        return table.filter(expression)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # values that do not fit; types of two time zones
        reject()


def with_deletes(table: Table, rows: dict[int, list[int]]) -> Table:
    """``table`` without these stored rows, by file."""
    import numpy as np

    index = table.index
    names = ("paths", "size_bytes", "etags", "mtime_ns", "footer_digests", "first_group", "stored_rows", "group_bytes")
    fields = {name: getattr(index, name) for name in (*names, "partitions", "schema", "columns")}
    deletes = Deletes.of({file: np.array(found, np.int64) for file, found in rows.items()})
    return Table(uri=table.uri, storage=table.storage, index=TableIndex(**fields, deletes=deletes))
