"""Arrow arrays of every type that we read, and what each must look like as Python values."""

from __future__ import annotations

import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import assume
from hypothesis import strategies as st

from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.storage.base import ObjectInfo, Storage
from lakeckpt.lake.table.table import Table

INTEGERS = {
    pa.int8(): (-(2**7), 2**7 - 1),
    pa.int16(): (-(2**15), 2**15 - 1),
    pa.int32(): (-(2**31), 2**31 - 1),
    pa.int64(): (-(2**63), 2**63 - 1),
    pa.uint8(): (0, 2**8 - 1),
    pa.uint16(): (0, 2**16 - 1),
    pa.uint32(): (0, 2**32 - 1),
    pa.uint64(): (0, 2**64 - 1),
}
TEMPORALS = {
    **{pa.timestamp(unit): 64 for unit in ("s", "ms", "us", "ns")},
    **{pa.timestamp(unit, "Europe/Vienna"): 64 for unit in ("s", "ns")},
    **{pa.duration(unit): 64 for unit in ("s", "ms", "us", "ns")},
    pa.date32(): 32,
    pa.time32("s"): 17,
    pa.time32("ms"): 27,
    pa.time64("us"): 37,
    pa.time64("ns"): 47,
}
DAY_MS = 86_400_000
PYARROW = int(pa.__version__.split(".")[0])


def leaves() -> dict[pa.DataType, st.SearchStrategy[Any]]:
    """Return every type without children, and values of it (raw integers for temporal types)."""
    text, content = st.text(max_size=5), st.binary(max_size=5)
    found: dict[pa.DataType, st.SearchStrategy[Any]] = {
        kind: st.integers(low, high) for kind, (low, high) in INTEGERS.items()
    }
    for kind, width in TEMPORALS.items():
        low = 0 if pa.types.is_time(kind) else -(2 ** (width - 1))
        found[kind] = st.integers(low, 2 ** (width - 1) - 1)
    found[pa.date64()] = st.integers(-10_000, 10_000).map(lambda day: day * DAY_MS)
    found[pa.bool_()] = st.booleans()
    found[pa.null()] = st.none()
    for kind, width in ((pa.float16(), 16), (pa.float32(), 32), (pa.float64(), 64)):
        found[kind] = st.floats(width=width, allow_nan=False)
    small = (pa.decimal32(9, 3), pa.decimal64(15, 3), pa.decimal64(18, 3)) if hasattr(pa, "decimal32") else ()
    for kind in (pa.decimal128(9, 3), pa.decimal256(15, 3), pa.decimal128(15, 3), *small):
        found[kind] = st.integers(-(10**9) + 1, 10**9 - 1).map(lambda n: decimal.Decimal(n).scaleb(-3))
    found |= dict.fromkeys((pa.string(), pa.large_string(), pa.string_view()), text)
    found |= dict.fromkeys((pa.binary(), pa.large_binary(), pa.binary_view()), content)
    found[pa.binary(3)] = st.binary(min_size=3, max_size=3)
    found[pa.dictionary(pa.int8(), pa.string())] = text
    found[pa.dictionary(pa.uint16(), pa.int64())] = st.integers(-5, 5)
    return found


LEAVES = leaves()


def _maybe_null(values: st.SearchStrategy[Any], nullable: bool) -> st.SearchStrategy[Any]:
    return st.none() | values if nullable else values


@st.composite
def fields(draw: st.DrawFn, name: str, depth: int = 2) -> tuple[pa.Field, st.SearchStrategy[Any]]:
    """Draw a field, nullable or not, and the strategy of its values."""
    kind, values = draw(types(depth))
    nullable = draw(st.booleans()) or pa.types.is_null(kind)
    return pa.field(name, kind, nullable), _maybe_null(values, nullable)


@st.composite
def types(draw: st.DrawFn, depth: int = 2) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    """Draw a type of at most ``depth`` levels of nesting, and the strategy of its values other than null."""
    shape = draw(st.sampled_from(["leaf", "leaf", "list", "fixed", "struct", "map"])) if depth else "leaf"
    if shape == "leaf":
        kind = draw(st.sampled_from(list(LEAVES)))
        return kind, LEAVES[kind]
    if shape == "struct":
        drawn = [draw(fields(name, depth - 1)) for name in ["a", "b"][: draw(st.integers(1, 2))]]
        return pa.struct([f for f, _ in drawn]), st.fixed_dictionaries({f.name: values for f, values in drawn})
    item, values = draw(fields("item", depth - 1))
    if shape == "fixed":
        size = draw(st.integers(1, 3))  # size 0 has tests of its own: Arrow 26 aborts where it writes it to Parquet
        return pa.list_(item, size), st.lists(values, min_size=size, max_size=size)
    if shape == "map":
        key = draw(st.sampled_from([pa.string(), pa.int32()]))
        return pa.map_(key, item), st.lists(st.tuples(LEAVES[key], values), max_size=3)
    make = draw(st.sampled_from([pa.list_, pa.large_list]))
    return make(item), st.lists(values, max_size=3)


