"""An index is a few arrays and a digest of the content; what is read back is checked."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakeckpt.errors import NewerFormat, WireDamaged, WireError
from lakeckpt.lake.storage.base import ObjectInfo
from lakeckpt.lake.table import index as module
from lakeckpt.lake.table.column_mapping import ColumnMapping, StoredField
from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.index import RestOfEpoch, TableIndex
from lakeckpt.lake.table.partitions import PartitionColumn, partition_columns
from lakeckpt.lake.table.version import TableVersion
from lakeckpt.wire import envelope as codec


def index_of(group_rows: dict[str, list[int]], /, **changes: Any) -> TableIndex:
    """An index of these files and the rows of their row groups."""
    paths = tuple(sorted(group_rows))
    rows = [group_rows[path] for path in paths]
    fields: dict[str, Any] = {
        "paths": paths,
        "size_bytes": np.array([100 + sum(r) for r in rows]),
        "etags": tuple(f"etag-{n}" if n % 2 else None for n in range(len(paths))),
        "mtime_ns": np.array([-1 if n % 3 == 2 else 10**18 + n for n in range(len(paths))]),
        "footer_digests": b"".join(bytes([n]) * 16 for n in range(len(paths))),
        "first_group": np.cumsum([0, *map(len, rows)]),
        "stored_rows": np.array([n for r in rows for n in r], np.int64),
        "group_bytes": np.array([8 * n for r in rows for n in r], np.int64),
        "partitions": partition_columns(paths),
        "schema": pa.schema([("x", pa.int64()), ("ü", pa.list_(pa.string()))]),
        **changes,
    }
    for column in fields["partitions"]:
        if column.name not in fields["schema"].names:
            fields["schema"] = fields["schema"].append(column.field)
    return TableIndex(**fields)


def files_of(index: TableIndex) -> list[ObjectInfo]:
    return [index.file(ordinal) for ordinal in range(len(index.paths))]


def partitioned(
    files: dict[str, list[int]], kind: pa.DataType, values: tuple[Any, ...], codes: list[int]
) -> TableIndex:
    column = PartitionColumn(name="k", values=values, codes=np.array(codes, np.int32), type=kind)
    return index_of(files, partitions=(column,), schema=pa.schema([("x", pa.int64()), column.field]))


FILES = {"k=a/1": [3, 0, 2], "k=b/1": [], "k=b/2": [0], "k=c/ü": [5, 1]}


def large(groups: int, per_file: int) -> TableIndex:
    files = groups // per_file
    return TableIndex(
        paths=tuple(f"year={n % 7}/part-{n:07d}.parquet" for n in sorted(range(files), key=lambda n: (n % 7, n))),
        size_bytes=np.full(files, 10**9),
        etags=(None,) * files,
        mtime_ns=np.full(files, -1),
        footer_digests=bytes(16 * files),
        first_group=np.arange(files + 1) * per_file,
        stored_rows=np.full(groups, 65_536),
        group_bytes=np.full(groups, 10**8),
        partitions=(),
        schema=pa.schema([("x", pa.int64())]),
    )


def test_every_row_group_lies_in_one_file_in_order() -> None:
    index = index_of(FILES)
    expected = [(file, group) for file, path in enumerate(sorted(FILES)) for group in range(len(FILES[path]))]
    assert [index.group(g) for g in range(len(index.group_rows))] == expected
    assert index.num_rows == 11
    for ordinal in (-1, 6):
        with pytest.raises(IndexError, match="of a table of 6"):
            index.group(ordinal)


def test_a_file_tells_all_that_was_pinned_of_it() -> None:
    index = index_of(FILES)
    files = files_of(index)
    assert [f.path for f in files] == sorted(FILES)
    assert index.first_group.tolist() == [0, 3, 3, 4, 6]
    assert [f.size_bytes for f in files] == [105, 100, 100, 106]
    assert [f.etag for f in files] == [None, "etag-1", None, "etag-3"]
    assert [f.mtime_ns for f in files] == [10**18, 10**18 + 1, None, 10**18 + 3]
    assert [index.partitions[0].value_of(file) for file in range(4)] == ["a", "b", "b", "c"]
    assert index.footer_digest(3) == b"\3" * 16
    with pytest.raises(ValueError, match="read-only"):
        index.group_rows[0] = 7


@pytest.mark.parametrize("files", [FILES, {}, {"a": []}, {"a": [0, 0]}, {"a": [2**40]}])
def test_what_was_written_is_read_back(files: dict[str, list[int]]) -> None:
    index = index_of(files)
    for again in (TableIndex.loads(index.dumps()), pickle.loads(pickle.dumps(index))):
        assert again == index
        assert again.digest == index.digest
        assert hash(again) == hash(index)
        assert again.schema == index.schema
        assert files_of(again) == files_of(index)
        assert again.group_rows.tolist() == index.group_rows.tolist()
        assert again.group_bytes.tolist() == index.group_bytes.tolist()
        assert again.dumps() == index.dumps()
        assert not again.group_rows.flags.writeable


def test_the_digest_depends_on_the_content_and_on_nothing_else() -> None:
    index = index_of(FILES)
    same = index_of(
        FILES,
        mtime_ns=np.full(4, -1),
        etags=("other",) * 4,
        group_bytes=np.zeros(6, np.int64),
        size_bytes=index.size_bytes.astype(">i8"),
        stored_rows=index.stored_rows.astype(np.uint32),
    )
    assert same.digest == index.digest
    others = [
        index_of(FILES, size_bytes=index.size_bytes + np.array([0, 0, 1, 0])),
        index_of(FILES, footer_digests=bytes(63) + b"\4"),
        index_of(FILES, first_group=np.array([0, 2, 3, 4, 6])),
        index_of(FILES, partitions=()),
        index_of({**FILES, "k=a/1": [3, 1, 1]}, size_bytes=index.size_bytes),
        index_of({**{k: v for k, v in FILES.items() if k != "k=c/ü"}, "k=c/u": [5, 1]}),
        index_of(FILES, partitions=partition_columns(["k=a/1", "k=b/1", "k=b/2", "k=d/1"])),
        index_of(FILES, partitions=partition_columns(["j=a/1", "j=b/1", "j=b/2", "j=c/1"])),
    ]
    assert len({index.digest, *(other.digest for other in others)}) == 1 + len(others)
    ints, texts = (partition_columns([f"k={v}/f", "k=2/g"]) for v in ("1", "x"))
    assert index_of({"a": [1], "b": [1]}, partitions=ints) != index_of({"a": [1], "b": [1]}, partitions=texts)


def test_the_types_of_partitions_how_columns_are_stored_and_which_rows_are_gone_are_content() -> None:
    files = {"a": [4], "b": [3]}
    columns = [ColumnMapping(fields={"x": stored}) for stored in (StoredField(field_id=1), StoredField(field_id=2))]
    columns += [ColumnMapping(fields={"x": StoredField(field_id=1, default=7)})]
    gone = [Deletes.of({file: np.array([row])}) for file, row in ((0, 1), (0, 2), (1, 1))]
    partitions = [(pa.int64(), (1, 2)), (pa.int32(), (1, 2)), (pa.string(), ("1", "2")), (pa.int64(), (1, None))]
    others = [
        index_of(files),
        *(index_of(files, columns=mapping) for mapping in columns),
        *(index_of(files, deletes=deletes) for deletes in gone),
        *(index_of(files, rest=RestOfEpoch(epoch=epoch, taken=taken)) for epoch in (0, 1) for taken in gone[:2]),
        *(partitioned(files, kind, values, codes) for kind, values in partitions for codes in ([0, 1], [1, 0])),
    ]
    assert len({one.digest for one in others}) == len(others)
    for one in others:
        again = TableIndex.loads(one.dumps())
        assert again == one and again.digest == one.digest


def test_the_schema_that_a_format_reads_files_by_is_content_and_that_of_plain_files_is_not() -> None:
    schemas = [pa.schema([("x", kind)]) for kind in (pa.int64(), pa.int32())] + [pa.schema([("y", pa.int64())])]
    delta = TableVersion(format="delta", name="3")
    assert len({index_of(FILES, schema=schema, version=delta).digest for schema in schemas}) == 3
    assert {index_of(FILES, schema=schema).digest for schema in schemas} == {index_of(FILES).digest}


def test_the_digest_is_what_it_has_always_been() -> None:
    assert index_of(FILES).digest == "aaf8d0efddec430fd660147819877721"
    gone = Deletes.of({0: np.array([1, 2])})
    every_part = replace(
        partitioned({"a": [4], "b": [3]}, pa.int32(), (1, None), [0, 1]),
        version=TableVersion(format="delta", name="3"),
        columns=ColumnMapping(fields={"x": StoredField(field_id=1, names=("old",), default=7)}),
        deletes=gone,
        rest=RestOfEpoch(epoch=2, taken=gone),
    )
    assert every_part.digest == "b8f89dc7dd6be69a995446cc4af09999"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"paths": ("a", "b", "b", "c")}, "sorted, each once"),
        ({"paths": ("b", "a", "c", "d")}, "sorted, each once"),
        ({"paths": ("../x", "a", "b", "c")}, "not confined"),
        ({"paths": ("/x", "a", "b", "c")}, "not confined"),
        ({"size_bytes": np.array([1, 2, 3])}, "an index of 4 files needs every property of each file"),
        ({"first_group": np.array([0, 4, 3, 4, 6])}, "do not add up"),
        ({"first_group": np.array([0, 3, 3, 4, 5])}, "do not add up"),
        ({"first_group": np.array([1, 3, 3, 4, 6])}, "do not add up"),
        ({"footer_digests": bytes(63)}, "an index of 4 files"),
    ],
)
def test_an_index_whose_parts_do_not_agree_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises((ValueError, OSError), match=why):
        index_of(FILES, **changes)


def rewritten(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A document that is intact as such, but says something else."""
    value = codec.loads(index_of(FILES).dumps(), kind=module.KIND, supported=module.VERSION)
    change(value)
    return codec.dumps(value, kind=module.KIND, version=module.VERSION)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(paths="../x\0k=b/1\0k=b/2\0k=c/ü"),
        lambda v: v.update(paths="/etc/passwd\0k=b/1\0k=b/2\0k=c/ü"),
        lambda v: v.update(sizes=v["sizes"][:3]),
        lambda v: v.update(group_rows=v["group_rows"] + 1),
        lambda v: v.update(first_groups=v["first_groups"][::-1]),
        lambda v: v.update(schema=b"not a schema"),
        lambda v: v.update(schema=v["schema"][:-9]),
        lambda v: v.update(schema=7),
        lambda v: v.update(digest="0" * 32),
        lambda v: v.pop("digest"),
        lambda v: v.pop("etags"),
        lambda v: v["partitions"][0].update(codes=np.array([0, 1, 2, 2])),
        lambda v: v["partitions"][0].update(values=["a", "b", "d"]),
        lambda v: v.clear(),
    ],
)
def test_a_document_that_says_what_no_index_can_is_damaged(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(WireDamaged, match="this table index"):
        TableIndex.loads(rewritten(change))


def test_a_document_that_is_not_a_mapping_is_damaged() -> None:
    for value in (None, 7, [], "x"):
        with pytest.raises(WireDamaged, match="malformed"):
            TableIndex.loads(codec.dumps(value, kind=module.KIND, version=module.VERSION))


def test_every_flipped_bit_and_truncation_is_noticed() -> None:
    data = index_of(FILES).dumps()
    for at in range(len(data)):
        with pytest.raises(WireError):
            TableIndex.loads(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        with pytest.raises(WireError):
            TableIndex.loads(data[:at])


def test_a_newer_major_version_is_refused_by_name() -> None:
    with pytest.raises(NewerFormat):
        TableIndex.loads(codec.dumps({}, kind=module.KIND, version=(2, 0)))


def test_no_object_is_kept_or_made_per_row_group() -> None:
    data = large(200_000, 2_000).dumps()
    tracemalloc.start()
    try:
        index = TableIndex.loads(data)
        kept, peak = tracemalloc.get_traced_memory()
        assert [index.group(g) for g in (0, 1999, 2000, 199_999)] == [(0, 0), (0, 1999), (1, 0), (99, 1999)]
        again = index.dumps()
        _, peak_of_dumps = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert again == data
    arrays = 2 * 8 * 200_000  # rows and bytes
    assert kept < 1.5 * arrays  # an int object per row group alone would be 28 bytes each
    assert peak < 6 * arrays
    assert peak_of_dumps < 6 * arrays


def test_an_index_of_many_row_groups_is_small() -> None:
    assert len(large(200_000, 2_000).dumps()) < 9 * 200_000


def test_an_index_written_by_version_1_0_stays_readable() -> None:
    golden = Path(__file__).parents[1] / "golden" / "lake" / "table-index-1.0.lkc"
    index = TableIndex.loads(golden.read_bytes())
    assert index == index_of(FILES)
    assert files_of(index) == files_of(index_of(FILES))
    assert index.group_rows.tolist() == [3, 0, 2, 0, 5, 1]
    assert index.schema == index_of(FILES).schema
