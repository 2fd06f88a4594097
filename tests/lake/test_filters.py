"""A filter says what pyarrow's says, under a digest that no spelling changes; what is no filter is refused."""

from __future__ import annotations

import datetime
import decimal
import functools
import operator
import pickle
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt.errors import ConfigError, SchemaError
from lakeckpt.lake.filters import row_filter
from tests.lake.filtering import expressions, kept_by_pyarrow, tables

f = pc.field
SCHEMA = pa.schema(
    [
        ("a", pa.int32()),
        ("b", pa.string()),
        ("u", pa.uint64()),
        ("x", pa.float64()),
        ("d", pa.decimal128(9, 2)),
        ("t", pa.timestamp("us", tz="UTC")),
        ("s", pa.struct([("y", pa.int64())])),
        ("flag", pa.bool_()),
    ]
)


@given(data=st.data())
def test_a_filter_keeps_the_rows_that_pyarrow_keeps(data: st.DataObject) -> None:
    table = data.draw(tables())
    expression = data.draw(expressions(table.schema))
    wanted = kept_by_pyarrow(table, expression)["id"].to_pylist()
    kept = table.filter(row_filter(expression, table.schema).mask(table))
    assert kept["id"].to_pylist() == wanted


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((f("a") > 3) & (f("b") == "x"), (f("b") == "x") & (f("a") > 3)),
        ((f("a") > 3) & ((f("b") == "x") & f("flag")), ((f("a") > 3) & (f("b") == "x")) & f("flag")),
        ((f("a") > 3) | (f("a") > 3), f("a") > 3),
        (f("a") > 3, pc.scalar(3) < f("a")),
        (f("a") > 3, f("a") > pa.scalar(3, pa.int8())),
        (f("a") > 3, f("a") > 3.0),
        (f("d") == 1, f("d") == decimal.Decimal("1.00")),
        (f("b").isin(["x", "y", "x"]), f("b").isin(["y", "x"])),
        (f("b").isin(["x"]), f("b").isin(pa.array(["x"], pa.large_string()))),
        (~~(f("a") > 3), f("a") > 3),
        (~(f("a") == 3), f("a") != 3),
        (f("a") > f("u"), f("u") < f("a")),
        ([("a", ">", 3), ("b", "in", {"x", "y"})], (f("a") > 3) & f("b").isin(["x", "y"])),
        ([[("a", ">", 3)], [("b", "==", "x")]], (f("a") > 3) | (f("b") == "x")),
        ([["a", "=", 3]], [("a", "==", 3)]),
        ([("a", "not in", [1])], ~f("a").isin([1])),
    ],
)
def test_two_spellings_of_one_filter_have_one_digest(one: Any, other: Any) -> None:
    assert row_filter(one, SCHEMA) == row_filter(other, SCHEMA)
    assert row_filter(one, SCHEMA).digest == row_filter(other, SCHEMA).digest


LONG = [str(i) for i in range(100)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f("a") > 3, f("a") >= 3),
        (f("a") > 3, f("a") > 4),
        (f("a") > 3, f("u") > 3),
        (f("a") > 3, ~(f("a") <= 3)),
        (f("b") == "1", f("b") == "01"),
        (f("b").isin(LONG), f("b").isin([*LONG[:50], "another", *LONG[51:]])),  # in pyarrow's text both are one
        (f("b").isin(["x"]), f("b").isin(["x", None])),
        (f("b").isin(["x"]), f("b") == "x"),
        (f("x") == 0.0, f("x").isin([0.0])),
        (f("a").is_null(), f("a").is_valid()),
        (f("x").is_null(), f("x").is_null(nan_is_null=True)),
        (pc.match_substring(f("b"), "x"), pc.match_substring(f("b"), "x", ignore_case=True)),
        (f("s", "y") > 1, f("a") > 1),
        (f("a").cast("int8") > 1, f("a").cast("int16") > 1),
    ],
    ids=str,
)
def test_two_filters_have_two_digests(one: Any, other: Any) -> None:
    assert row_filter(one, SCHEMA).digest != row_filter(other, SCHEMA).digest


