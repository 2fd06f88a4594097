"""Bounds are true of every value, whatever the writer did; what cannot be trusted is not used; verdicts are sound."""

from __future__ import annotations

import datetime
import decimal
import importlib
import io
import itertools
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.lake.filters import row_filter
from lakeckpt.lake.prune import verdicts
from lakeckpt.lake.statistics import Bounds, constant_bounds, stored_bounds
from tests.lake.filtering import COMPARISONS, KINDS, OTHERS, expressions, kept_by_pyarrow, tables
from tests.lake.tables import footer_of

f = pc.field
I32, I64, BYTES, FIXED, FLOAT = 1, 2, 6, 7, 4


def written(table: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def bounds_of(data: bytes, schema: pa.Schema) -> dict[str, Bounds]:
    metadata = pq.read_metadata(io.BytesIO(data))
    rows = np.array([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)], np.int64)
    return stored_bounds(footer_of(data), {one.name: one.type for one in schema}, rows)


def check(data: bytes, table: pa.Table, expression: pc.Expression, group_rows: int) -> None:
    """The verdicts on each row group against its rows."""
    kept_by_pyarrow(table, expression)
    bounds = bounds_of(data, table.schema)
    keep = row_filter(expression, table.schema)
    groups = -(-table.num_rows // group_rows)
    found = verdicts(keep.node, bounds, groups)
    for group in range(groups):
        rows = table.slice(group * group_rows, group_rows)
        kept = rows.filter(expression).num_rows
        assert not (found.none[group] and kept), f"{keep} prunes {rows.to_pydict()}"
        assert not (found.every[group] and kept < rows.num_rows), f"{keep} takes all of {rows.to_pydict()}"


OPTIONS: list[Mapping[str, Any]] = [
    {},
    {"write_statistics": False},
    {"store_decimal_as_integer": True},
    {"version": "1.0", "data_page_version": "1.0"},
    {"use_dictionary": False, "data_page_version": "2.0"},
]


@given(data=st.data(), options=st.sampled_from(OPTIONS), group_rows=st.integers(1, 9))
def test_verdicts_are_sound_for_every_column_and_filter(
    data: st.DataObject, options: Mapping[str, Any], group_rows: int
) -> None:
    table = data.draw(tables())
    expression = data.draw(expressions(table.schema))
    check(written(table, row_group_size=group_rows, **options), table, expression, group_rows)


def agreed(column: pa.Array, name: str, expressions: Iterable[pc.Expression]) -> int:
    """With how many of ``expressions`` pyarrow can filter the column. Row by row, and by the statistics of row groups
    of two values, ours keep what it keeps.
    """
    table = pa.table({name: column})
    bounds = bounds_of(written(table, row_group_size=2), table.schema)
    rows = pa.table({"row": range(len(column)), name: column})
    compared = 0
    for expression in expressions:
        try:
            kept = set(rows.filter(expression)["row"].to_pylist())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError):  # pyarrow cannot compare them
            continue
        compared += 1
        keep = row_filter(expression, table.schema)
        assert {row for row, stays in enumerate(keep.mask(table).to_pylist()) if stays} == kept, str(keep)
        found = verdicts(keep.node, bounds, len(column) // 2)
        for group in range(len(column) // 2):
            here = len(kept & {2 * group, 2 * group + 1})
            assert not (found.none[group] and here), f"{keep} prunes {column[2 * group : 2 * group + 2]}"
            assert not (found.every[group] and here < 2), f"{keep} takes all of {column[2 * group : 2 * group + 2]}"
    return compared


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_value_is_compared_with_every_constant_as_pyarrow_does(name: str) -> None:
    """In every pair."""
    kind, values = KINDS[name]
    column = pa.array([one for pair in itertools.product([*values, None], repeat=2) for one in pair], kind)
    constants = [*(pa.scalar(one, kind) for one in values), *OTHERS.get(name, [])]
    tried = [compare(f(name), constant) for constant, compare in itertools.product(constants, COMPARISONS)]
    assert agreed(column, name, [*tried, *(~one for one in tried)]) >= 12 * len(values)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_every_value_is_looked_for_among_values_of_other_types_as_pyarrow_does(name: str) -> None:
    """The kernel casts these to the type of the column: what is nearest to 0.1 in a float32 column is in [0.1]."""
    kind, values = KINDS[name]
    tenths = [pa.scalar(0.1), pa.scalar(0.3)] if pa.types.is_floating(kind) else []
    values = [*values, *(one.cast(kind).as_py() for one in tenths), None]
    column = pa.array([one for one in values for _ in range(2)], kind)
    tried = [f(name).isin(some) for some in [*([one] for one in OTHERS[name]), tenths] if some]
    assert agreed(column, name, [*tried, *(~one for one in tried)])


@given(data=st.data(), name=st.sampled_from(sorted(KINDS)))
def test_bounds_hold_every_value(data: st.DataObject, name: str) -> None:
    kind, values = KINDS[name]
    column = pa.array(data.draw(st.lists(st.sampled_from([*values, None]), min_size=1, max_size=12)), kind)
    found = bounds_of(written(pa.table({name: column})), pa.schema([(name, kind)]))[name]
    assert found.nulls.tolist() == [column.null_count]
    raw = [v.encode() if isinstance(v, str) else v for v in column.drop_null().to_pylist()]
    numbers = [v for v in raw if v == v]
    low, high = found.low[0].as_py(), found.high[0].as_py()
    assert (low is None) == (high is None)
    assert low is None or all(low <= one <= high for one in numbers)
    assert found.may_be_nan == (kind in (pa.float32(), pa.float64()))
    if name in ("int8", "int64", "uint32", "uint64", "bool", "day", "moment", "naive", "decimal", "string", "binary"):
        assert (low is not None) == bool(raw), "sharp statistics are used"


def test_each_kind_of_column_is_pruned_somewhere() -> None:
    """So that soundness is not had by knowing nothing."""
    for name, (kind, values) in KINDS.items():
        table = pa.table({name: pa.array([values[0]], kind)})
        other = values[1]
        keep = row_filter(f(name) == pa.scalar(other, kind), table.schema)
        sign = name in ("float", "double")  # 0.0 and -0.0 are equal
        found = verdicts(keep.node, bounds_of(written(table), table.schema), 1)
        assert found.none[0] != sign, name
        same = row_filter(f(name) == pa.scalar(values[0], kind), table.schema)
        assert verdicts(same.node, bounds_of(written(table), table.schema), 1).every[0] != sign, name


# --- footers by other writers, made by hand


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def zigzag(number: int) -> bytes:
    return varint((number << 1) ^ (number >> 63))


def compact(value: Any) -> tuple[int, bytes]:
    """(type, bytes) of a value in thrift's compact protocol: int, bool, bytes, list, or dict of field → value."""
    if isinstance(value, bool):
        return (1 if value else 2), b""
    if isinstance(value, int):
        return 6, zigzag(value)
    if isinstance(value, bytes):
        return 8, varint(len(value)) + value
    if isinstance(value, list):
        parts = [compact(one) for one in value]
        kind = parts[0][0] if parts else 12
        head = bytes([len(value) << 4 | kind]) if len(value) < 15 else bytes([0xF0 | kind]) + varint(len(value))
        return 9, head + b"".join(one for _, one in parts)
    out, last = b"", 0
    for number, one in sorted(value.items()):
        kind, body = compact(one)
        out += bytes([(number - last) << 4 | kind]) + body
        last = number
    return 12, out + b"\0"


def crafted(
    element: dict[int, Any],
    statistics: dict[int, Any],
    *,
    creator: bytes | None = None,
    orders: Any = None,
    values: int = 4,
) -> bytes:
    """A footer of one column and one row group of 4 rows."""
    head = {
        1: 2,
        2: [{4: b"schema", 5: 1}, {3: 1, 4: b"c", **element}],
        3: 4,
        4: [{1: [{2: 4, 3: {1: element[1], 5: values, 12: statistics}}], 2: 9, 3: 4}],
    }
    if creator is not None:
        head[6] = creator
    if orders is not None:
        head[7] = orders
    return compact(head)[1]


def known(footer: bytes, kind: pa.DataType) -> tuple[Any, Any] | None:
    found = stored_bounds(footer, {"c": kind}, np.array([4], np.int64)).get("c")
    if found is None or not found.low[0].is_valid:
        return None
    return found.low[0].as_py(), found.high[0].as_py()


TYPE_ORDER, OTHER_ORDER = [{1: {}}], [{2: {}}]
ARROW, OLD_ARROW, MR, OLD_MR, NOBODY = (
    b"parquet-cpp-arrow version 26.0.1",
    b"parquet-cpp-arrow version 3.0.0",
    b"parquet-mr version 1.12.3 (build f8dced182c4c1fbdec6ccb3185537b5a01e6ed6b)",
    b"parquet-mr version 1.7.0",
    None,
)


def newer(low: bytes, high: bytes) -> dict[int, Any]:
    return {3: 0, 5: high, 6: low}


def older(low: bytes, high: bytes) -> dict[int, Any]:
    return {1: high, 2: low, 3: 0}


def int32(number: int) -> bytes:
    return struct.pack("<i", number)


UNSIGNED = {1: I32, 10: {10: {1: 32, 2: False}}}
OLD_UNSIGNED = {1: I32, 6: 13}
TEXT = {1: BYTES, 6: 0, 10: {1: {}}}
DECIMAL = {1: FIXED, 2: 2, 6: 5, 7: 1, 8: 4, 10: {5: {1: 1, 2: 4}}}


@pytest.mark.parametrize(
    ("element", "kind", "statistics", "options", "wanted"),
    [
        # Signed numbers: any writer, either pair of fields.
        ({1: I32}, pa.int32(), newer(int32(-5), int32(7)), {"creator": ARROW, "orders": TYPE_ORDER}, (-5, 7)),
        ({1: I32}, pa.int32(), older(int32(-5), int32(7)), {"creator": OLD_MR}, (-5, 7)),
        ({1: I32}, pa.int64(), older(int32(-5), int32(7)), {"creator": NOBODY}, (-5, 7)),
        ({1: I32}, pa.float64(), newer(int32(-5), int32(7)), {"orders": TYPE_ORDER}, (-5.0, 7.0)),
        # In an order that we do not know.
        ({1: I32}, pa.int32(), newer(int32(-5), int32(7)), {"orders": OTHER_ORDER}, None),
        ({1: I32}, pa.int32(), older(int32(-5), int32(7)), {"orders": OTHER_ORDER}, None),
        # Crossed, of a wrong width, half, or of fewer values than rows.
        ({1: I32}, pa.int32(), newer(int32(7), int32(-5)), {"orders": TYPE_ORDER}, None),
        ({1: I32}, pa.int32(), newer(b"\1\2\3", int32(7)), {"orders": TYPE_ORDER}, None),
        ({1: I32}, pa.int32(), newer(b"\1" * 8, b"\2" * 8), {"orders": TYPE_ORDER}, None),
        ({1: I32}, pa.int32(), {3: 0, 5: int32(7)}, {"orders": TYPE_ORDER}, None),
        ({1: I32}, pa.int32(), newer(int32(-5), int32(7)), {"orders": TYPE_ORDER, "values": 9}, None),
        # Unsigned: older fields compared them as signed, as did older writers.
        (UNSIGNED, pa.uint32(), newer(int32(1), int32(-1)), {"creator": ARROW, "orders": TYPE_ORDER}, (1, 2**32 - 1)),
        (UNSIGNED, pa.uint32(), older(int32(1), int32(9)), {"creator": ARROW}, None),
        (UNSIGNED, pa.uint32(), newer(int32(1), int32(9)), {"creator": OLD_ARROW, "orders": TYPE_ORDER}, None),
        (UNSIGNED, pa.uint32(), newer(int32(1), int32(9)), {"creator": b"me", "orders": TYPE_ORDER}, None),
        (OLD_UNSIGNED, pa.uint32(), older(int32(1), int32(9)), {"creator": MR}, None),
        # What older writers say of integers: from the 15th on they are signed.
        (OLD_UNSIGNED, pa.uint32(), newer(int32(1), int32(-1)), {"creator": MR, "orders": TYPE_ORDER}, (1, 2**32 - 1)),
        ({1: I64, 6: 14}, pa.uint64(), older(b"\1" + bytes(7), b"\2" + bytes(7)), {"creator": MR}, None),
        ({1: I32, 6: 15}, pa.int8(), older(int32(-5), int32(7)), {"creator": OLD_MR}, (-5, 7)),
        ({1: I64, 6: 18}, pa.int64(), older(b"\xff" * 8, bytes(8)), {"creator": OLD_MR}, (-1, 0)),
        # Text: bytes, unsigned; older fields compared them as signed.
        (TEXT, pa.string(), newer(b"a", b"\xc3\xa9"), {"creator": MR, "orders": TYPE_ORDER}, (b"a", b"\xc3\xa9")),
        (TEXT, pa.string(), newer(b"a", b"\xff"), {"creator": MR, "orders": TYPE_ORDER}, (b"a", b"\xff")),
        (TEXT, pa.string(), newer(b"a", b"z"), {"creator": MR}, None),
        (TEXT, pa.string(), older(b"a", b"z"), {"creator": OLD_MR}, None),
        (TEXT, pa.large_string(), newer(b"a", b"z"), {"orders": TYPE_ORDER}, (b"a", b"z")),
        # Decimals in bytes are signed: old writers compared them as unsigned.
        (DECIMAL, pa.decimal128(4, 1), newer(b"\xff\xfe", b"\0\3"), {"creator": MR, "orders": TYPE_ORDER}, (-0.2, 0.3)),
        (DECIMAL, pa.decimal128(4, 1), newer(b"\0\3", b"\xff\xfe"), {"creator": ARROW, "orders": TYPE_ORDER}, None),
        (DECIMAL, pa.decimal128(4, 1), newer(b"\0\1", b"\0\3"), {"creator": OLD_ARROW, "orders": TYPE_ORDER}, None),
        (DECIMAL, pa.decimal128(4, 1), newer(b"\1", b"\3"), {"creator": ARROW, "orders": TYPE_ORDER}, None),
        # Numbers that are NaN bound nothing.
        ({1: FLOAT}, pa.float32(), newer(struct.pack("<f", float("nan")), struct.pack("<f", 1)), {}, None),
        ({1: FLOAT}, pa.float32(), newer(struct.pack("<f", -1), struct.pack("<f", 1)), {}, (-1.0, 1.0)),
        # Types without an order, or unknown ones.
        ({1: 3}, pa.timestamp("ns"), newer(b"\0" * 12, b"\1" * 12), {"orders": TYPE_ORDER}, None),
        ({1: FIXED, 2: 2, 10: {15: {}}}, pa.float16(), newer(b"\0\0", b"\0\1"), {"orders": TYPE_ORDER}, None),
        ({1: FIXED, 2: 2}, pa.binary(2), newer(b"\0\0", b"\0\1"), {"orders": TYPE_ORDER}, None),
        ({1: I32, 10: {15: {}}}, pa.int32(), newer(int32(1), int32(2)), {"orders": TYPE_ORDER}, None),
        # Casts that could lose something, or change the order.
        ({1: I32}, pa.string(), newer(int32(1), int32(2)), {"orders": TYPE_ORDER}, None),
        ({1: I64}, pa.int8(), newer(struct.pack("<q", 0), struct.pack("<q", 500)), {"orders": TYPE_ORDER}, None),
        (
            {1: I64, 10: {8: {1: True, 2: {2: {}}}}},
            pa.timestamp("us"),
            newer(struct.pack("<q", 0), struct.pack("<q", 5)),
            {"orders": TYPE_ORDER},
            None,
        ),
    ],
)  # fmt: skip
def test_bounds_are_used_where_their_meaning_is_sure(
    element: dict[int, Any], kind: pa.DataType, statistics: dict[int, Any], options: dict[str, Any], wanted: Any
) -> None:
    found = known(crafted(element, statistics, **options), kind)
    if found is not None and isinstance(found[0], decimal.Decimal):
        found = (float(found[0]), float(found[1]))
    assert found == wanted


def test_times_are_read_in_their_unit_and_zone() -> None:
    element = {1: I64, 10: {8: {1: True, 2: {1: {}}}}}
    low = struct.pack("<q", 86_400_000)
    found = known(crafted(element, newer(low, low), orders=TYPE_ORDER), pa.timestamp("us", tz="Europe/Berlin"))
    assert found is not None and found[0] == datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("physical", "unit", "number"), [(I32, 1, 3_000), (I64, 2, 3_000_000), (I64, 3, 3_000_000_000)]
)
def test_times_of_day_are_read_in_their_unit(physical: int, unit: int, number: int) -> None:
    low = struct.pack("<q" if physical == I64 else "<i", number)
    footer = crafted({1: physical, 10: {7: {1: False, 2: {unit: {}}}}}, newer(low, low), orders=TYPE_ORDER)
    kind = pa.time32("ms") if physical == I32 else pa.time64("us" if unit == 2 else "ns")
    assert known(footer, kind) == (datetime.time(0, 0, 3),) * 2


@pytest.mark.parametrize(
    ("converted", "physical", "kind", "seconds"),
    [
        (9, I64, pa.timestamp("us", tz="UTC"), 1e-3),
        (10, I64, pa.timestamp("us", tz="UTC"), 1e-6),
        (7, I32, pa.time64("us"), 1e-3),
        (8, I64, pa.time64("us"), 1e-6),
        (6, I32, pa.date32(), 86_400),
    ],
)
def test_times_of_older_writers_are_read_in_their_unit(
    converted: int, physical: int, kind: pa.DataType, seconds: float
) -> None:
    low = struct.pack("<q" if physical == I64 else "<i", 3000)
    footer = crafted({1: physical, 6: converted}, older(low, low), creator=OLD_MR)
    found = stored_bounds(footer, {"c": kind}, np.array([4], np.int64))["c"].low[0]
    assert found.cast(pa.int32() if pa.types.is_date(kind) else pa.int64()).as_py() == round(
        3000 * seconds * (1 / 86_400 if pa.types.is_date(kind) else 1e6)
    )


@pytest.mark.parametrize("nulls", [-1, 5, None])
def test_a_count_of_nulls_that_cannot_be_is_unknown(nulls: int | None) -> None:
    statistics = newer(int32(1), int32(2)) | {3: nulls}
    if nulls is None:
        del statistics[3]
    found = stored_bounds(crafted({1: I32}, statistics, orders=TYPE_ORDER), {"c": pa.int32()}, np.array([4]))["c"]
    assert found.nulls.tolist() == [-1]


@pytest.mark.parametrize("damage", range(0, 200, 3))
def test_a_damaged_footer_bounds_nothing_or_something_but_never_raises(damage: int) -> None:
    footer = bytearray(crafted(TEXT, newer(b"a" * 40, b"b" * 40), creator=MR, orders=TYPE_ORDER))
    footer[damage % len(footer)] ^= 0x55
    stored_bounds(bytes(footer), {"c": pa.string()}, np.array([4]))
    stored_bounds(bytes(footer[: damage % len(footer)]), {"c": pa.string()}, np.array([4]))


def test_nested_and_repeated_columns_have_no_bounds() -> None:
    table = pa.table({"s": [{"c": 1}], "l": [[1, 2]], "c": [7]})
    found = bounds_of(written(table), table.schema)
    assert set(found) == {"c"} and found["c"].low.to_pylist() == [7]


@pytest.mark.parametrize("writer", ["polars", "duckdb"])
def test_files_of_other_writers_are_pruned_soundly(writer: str, tmp_path: Path) -> None:
    module = importlib.import_module(writer)
    columns = {"i": list(range(-50, 50)), "s": [f"w{i:03}" for i in range(100)], "x": [i / 3 for i in range(100)]}
    table, path = pa.table(columns), str(tmp_path / "a.parquet")
    if writer == "polars":
        module.DataFrame(columns).write_parquet(path, row_group_size=10, statistics=True)
    else:
        module.register("given", table)
        module.sql("select * from given").write_parquet(path, row_group_size=2048)
    data = Path(path).read_bytes()
    size = pq.read_metadata(path).row_group(0).num_rows
    for expression in (f("i") > 10, f("s") < "w020", f("x") <= 3.0, f("i").isin([-50, 49])):
        check(data, table, expression, size)


def test_zeros_of_two_signs_are_equal_and_not_in_a_list_of_each_other() -> None:
    """As pyarrow has it, of a column (a partition's, say) that is -0.0 throughout."""
    bounds = {"x": constant_bounds(-0.0, pa.float64(), np.array([2]))}
    rows = pa.table({"x": [-0.0, -0.0]})
    for expression, every in ((f("x") == 0.0, True), (f("x").isin([0.0]), False), (~f("x").isin([0.0]), False)):
        found = verdicts(row_filter(expression, rows.schema).node, bounds, 1)
        kept = rows.filter(expression).num_rows
        assert found.every.tolist() == [every] and not (every and kept < 2) and not (found.none[0] and kept)


@given(value=st.sampled_from([None, 3, 7]), data=st.data())
def test_a_constant_column_is_bounded_by_its_value(value: int | None, data: st.DataObject) -> None:
    bounds = constant_bounds(value, pa.int64(), np.array([2, 5]))
    for expression in (f("p") == 3, f("p") != 3, f("p") > 3, f("p").isin([3, None]), f("p").is_null(), ~(f("p") < 5)):
        keep = row_filter(expression, pa.schema([("p", pa.int64())]))
        found = verdicts(keep.node, {"p": bounds}, 2)
        kept = pa.table({"p": pa.array([value], pa.int64())}).filter(expression).num_rows
        assert found.none.tolist() == [not kept] * 2 and found.every.tolist() == [bool(kept)] * 2
