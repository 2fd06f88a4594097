from __future__ import annotations

import decimal
import fractions
import gc
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.errors import DataFileDamaged, NullValueError, SchemaError
from lakeckpt.lake.parquet.types import plain
from lakeckpt.reading.columns import forms as arrays
from lakeckpt.reading.columns.convert import check_convertible, convert
from lakeckpt.reading.columns.ragged import Ragged, map_column, map_namespace, to_pylist
from tests.reading.cases import build, columns, has_null

Case = tuple[pa.Field, pa.ChunkedArray, list[Any]]


def one(field: pa.Field, column: pa.ChunkedArray) -> pa.Table:
    return pa.Table.from_arrays([column], schema=pa.schema([field]))


def table_of(array: pa.Array, *, nullable: bool = True) -> pa.Table:
    return one(pa.field("x", array.type, nullable), pa.chunked_array([array]))


def structure(column: Any) -> Any:
    """What a consumer may rely on: names, kinds, dtypes and shapes beyond the rows."""
    if isinstance(column, dict):
        return {name: structure(child) for name, child in column.items()}
    if isinstance(column, Ragged):
        return (column.kind, column.offsets.dtype, structure(column.values), structure(dict(column.masks)))
    return (column.dtype, column.shape[1:])


def every_array(column: Any) -> list[np.ndarray]:
    found: list[np.ndarray] = []

    def collect(array: np.ndarray) -> np.ndarray:
        found.append(array)
        return array

    map_column(column, collect)
    return found


@given(columns())
def test_masked_columns_hold_what_arrow_holds_for_every_type(case: Case) -> None:
    field, column, rows = case
    converted = convert(one(field, column), nulls="mask")
    assert to_pylist(converted, "x") == rows


@given(columns())
def test_unmasked_columns_hold_what_arrow_holds_or_the_null_is_an_error(case: Case) -> None:
    field, column, rows = case
    if has_null(rows):
        with pytest.raises(NullValueError, match=r"column 'x.*' has \d+ null\(s\)"):
            convert(one(field, column), nulls="error")
    else:
        converted = convert(one(field, column), nulls="error")
        assert to_pylist(converted, "x") == rows
        assert list(converted) == ["x"]


@given(columns(), st.sampled_from(["error", "mask"]))
def test_structure_follows_from_the_type_alone(case: Case, nulls: Any) -> None:
    field, column, _ = case
    try:
        converted = convert(one(field, column), nulls=nulls)
    except NullValueError:
        return
    empty = convert(pa.schema([field]).empty_table(), nulls=nulls)
    assert structure(converted) == structure(empty)
    assert (f"{field.name}.is_null" in converted) == (nulls == "mask" and field.nullable)


@given(columns())
def test_every_array_is_writable_and_native(case: Case) -> None:
    for array in every_array(convert(one(*case[:2]), nulls="mask")):
        assert array.flags.writeable and array.flags.c_contiguous and array.dtype.isnative


@given(columns())
def test_values_at_nulls_are_zero(case: Case) -> None:
    converted = convert(one(*case[:2]), nulls="mask")
    if isinstance(converted["x"], np.ndarray) and "x.is_null" in converted:
        assert not converted["x"][converted["x.is_null"]].any()


@given(columns(), st.data())
def test_writing_to_one_slice_of_a_column_leaves_its_neighbours_alone(case: Case, data: st.DataObject) -> None:
    field, column, rows = case
    table = one(field, column)
    cut = data.draw(st.integers(0, table.num_rows))
    left, right = table.slice(0, cut), table.slice(cut)
    for array in every_array(convert(left, nulls="mask")):
        array.view(np.uint8)[...] = 0xFF if array.dtype != np.bool_ else 1
    assert to_pylist(convert(right, nulls="mask"), "x") == rows[cut:]


