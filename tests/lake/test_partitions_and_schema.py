"""Folders' names become columns, and the schemas of files become one, or name the two files that cannot agree."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.errors import SchemaError
from lakeckpt.lake.parquet.types import plain_type
from lakeckpt.lake.table.partitions import partition_columns
from lakeckpt.lake.table.schema import check_agreed, table_schema


def values(paths: list[str]) -> dict[str, list[object]]:
    return {c.name: [c.values[code] for code in c.codes] for c in partition_columns(paths)}


def test_all_integers_make_an_int64_column_and_anything_else_strings() -> None:
    found = partition_columns(["y=2023/m=01/k=1/f", "y=2024/m=12/k=x/f"])
    assert [(c.name, c.field.type) for c in found] == [("y", pa.int64()), ("m", pa.int64()), ("k", pa.string())]
    assert values(["y=2023/m=01/k=1/f", "y=2024/m=12/k=x/f"]) == {"y": [2023, 2024], "m": [1, 12], "k": ["1", "x"]}


def test_integers_beyond_64_bits_stay_text() -> None:
    assert values([f"a={2**63}/f"]) == {"a": [str(2**63)]}
    assert values([f"a={2**63 - 1}/f", f"a={-(2**63)}/g"]) == {"a": [2**63 - 1, -(2**63)]}


@pytest.mark.parametrize("text", ["", "1.5", "1_000", " 1", "+1", "٣", "1e3", "--1", "0x1"])
def test_only_plain_digits_are_integers(text: str) -> None:
    assert values([f"a={text}/f"]) == {"a": [text]}


def test_the_null_folder_and_a_missing_folder_are_null() -> None:
    paths = ["a=1/f", "a=__HIVE_DEFAULT_PARTITION__/f", "f"]
    assert values(paths) == {"a": [1, None, None]}
    (column,) = partition_columns(paths)
    assert column.field.nullable
    assert not partition_columns(["a=1/f"])[0].field.nullable
    (nulls,) = partition_columns(["a=__HIVE_DEFAULT_PARTITION__/f"])
    assert nulls.field.type == pa.string()


def test_names_and_values_are_percent_decoded() -> None:
    assert values(["a%20b=x%2Fy%3D1/f", "a%20b=ü=z/f"]) == {"a b": ["x/y=1", "ü=z"]}


@pytest.mark.parametrize("path", ["k=a%FF/f", "%FE=a/f"])
def test_what_is_no_text_when_it_is_decoded_is_refused(path: str) -> None:
    with pytest.raises(SchemaError, match="not UTF-8 when it is percent-decoded"):
        values(["k=a/f", path])


def test_one_integer_written_two_ways_is_one_value() -> None:
    (column,) = partition_columns(["m=7/f", "m=07/f"])
    assert column.values == (7,)
    assert column.codes.tolist() == [0, 0]


def test_folders_without_a_key_are_only_folders() -> None:
    assert values(["=1/f", "plain/f", "a=2/b.parquet=1"]) == {"a": [None, None, 2]}


def test_a_key_twice_in_one_path_is_refused() -> None:
    with pytest.raises(SchemaError, match="'a=1/a=2/f' has the partition 'a' twice"):
        partition_columns(["a=1/a=2/f"])


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(-5, 5) | st.sampled_from(["x", ""])), max_size=8))
def test_what_was_spelled_into_paths_is_read_back(rows: list[dict[str, int | str]]) -> None:
    found = values(["/".join([*(f"{key}={value}" for key, value in row.items()), "f"]) for row in rows])
    assert set(found) == {key for row in rows for key in row}
    for key, column in found.items():
        texts = [str(row[key]) if key in row else None for row in rows]
        assert [None if value is None else str(value) for value in column] == texts
        assert all(isinstance(value, int | None) for value in column) or all(isinstance(v, str | None) for v in column)


def test_columns_are_widened_added_and_become_nullable_where_a_file_lacks_them() -> None:
    first = pa.schema([pa.field("a", pa.int32(), nullable=False), pa.field("b", pa.string(), nullable=False)])
    second = pa.schema([pa.field("c", pa.float32()), pa.field("a", pa.int64(), nullable=False)])
    schema = table_schema([("1", first), ("2", second), ("3", first)], [])
    assert schema == pa.schema(
        [pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.string()), pa.field("c", pa.float32())]
    )
    nulls = table_schema([("1", pa.schema([("a", pa.null())])), ("2", pa.schema([("a", pa.string())]))], [])
    assert nulls.field("a").type == pa.string()


def test_files_that_cannot_agree_are_both_named_when_the_column_is_read() -> None:
    fine = pa.schema([("x", pa.int8()), ("a", pa.int32())])
    files = [("1.parquet", fine), ("2.parquet", fine), ("3.parquet", pa.schema([("a", pa.list_(pa.string()))]))]
    schema = table_schema(files, [])
    check_agreed(schema, ["x"])
    with pytest.raises(SchemaError, match=r"'a' is int32 in '1.parquet', but list<.*> in '3.parquet'"):
        check_agreed(schema, ["x", "a"])


def test_partition_columns_come_last_and_stand_for_a_files_own() -> None:
    files = [("year=2024/f", pa.schema([("year", pa.string()), ("x", pa.int8())]))]
    schema = table_schema(files, partition_columns(["year=2024/f"]))
    assert schema.names == ["x", "year"]
    assert schema.field("year").type == pa.int64()


def test_encodings_are_told_as_their_values_at_any_depth() -> None:
    dictionary = pa.dictionary(pa.int8(), pa.string())
    kinds = {
        dictionary: pa.string(),
        pa.list_(dictionary): pa.list_(pa.string()),
        pa.large_list(dictionary): pa.large_list(pa.string()),
        pa.list_(dictionary, 3): pa.list_(pa.string(), 3),
        pa.struct([("a", pa.list_(dictionary))]): pa.struct([("a", pa.list_(pa.string()))]),
        pa.map_(pa.string(), dictionary): pa.map_(pa.string(), pa.string()),
        pa.uuid(): pa.binary(16),
        pa.list_(pa.string_view()): pa.list_(pa.string()),
        pa.binary_view(): pa.binary(),
        pa.timestamp("us", "UTC"): pa.timestamp("us", "UTC"),
        pa.decimal128(10, 2): pa.decimal128(10, 2),
    }
    for kind, plain in kinds.items():
        assert plain_type(kind) == plain


def test_metadata_of_a_writer_does_not_make_files_differ() -> None:
    one = pa.schema([pa.field("a", pa.int32(), metadata={"PARQUET:field_id": "1"})], metadata={"pandas": "{}"})
    two = pa.schema([pa.field("a", pa.int32(), metadata={"PARQUET:field_id": "2"})])
    schema = table_schema([("1", one.remove_metadata()), ("2", two)], [])
    assert schema.metadata is None
    assert schema.field("a").metadata is None