@pytest.mark.parametrize(
    ("filters", "digest"),
    [
        (f("a") > 3, "e821a42fd4b551badf86c3511092f03a"),
        ([("a", ">", 3), ("b", "in", ["x", "y"])], "8670bd6c56f162a94e66391da99d8ab0"),
        (~(f("x") < 0.5) | f("flag") | f("t").is_null(), "f0f83edb5de2a1f5f0cd9feb415d8244"),
        (f("t") >= datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), "01ccf80bb35cef2d5543f9867d2fbb7a"),
        (pc.match_substring(f("b"), "q", ignore_case=True), "664b598598d66f2546278de2a216fdf7"),
        ((f("s", "y") + 1 == 2) & (f("d") < decimal.Decimal("2.5")), "90dc65d8a426c6aa1d275fbd35d15558"),
        (f("a").cast("int8").isin([1, None]), "28e259292e83320139fb4faa55cd0ef2"),
    ],
)
def test_digests_are_those_of_the_first_release(filters: Any, digest: str) -> None:
    """They are in states and in the names of saved selections: whatever changes here, changes which filter it is."""
    assert row_filter(filters, SCHEMA).digest == digest


@settings(max_examples=20)
@given(data=st.data())
def test_a_filter_that_was_pickled_to_a_worker_is_the_same(data: st.DataObject) -> None:
    table = data.draw(tables())
    expression = data.draw(expressions(table.schema))
    kept_by_pyarrow(table, expression)
    keep = row_filter(expression, table.schema)
    again = pickle.loads(pickle.dumps(keep))
    assert again == keep and again.mask(table).equals(keep.mask(table))