FIXED = [
    *(pa.int8(), pa.uint16(), pa.int32(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()),
    *(pa.timestamp("ns", "UTC"), pa.duration("s"), pa.time32("ms"), pa.time64("us"), pa.date32()),
]


@pytest.mark.parametrize("kind", FIXED, ids=str)
def test_fixed_width_columns_without_nulls_are_arrows_own_memory(kind: pa.DataType) -> None:
    array = pa.array([0, 1, 2, 3, 4], pa.int8()).cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    array = array.cast(kind) if not pa.types.is_float16(kind) else pa.array(np.arange(5, dtype=np.float16))
    sliced = array.slice(2, 2)
    column = convert(table_of(sliced))["x"]
    assert isinstance(column, np.ndarray)
    assert column.ctypes.data == array.buffers()[1].address + 2 * column.itemsize
    column[0] = 9
    assert convert(table_of(array))["x"][2] == 9


@pytest.mark.parametrize("nulls", ["error", "mask"])
def test_contents_of_text_lists_and_matrices_are_arrows_own_memory(nulls: Any) -> None:
    text = pa.array(["ab", "cde", ""]).slice(1)
    tokens = pa.array([[1], [2, 3]], pa.list_(pa.int32())).slice(1)
    matrix = pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)).slice(1)
    assert convert(table_of(text), nulls=nulls)["x"].values.ctypes.data == text.buffers()[2].address + 2
    assert convert(table_of(tokens), nulls=nulls)["x"].values.ctypes.data == tokens.values.buffers()[1].address + 4
    assert convert(table_of(matrix), nulls=nulls)["x"].ctypes.data == matrix.values.buffers()[1].address + 4


def test_a_column_outlives_the_table_that_it_came_from() -> None:
    pool = pa.default_memory_pool()
    column = convert(pa.table({"x": pa.array(np.arange(100_000)).cast(pa.int32())}))["x"]
    held = pool.bytes_allocated()
    junk = [pa.array(np.full(100_000, 7, np.int32)).cast(pa.int64()) for _ in range(10)]
    assert np.array_equal(column, np.arange(100_000))
    del junk, column
    gc.collect()
    assert pool.bytes_allocated() <= held - 400_000


def test_nulls_that_share_one_block_of_zeros_become_columns_of_their_own() -> None:
    shared = pa.nulls(4, pa.struct([("a", pa.int64()), ("b", pa.int64())]))
    converted = convert(pa.table({"x": shared, "y": pa.nulls(4, pa.int64())}), nulls="mask")
    for array in every_array(converted["x"]):
        array[...] = 1
    assert converted["y"].tolist() == [0] * 4
    again = convert(pa.table({"x": shared}), nulls="mask")
    assert to_pylist(again, "x") == [None] * 4
    assert again["x"]["a"].tolist() == [0] * 4


def test_what_lies_under_nulls_never_shows() -> None:
    mask = pa.array([False, True, False])
    validity = pa.array([True, False, True]).buffers()[1]
    numbers = pa.Array.from_buffers(pa.int32(), 3, [validity, pa.py_buffer(np.array([1, 111, 3], np.int32))], 1)
    text = pa.Array.from_buffers(
        pa.string(), 3, [validity, pa.py_buffer(np.array([0, 1, 3, 4], np.int32)), pa.py_buffer(b"aXXb")], 1
    )
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 3, 4], pa.int32()), pa.array([1, 110, 111, 2]), mask=mask)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array([1, 2, 110, 111, 3, 4]), 2, mask=mask)
    struct = pa.StructArray.from_arrays([pa.array([1, 111, 3]), pa.array(["a", "XX", "c"])], ["n", "t"], mask=mask)
    for array in (numbers, text, lists, fixed, struct):
        converted = convert(table_of(array), nulls="mask")
        assert to_pylist(converted, "x") == array.to_pylist()
        assert converted["x.is_null"].tolist() == [False, True, False]
        for part in every_array(converted["x"]):
            assert not np.isin(part, [110, 111, ord("X")]).any()


def test_a_field_inside_a_struct_that_may_be_null_has_a_mask_of_its_own() -> None:
    kind = pa.struct([pa.field("must", pa.int32(), nullable=False), pa.field("may", pa.int32())])
    converted = convert(table_of(pa.array([{"must": 1, "may": None}, None], kind)), nulls="mask")
    struct = converted["x"]
    assert sorted(struct) == ["may", "may.is_null", "must", "must.is_null"]
    assert struct["must.is_null"].tolist() == [False, True]
    assert struct["may.is_null"].tolist() == [True, True]
    strict = convert(table_of(pa.array([{"must": 1, "may": 2}], kind), nullable=False), nulls="mask")
    assert sorted(strict["x"]) == ["may", "may.is_null", "must"]