@st.composite
def columns(draw: st.DrawFn, name: str = "x") -> tuple[pa.Field, pa.ChunkedArray, list[Any]]:
    """Draw a field, a column of it (a few chunks, each a slice of a longer array), and what its rows must look like."""
    field, values = draw(fields(name))
    chunks, rows = [], []
    for _ in range(draw(st.integers(0, 3))):
        chunk = draw(st.lists(values, max_size=9))
        start = draw(st.integers(0, len(chunk)))
        count = draw(st.integers(0, len(chunk) - start))
        built = build(chunk, field.type)
        if PYARROW < 25:  # forgets parts of a few nested types
            assume(built.type == field.type)
        chunks.append(built.slice(start, count))
        rows += [shown(value, field.type) for value in chunk[start : start + count]]
    return field, pa.chunked_array(chunks, field.type), rows


def build(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return an array of ``kind``; temporal values are raw integers."""
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)


def shown(value: Any, kind: pa.DataType) -> Any:
    """Return what a column of ``kind`` shows for ``value``: temporal values raw, decimals as floats, maps as lists."""
    if value is None:
        return None
    if pa.types.is_decimal(kind):
        return float(value)
    if pa.types.is_fixed_size_binary(kind):
        return list(value)
    if pa.types.is_struct(kind):
        return {f.name: shown(value[f.name], f.type) for f in (kind.field(i) for i in range(kind.num_fields))}
    if pa.types.is_map(kind):
        return [{"key": key, "value": shown(item, kind.item_type)} for key, item in value]
    if hasattr(kind, "value_field"):
        return [shown(one, kind.value_type) for one in value]
    return value


def has_null(rows: list[Any]) -> bool:
    """Tell whether there is None anywhere in ``rows``."""
    for row in rows:
        if row is None:
            return True
        inner = list(row.values()) if isinstance(row, dict) else row if isinstance(row, list) else []
        if has_null(inner):
            return True
    return False


class CountingStorage:
    """A storage that records what is read: (path, start, stop); ``fail`` is raised by the reads that come."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.reads: list[tuple[str, int, int | None]] = []
        self.fail: Exception | None = None

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self.inner.list(prefix)

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        if self.fail is not None:
            raise self.fail
        self.reads.append((path, start, stop))
        return self.inner.read(path, start, stop)

    def put(self, path: str, chunks: Any) -> int:
        raise NotImplementedError

    def put_new(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    def delete(self, path: str) -> None:
        raise NotImplementedError


def counted(table: Table) -> tuple[Table, CountingStorage]:
    """Return ``table`` read through a storage that counts."""
    storage = CountingStorage(table.storage)
    return Table(uri=table.uri, storage=storage, index=table.index), storage


def write_file(path: Path, groups: list[pa.Table], **options: Any) -> Path:
    """Write a Parquet file with one row group for each of ``groups``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, groups[0].schema, **options) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=max(1, group.num_rows))
    return path


def write_ids(folder: Path, layout: list[list[int]]) -> Table:
    """Write a table whose files have row groups of these sizes; rows are numbered in table order (``id``, ``text``)."""
    begin = 0
    for ordinal, sizes in enumerate(layout):
        groups = []
        for size in sizes:
            ids = np.arange(begin, begin + size)
            text = pa.array([f"row {i}" for i in ids], pa.string())
            groups.append(
                pa.table({"id": ids, "text": text, "pair": pa.array(np.stack([ids, -ids], 1).tolist(), PAIR)})
            )
            begin += size
        write_file(folder / f"{ordinal:04d}.parquet", groups or [IDS.empty_table()])
    return open_table(folder)


PAIR = pa.list_(pa.int64(), 2)
IDS = pa.schema([("id", pa.int64()), ("text", pa.string()), ("pair", PAIR)])