@pytest.mark.parametrize(
    ("filters", "error", "match"),
    [
        (f("zz") > 1, SchemaError, "'zz'"),
        ([("bb", "==", "x")], SchemaError, "it has 'b'"),
        (f("b") > 3, SchemaError, "b is string"),
        ([("b", ">", 3)], SchemaError, r"\('b', '>', 3\) compares the column 'b', which is string, with 3"),
        ([("t", ">", datetime.datetime(2024, 1, 1))], SchemaError, "timestamp"),
        (f("a") + 1, SchemaError, "gives int32 and not true or false"),
        (f("s"), SchemaError, "not true or false"),
        (pc.Expression._call("random", [], pc.RandomOptions()) > f("x"), ConfigError, "'random'"),
        (pc.Expression._call("strftime", [f("t")], pc.StrftimeOptions()) == "x", ConfigError, "'strftime'"),
        (f(0) > 1, ConfigError, "by their names"),
        (pc.scalar(True), ConfigError, "no column"),
        (f("s") == pa.scalar({"y": 1}, SCHEMA.field("s").type), ConfigError, "constant"),
        ([("a", "~", 3)], ConfigError, "operator '~'"),
        ([("a", ">", None)], ConfigError, "is_null"),
        ([("b", "in", "abc")], ConfigError, "list of values"),
        ([("a", "in", 3)], ConfigError, "list of values"),
        ([], ConfigError, "leave filters out"),
        ([[]], ConfigError, "filters are"),
        ([[("a", ">", 3)], []], ConfigError, "filters are"),
        ("a > 3", ConfigError, "filters are"),
        ({"a": 3}, ConfigError, "filters are"),
        ([("a", ">")], ConfigError, "filters are"),
        ([("a", ">", 1j)], ConfigError, "cannot hold"),
        ([("t", "in", [datetime.datetime(2024, 1, 1)])], SchemaError, "timezone"),
        ([("a", ">", 2**70)], ConfigError, "cannot hold"),
        ([("a", "in", [2**70])], ConfigError, "cannot hold"),
        ([("b", "==", "\ud800")], ConfigError, "cannot hold"),
        (3, ConfigError, "filters are"),
    ],
    ids=str,
)
def test_what_is_no_filter_of_the_table_is_refused(filters: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        row_filter(filters, SCHEMA)


def test_nulls_go_where_the_filter_is_null_and_stay_where_it_is_true() -> None:
    table = pa.table({"a": pa.array([1, 2, None])})
    kept = {
        str(one): table.filter(row_filter(one, table.schema).mask(table))["a"].to_pylist()
        for one in ([("a", "!=", 1)], [("a", "not in", [1])], [("a", "in", [None])], f("a").is_null() | (f("a") == 1))
    }
    assert list(kept.values()) == [[2], [2, None], [None], [1, None]]


def test_numbers_are_compared_where_pyarrow_overflows() -> None:
    """pyarrow compares uint64 as int64, and decimals with integers as decimals of 19 digits more: and then fails."""
    big = pa.table({"u": pa.array([1, 2**63 + 5, None], pa.uint64()), "d": pa.array([decimal.Decimal("1.25")] * 3)})
    for one, kept in ((f("u") > 3, [False, True, False]), (f("d") > 1, [True] * 3)):
        assert row_filter(one, big.schema).mask(big).to_pylist() == kept


@pytest.mark.parametrize("operation", ["==", "<", ">=", "in"])
def test_numbers_above_int64_are_compared_in_their_column(operation: str) -> None:
    values = [2**63 - 1, 2**63, 2**64 - 1]
    table = pa.table({"u": pa.array(values, pa.uint64())})
    wanted = {"==": [2**63], "<": [2**63 - 1], ">=": [2**63, 2**64 - 1], "in": [2**63]}[operation]
    given = [2**63] if operation == "in" else 2**63
    assert table.filter(row_filter([("u", operation, given)], SCHEMA).mask(table))["u"].to_pylist() == wanted


@pytest.mark.parametrize("given", [[("x", "<", 2**63)], [("x", "in", [1, 2**70])], [("x", ">=", -(2**80))]])
def test_integers_above_int64_are_compared_with_floats(given: Any) -> None:
    table = pa.table({"x": [1.0, 2.0**70]})
    wanted = {"<": [1.0], "in": [1.0, 2.0**70], ">=": [1.0, 2.0**70]}[given[0][1]]
    assert table.filter(row_filter(given, SCHEMA).mask(table))["x"].to_pylist() == wanted
    with pytest.raises(ConfigError, match="is no floating-point number"):
        row_filter([("x", "<", 2**63 + 1)], SCHEMA)


@pytest.mark.parametrize("chained", ["to the left", "to the right", "tuples"])
def test_a_thousand_alternatives_are_one_filter_however_they_are_nested(chained: str) -> None:
    parts = [f("a") == n for n in range(1000)]
    given: Any = [[("a", "==", n)] for n in range(1000)]
    if chained == "to the left":
        given = functools.reduce(operator.or_, parts)
    elif chained == "to the right":
        given = functools.reduce(lambda right, left: left | right, parts[::-1])
    found = row_filter(given, SCHEMA)
    assert found.digest == row_filter(functools.reduce(operator.or_, parts[::-1]), SCHEMA).digest
    table = pa.table({"a": pa.array([-1, 0, 999, 1000], pa.int32())})
    assert found.mask(table).to_pylist() == [False, True, True, False]


def test_what_is_nested_too_deep_is_refused() -> None:
    given = f("a") == 0
    for n in range(2000):
        given = (given & (f("u") == n)) | (f("a") == n)
    with pytest.raises(ConfigError, match="too many parts inside one another"):
        row_filter(given, SCHEMA)


def test_a_value_that_cannot_be_compared_is_named_when_it_is_met() -> None:
    table = pa.table({"u": pa.array([2**63 + 5], pa.uint64())})
    keep = row_filter(f("u") > -1, table.schema)
    with pytest.raises(SchemaError, match="u > -1"):
        keep.mask(table)


def test_nanoseconds_are_compared_and_spelled_without_pandas() -> None:
    kind = pa.timestamp("ns")
    table = pa.table({"t": pa.array([1577836800000000001, 1577836800000000002, None], kind)})
    odd = pa.scalar(1577836800000000001, kind)
    for one, kept in (
        (f("t") == odd, [True, False, False]),
        (f("t").isin(pa.array([odd, pa.scalar(None, kind)])), [True, False, True]),
        (f("t") > odd, [False, True, False]),
    ):
        keep = row_filter(one, table.schema)
        assert keep.mask(table).to_pylist() == kept and "2020-01-01 00:00:00.000000001" in str(keep)
    hours = pa.table({"d": pa.array([3], pa.duration("ns"))})
    assert str(row_filter(f("d") == pa.scalar(3, pa.duration("ns")), hours.schema)) == "d == 3"


def test_tuples_mean_what_they_mean_to_pyarrow() -> None:
    table = pa.table({"a": pa.array([1, 2, 3, None]), "b": pa.array(["x", "y", None, "x"])})
    for filters in (
        [("a", ">", 1)],
        [("a", "<=", 2), ("b", "!=", "x")],
        [[("a", "in", [1, 3])], [("b", "not in", ["x"])]],
        [("b", "in", ("x",))],
    ):
        mine = table.filter(row_filter(filters, table.schema).mask(table))
        assert mine.equals(table.filter(pq.filters_to_expression(filters)))


NOON, PAST_NOON = datetime.datetime(2024, 1, 1, 12), datetime.datetime(2024, 1, 1, 12, 0, 0, 5)


@pytest.mark.parametrize(
    ("kind", "held", "between"),
    [
        (pa.int64(), 1, 1.5),
        (pa.uint8(), 1, np.float32(1.5)),
        (pa.timestamp("s"), NOON, PAST_NOON),
        (pa.timestamp("ms", tz="UTC"), NOON.replace(tzinfo=datetime.UTC), PAST_NOON.replace(tzinfo=datetime.UTC)),
        (pa.time32("ms"), NOON.time(), PAST_NOON.time()),
        (pa.duration("s"), datetime.timedelta(seconds=1), datetime.timedelta(seconds=1, microseconds=5)),
    ],
    ids=str,
)
def test_a_value_that_no_row_can_have_is_not_cut_to_one_that_some_have(
    kind: pa.DataType, held: Any, between: Any
) -> None:
    table = pa.table({"a": pa.array([held, None], kind)})
    for operation, values in (("in", [between]), ("not in", [between]), ("in", [held, between]), ("in", [held])):
        filters = [("a", operation, values)]
        mine = table.filter(row_filter(filters, table.schema).mask(table))
        assert mine.equals(table.filter(pq.filters_to_expression(filters))), filters
    assert row_filter([("a", "in", [held])], table.schema) == row_filter(
        f("a").isin(pa.array([held], kind)), table.schema
    )


NOON, TWO, THREE = datetime.datetime(1970, 1, 2, 12), datetime.date(1970, 1, 2), datetime.date(1970, 1, 3)
ZERO, TENTH, ONE_AND_A_HALF = datetime.datetime(1970, 1, 1), decimal.Decimal("0.1"), decimal.Decimal("1.5")


@pytest.mark.parametrize(
    ("kind", "rows", "values", "kept"),
    [
        (pa.int64(), [1, 2, 2**53 + 1], [2**53 + 1, 1.5], [2**53 + 1]),
        (pa.uint64(), [1, 2, 2**63 + 5], [2**63 + 5, 1.5, np.float32(2.5)], [2**63 + 5]),
        (pa.int8(), [1, 2], [ONE_AND_A_HALF, 1], [1]),
        (pa.int8(), [1, 2], np.array([1.5, 2.0]), [2]),
        (pa.decimal128(20, 0), [1, 2], [1.5, 1], [1]),
        (pa.decimal128(20, 0), [1, 2], [ONE_AND_A_HALF, 1], [1]),
        (pa.decimal256(40, 0), [1, 2], [1.5], []),
        (pa.decimal128(5, 1), [TENTH, ONE_AND_A_HALF], [0.1, 2, 1.5], [TENTH, ONE_AND_A_HALF]),
        (pa.decimal128(5, 1), [TENTH, ONE_AND_A_HALF], [2, decimal.Decimal("1.50")], [ONE_AND_A_HALF]),
        (pa.date32(), [TWO, THREE], [NOON, THREE], [THREE]),
        (pa.date64(), [TWO, THREE], [NOON, NOON], []),
        (pa.timestamp("us"), [ZERO, NOON], [pd.Timestamp(1), datetime.datetime(1, 1, 1)], []),
        (pa.timestamp("us"), [ZERO, NOON], [ZERO, pd.Timestamp(1)], [ZERO]),
        (pa.time32("s"), [datetime.time(0, 0, 1)], [datetime.time(0, 0, 1, 500)], []),
        (pa.string(), ["a", "b"], [b"a"], ["a"]),
        (pa.binary(), [b"a", b"b"], ["a", bytearray(b"b")], [b"a", b"b"]),
        (pa.binary(1), [b"a", b"b"], ["a"], [b"a"]),
        (pa.bool_(), [True, False], [True], [True]),
    ],
    ids=str,
)
def test_in_keeps_the_rows_that_are_equal_to_a_value(kind: pa.DataType, rows: Any, values: Any, kept: Any) -> None:
    table = pa.table({"a": pa.array(rows, kind)})
    for operation, expected in (("in", kept), ("not in", [row for row in rows if row not in kept])):
        found = row_filter([("a", operation, values)], table.schema).mask(table)
        assert table["a"].filter(found).equals(pa.chunked_array([pa.array(expected, kind)])), operation


def test_in_refuses_moments_of_a_zone_where_the_column_has_none() -> None:
    table = pa.table({"a": pa.array([0, 1], pa.timestamp("us"))})
    aware = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    for values in ([aware], [ZERO, aware], [np.datetime64(0, "us"), aware]):
        with pytest.raises(SchemaError, match="does not fit the table"):
            row_filter([("a", "in", values)], table.schema)


@pytest.mark.parametrize("unit", ["us", "ns"])
def test_nanoseconds_of_pandas_are_not_cut(unit: str) -> None:
    odd, length = pd.Timestamp(1577836800000000001), pd.Timedelta(1, "ns")
    aware = odd.tz_localize("UTC")
    ticks = [1577836800000000001, 1577836800000000000] if unit == "ns" else [1577836800000001, 1577836800000000]
    table = pa.table(
        {
            "t": pa.array(ticks, pa.timestamp(unit)),
            "z": pa.array(ticks, pa.timestamp(unit, tz="UTC")),
            "d": pa.array([1, 0], pa.duration(unit)),
        }
    )
    for name, value in (("t", odd), ("z", aware), ("d", length)):
        for operation, asked in (("==", value), ("in", [value]), ("in", [value, value])):
            kept = row_filter([(name, operation, asked)], table.schema).mask(table).to_pylist()
            assert kept == [unit == "ns", False], (name, operation)
    assert row_filter([("t", "<", odd)], table.schema).mask(table).to_pylist() == [False, True]


@pytest.mark.parametrize(
    ("kind", "view", "values"), [(pa.string(), pa.string_view(), ["x"]), (pa.binary(), pa.binary_view(), [b"x"])]
)
def test_constants_that_are_views_are_the_text_or_bytes_that_they_show(
    kind: pa.DataType, view: pa.DataType, values: list[Any]
) -> None:
    table = pa.table({"b": pa.array([*values, None], kind)})
    for seen, plain in (
        (f("b").isin(pa.array(values, view)), f("b").isin(pa.array(values, kind))),
        (f("b") == pa.scalar(values[0], view), f("b") == pa.scalar(values[0], kind)),
    ):
        keep = row_filter(seen, table.schema)
        assert keep == row_filter(plain, table.schema) and keep.mask(table).to_pylist() == [True, False]