def test_null_elements_of_lists_are_masked_inside() -> None:
    ragged = convert(table_of(pa.array([[1, None], [], [None]])), nulls="mask")["x"]
    assert ragged.masks["values.is_null"].tolist() == [False, True, True]
    assert ragged.tolist() == [[1, None], [], [None]]
    assert ragged[1:].tolist() == [[], [None]]
    matrix = convert(table_of(pa.array([[1, None], None], pa.list_(pa.int8(), 2))), nulls="mask")
    assert matrix["x"].tolist() == [[1, 0], [0, 0]]
    assert matrix["x.values.is_null"].tolist() == [[False, True], [True, True]]
    assert matrix["x.is_null"].tolist() == [False, True]


def test_the_null_error_names_the_field_and_the_count() -> None:
    nested = pa.array([[{"a": 1}, {"a": None}], [{"a": None}]])
    with pytest.raises(NullValueError, match=r"column 'x\[\]\.a' has 2 null\(s\) in 3 values: ask for masks"):
        convert(table_of(nested))
    with pytest.raises(NullValueError, match=r"column 'x' has 1 null\(s\), but its schema declares"):
        convert(table_of(pa.array([1, None]), nullable=False), nulls="mask")


def test_nulls_outside_of_the_slice_are_nobodys_business() -> None:
    assert convert(table_of(pa.array([None, 1, 2, None]).slice(1, 2)))["x"].tolist() == [1, 2]
    lists = pa.array([[None], [1, 2], None]).slice(1, 1)
    assert convert(table_of(lists))["x"].tolist() == [[1, 2]]
    assert convert(table_of(pa.array(["a", None]).dictionary_encode().slice(0, 1)))["x"].tolist() == ["a"]


def test_a_null_in_the_dictionary_is_a_null() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.uint8()), pa.array(["a", None]))
    assert convert(table_of(column), nulls="mask")["x.is_null"].tolist() == [False, True, True]
    with pytest.raises(NullValueError, match=r"2 null\(s\)"):
        convert(table_of(column))


def test_any_index_may_lie_under_the_nulls_of_a_parent() -> None:
    coded = pa.DictionaryArray.from_arrays(pa.array([7, 0, -1], pa.int8()), pa.array(["a"]), safe=False)
    inner = pa.StructArray.from_arrays([coded], fields=[pa.field("d", coded.type, nullable=False)])
    mask = pa.array([True, False, True])
    outer = pa.StructArray.from_arrays([inner], ["s"], mask=mask)
    fixed = pa.FixedSizeListArray.from_arrays(coded, 1, mask=mask)
    for array, shown in ((outer, {"s": {"d": "a"}}), (fixed, ["a"])):
        for same in (array, plain(array)):
            assert to_pylist(convert(table_of(same), nulls="mask"), "x") == [None, shown, None]


def test_columns_of_the_null_type_are_all_null_or_an_error() -> None:
    converted = convert(table_of(pa.nulls(3)), nulls="mask")
    assert converted["x.is_null"].tolist() == [True] * 3
    assert converted["x"].tolist() == [False] * 3
    with pytest.raises(NullValueError, match="3 null"):
        convert(table_of(pa.nulls(3)))


def test_floats_keep_their_bits() -> None:
    odd = np.array([math.nan, -0.0, math.inf, 5e-324])
    odd.view(np.uint64)[0] ^= 1  # a signalling payload
    assert np.array_equal(convert(table_of(pa.array(odd)))["x"].view(np.uint64), odd.view(np.uint64))


def test_timestamps_with_a_zone_are_utc_in_their_own_unit() -> None:
    noon = pa.array(["2024-07-01T12:00:00+02:00"]).cast(pa.timestamp("ms", "Europe/Vienna"))
    assert convert(table_of(noon))["x"].tolist() == [1719828000000]


