"""A filter keeps the rows that pyarrow keeps, whatever it is made of; what is no filter of the table is refused."""

from __future__ import annotations

import datetime
import functools
import operator
import pickle
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt.errors import ConfigError, SchemaError
from lakeckpt.reading.filters.row_filter import row_filter
from tests.examples import examples
from tests.reading.filters.filtering import expressions, kept_by_pyarrow, tables

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


LONG = [str(i) for i in range(100)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f("a") > 3, f("a") >= 3),
        (f("a") > 3, f("a") > 4),
        (f("a") > 3, f("u") > 3),
        (f("b").isin(LONG), f("b").isin([*LONG[:50], "another", *LONG[51:]])),  # pyarrow's text of both is the same
        (f("b").isin(["x"]), f("b").isin(["x", None])),
        (f("x").is_null(), f("x").is_null(nan_is_null=True)),
        (pc.match_substring(f("b"), "x"), pc.match_substring(f("b"), "x", ignore_case=True)),
        (f("s", "y") > 1, f("a") > 1),
        (f("a").cast("int8") > 1, f("a").cast("int16") > 1),
    ],
    ids=str,
)
def test_two_filters_have_two_digests(one: Any, other: Any) -> None:
    assert row_filter(one, SCHEMA).digest != row_filter(other, SCHEMA).digest


def test_a_filter_has_the_same_digest_in_every_process() -> None:
    """Saved counts are found by it."""
    script = (
        "import pyarrow as pa, pyarrow.compute as pc\n"
        "from lakeckpt.reading.filters.row_filter import row_filter\n"
        "schema = pa.schema([('a', 'int64'), ('b', 'str')])\n"
        "print(row_filter(pc.field('a').isin([1, 2]) & (pc.field('b') > 'x'), schema).digest)"
    )
    ran = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    schema = pa.schema([("a", "int64"), ("b", "str")])
    keep = row_filter(f("a").isin([1, 2]) & (f("b") > "x"), schema)
    assert ran == {f"{keep.digest}\n"}
    assert row_filter([("a", "in", [1, 2]), ("b", ">", "x")], schema) == keep


@pytest.mark.parametrize(
    ("filters", "columns"),
    [
        ((f("u") > 3) & (f("a") == 1), ("a", "u")),
        (f("s", "y") > 1, ("s",)),
        (pc.if_else(f("flag"), f("x"), f("x") + 1) > 1, ("x", "flag")),
        ([("b", "in", ["x"]), ("t", ">", datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC))], ("b", "t")),
    ],
    ids=str,
)
def test_the_columns_that_a_filter_reads_are_found(filters: Any, columns: tuple[str, ...]) -> None:
    assert row_filter(filters, SCHEMA).columns == columns


def test_the_columns_of_a_wide_table_are_found() -> None:
    schema = pa.schema([(f"c{i}", pa.int64()) for i in range(300)])
    assert row_filter((f("c7") > f("c211")) | f("c299").is_null(), schema).columns == ("c7", "c211", "c299")


@settings(max_examples=examples(20))
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
        (f("zz") > 1, SchemaError, r"FieldRef.Name\(zz\)"),
        ([("bb", "==", "x")], SchemaError, "bb.*b is string"),
        (f("b") > 3, SchemaError, "b is string"),
        ([("b", ">", 3)], SchemaError, r"\(b > 3\) does not fit the table, in which .*b is string"),
        ([("t", ">", datetime.datetime(2024, 1, 1))], SchemaError, "timestamp"),
        (f("a") + 1, SchemaError, "gives int32 and not true or false"),
        (f("s"), SchemaError, "not true or false"),
        (f(0) > 1, ConfigError, "by their names"),
        (pc.scalar(True), ConfigError, "no column"),
        ([("a", "~", 3)], ConfigError, "not a valid operator"),
        ([("a", ">", None)], ConfigError, "is_null"),
        ([("b", "in", "abc")], ConfigError, "list of values"),
        ([("a", "in", 3)], ConfigError, "not iterable"),
        ([], ConfigError, "leave filters out"),
        ([[]], ConfigError, "filters are"),
        ([[("a", ">", 3)], []], ConfigError, "filters are"),
        ("a > 3", ConfigError, "filters are"),
        ({"a": 3}, ConfigError, "filters are"),
        ([("a", ">")], ConfigError, "filters are"),
        ([("a", ">", 1j)], ConfigError, "Could not convert"),
        ([("t", "in", [datetime.datetime(2024, 1, 1)])], SchemaError, "timezone"),
        ([("a", ">", 2**70)], ConfigError, "too large"),
        ([("a", "in", [2**70])], ConfigError, "too large"),
        ([("b", "==", "\ud800")], ConfigError, "surrogates"),
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


@pytest.mark.parametrize("chained", ["to the left", "to the right", "tuples"])
def test_a_thousand_alternatives_are_a_filter(chained: str) -> None:
    parts = [f("a") == n for n in range(1000)]
    given: Any = [[("a", "==", n)] for n in range(1000)]
    if chained == "to the left":
        given = functools.reduce(operator.or_, parts)
    elif chained == "to the right":
        given = functools.reduce(lambda right, left: left | right, parts[::-1])
    found = row_filter(given, SCHEMA)
    table = pa.table({"a": pa.array([-1, 0, 999, 1000], pa.int32())})
    assert found.mask(table).to_pylist() == [False, True, True, False]


def test_a_value_that_cannot_be_compared_is_named_when_it_is_met() -> None:
    table = pa.table({"u": pa.array([2**63 + 5], pa.uint64())})
    keep = row_filter(f("u") > -1, table.schema)
    with pytest.raises(SchemaError, match="u > -1"):
        keep.mask(table)


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