DECIMALS = [
    *(pa.decimal128(18, scale) for scale in (-3, 0, 2, 18)),
    *(pa.decimal128(38, scale) for scale in (-30, 0, 7, 18, 22, 24, 38)),
    *(pa.decimal256(76, scale) for scale in (-40, 0, 7, 38, 76)),
    *((pa.decimal32(9, 7), pa.decimal64(18, 7)) if hasattr(pa, "decimal32") else ()),
]


def near_middles(kind: pa.DataType) -> st.SearchStrategy[int]:
    """Integers of decimals that lie on or very close to the middle between two floats, or at a power of two."""
    middles = st.builds(
        lambda odd, by, off: (
            round(fractions.Fraction((2 * odd + 1) << by) * fractions.Fraction(10) ** kind.scale) + off
        ),
        st.integers(1 << 52, (1 << 53) - 1) | st.integers(0, 1 << 20),
        st.integers(-60, 60).map(lambda by: max(by, 0)),
        st.integers(-1, 1),
    )
    powers = st.builds(lambda bits, off: (1 << bits) + off, st.integers(0, 250), st.integers(-2, 2))
    return (middles | powers).map(lambda one: one % 10**kind.precision)


def decimals_of(kind: pa.DataType, numbers: list[int]) -> pa.Table:
    """A column of ``numbers`` over a power of ten; pa.array refuses some that files hold."""
    content = b"".join(one.to_bytes(kind.byte_width, "little", signed=True) for one in numbers)
    return pa.table({"x": pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(content)])})


@pytest.mark.parametrize("kind", DECIMALS, ids=str)
@given(data=st.data())
def test_decimals_become_the_nearest_float(kind: pa.DataType, data: Any) -> None:
    digits = st.integers(1, kind.precision).flatmap(lambda n: st.integers(1 - 10**n, 10**n - 1))
    signed = st.builds(lambda one, sign: one * sign, near_middles(kind), st.sampled_from([1, -1]))
    numbers = data.draw(st.lists(digits | signed, min_size=1))
    found = convert(decimals_of(kind, numbers))["x"].tolist()
    with decimal.localcontext(prec=400):
        assert found == [float(decimal.Decimal(one).scaleb(-kind.scale)) for one in numbers]


def test_long_decimals_of_any_size_become_the_nearest_floats() -> None:
    words = np.random.default_rng(7).integers(-(2**62), 2**62, (30_000, 2))
    words[:, 1] >>= np.arange(30_000) % 64
    numbers = [(high << 64) + low % 2**64 for low, high in words.tolist()]
    for scale in (2, 18, 30):
        column = pa.Array.from_buffers(pa.decimal128(38, scale), len(words), [None, pa.py_buffer(words)])
        assert convert(pa.table({"x": column}))["x"].tolist() == [one / 10**scale for one in numbers]


def test_nulls_of_decimals_are_masked_and_slices_are_their_own() -> None:
    values = [decimal.Decimal("12345678901234567.89"), None, decimal.Decimal("0.01"), decimal.Decimal(10**20)]
    column = pa.array(values, pa.decimal128(38, 2))
    for start in range(4):
        found = convert(pa.table({"x": column.slice(start)}), nulls="mask")["x"]
        assert found.tolist() == [float(one or 0) for one in values[start:]]


def test_decimals_in_a_nested_column_are_floats_too() -> None:
    assert convert(table_of(pa.array([[decimal.Decimal("0.5")]])))["x"].tolist() == [[0.5]]


def test_fixed_size_lists_of_fixed_size_lists_are_cubes() -> None:
    array = pa.array([[[1, 2], [3, 4]], None], pa.list_(pa.list_(pa.int8(), 2), 2))
    cube = convert(table_of(array), nulls="mask")
    assert cube["x"].shape == (2, 2, 2)
    assert cube["x.values.values.is_null"].shape == (2, 2, 2)
    assert to_pylist(cube, "x") == array.to_pylist()


def test_fixed_size_lists_of_size_zero_keep_their_rows() -> None:
    converted = convert(table_of(pa.array([[], None, []], pa.list_(pa.int32(), 0))), nulls="mask")
    assert converted["x"].shape == converted["x.values.is_null"].shape == (3, 0)
    assert to_pylist(converted, "x") == [[], None, []]


def test_fixed_size_lists_of_text_are_ragged_rows_of_one_length() -> None:
    ragged = convert(table_of(pa.array([["a", "bc"], ["", "d"]], pa.list_(pa.string(), 2))))["x"]
    assert ragged.offsets.tolist() == [0, 2, 4]
    assert ragged.tolist() == [["a", "bc"], ["", "d"]]


def test_extension_types_are_read_as_their_storage() -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.int16).reshape(3, 2, 2))
    assert convert(table_of(tensors.slice(1)))["x"].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"], pa.binary(16)))
    assert convert(table_of(ids))["x"].tobytes() == b"0123456789abcdef"
    inside = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), ids)
    assert convert(table_of(inside))["x"].values.shape == (1, 16)


UNION = pa.dense_union([pa.field("a", pa.int8())])


@pytest.mark.parametrize("kind", [UNION, pa.month_day_nano_interval(), pa.list_(UNION)], ids=str)
def test_a_type_without_a_column_form_is_named_before_anything_is_read(kind: pa.DataType) -> None:
    with pytest.raises(SchemaError, match=r"column 'x(\[\])?' is of type .*(union|interval)"):
        check_convertible(pa.schema([("y", pa.int8()), ("x", kind)]))


def test_names_that_clash_with_those_of_masks_are_refused_only_with_masks() -> None:
    schema = pa.schema([("x", pa.int8()), ("x.is_null", pa.int8())])
    check_convertible(schema)
    with pytest.raises(SchemaError, match=r"'x\.is_null' is there twice"):
        check_convertible(schema, nulls="mask")
    with pytest.raises(SchemaError, match="'x' is there twice"):
        check_convertible(pa.schema([("x", pa.int8()), ("x", pa.int8())]))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'error' or 'mask', got 'zero'"):
        convert(pa.table({}), nulls="zero")  # type: ignore[arg-type]


def test_maps_have_keys_and_values_whatever_their_writer_called_them() -> None:
    kind = pa.map_(pa.field("k", pa.string(), nullable=False), pa.field("v", pa.int8()))
    column = convert(table_of(pa.array([[("a", 1), ("b", None)]], kind)), nulls="mask")["x"]
    assert list(column.values) == ["key", "value", "value.is_null"]
    assert column.tolist() == [[{"key": "a", "value": 1}, {"key": "b", "value": None}]]


def test_chunks_too_large_for_32_bit_offsets_are_joined_with_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MAX_NARROW_BYTES", 8)
    nested = pa.chunked_array([build([[{"t": "abc"}], []], kind := pa.list_(pa.struct([("t", pa.string())])))] * 3)
    assert arrays.join(nested).type == pa.large_list(pa.struct([("t", pa.large_string())]))
    assert convert(one(pa.field("x", kind), nested))["x"].tolist() == nested.to_pylist()


def test_a_table_of_500_columns_keeps_their_order() -> None:
    names = [f"c{i}" for i in range(500)]
    converted = convert(pa.table({name: [i, i + 1] for i, name in enumerate(names)}))
    assert list(converted) == names
    assert converted["c499"].tolist() == [499, 500]


def test_map_namespace_reaches_every_array() -> None:
    nested = convert(pa.table({"x": [[{"a": "b", "c": 1}]], "y": [1]}), nulls="mask")
    doubled = map_namespace(nested, lambda array: np.concatenate([array, array]))
    assert len(every_array(doubled)) == len(every_array(nested)) == 10
    assert doubled["y"].tolist() == [1, 1]


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (-1, 2), (3, 2), (2**61, 2**61 + 1)])
@pytest.mark.parametrize("buffer", [pa.py_buffer(bytes(32)), None])
def test_elements_outside_of_their_buffer_are_refused(start: int, stop: int, buffer: pa.Buffer | None) -> None:
    with pytest.raises(DataFileDamaged, match=r"elements .* bytes: the data file is damaged"):
        arrays.view(buffer, np.int64, start, stop)
