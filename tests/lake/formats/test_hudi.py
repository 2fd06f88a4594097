"""Hudi: for every instant, the rows that are delivered are those that hudi's own reader finds, or it is refused."""

from __future__ import annotations

import datetime
import hashlib
import tempfile
import traceback
from collections import Counter
from collections.abc import Hashable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt import LakeLoader, open_table
from lakeckpt.errors import (
    ConfigError,
    DataFileChanged,
    TableError,
    TableNotFound,
    TableVersionGone,
)
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.testing import assert_exactly_once
from tests.data.reading import dataset_of
from tests.examples import examples
from tests.lake.conftest import CANARY, S3
from tests.lake.formats.hudi_tables import SPARK, Crafted, instants, theirs, written_by_spark
from tests.lake.formats.rows import bag, delivered_of

T1, T2, T3, T4 = (f"2024010{day}120000000" for day in (1, 2, 3, 4))
UTC = datetime.UTC


def same_as_hudi(root: Path, instant: str | None = None) -> Table:
    table = open_table(root, version=instant)
    names = table.schema.names
    expected: Counter[Hashable] = Counter()
    for batch in theirs(root, instant):
        rows = pa.Table.from_batches([batch]).select(names).cast(table.schema)
        expected += bag(rows.to_pylist())
    assert table.num_rows == expected.total()
    assert (delivered_of(table) if table.num_rows else Counter()) == expected
    assert table.index.version.format == "hudi"
    assert TableIndex.loads(table.index.dumps()) == table.index
    return table


def same_at_every_instant(root: Path) -> list[int]:
    """The rows of each instant."""
    found = []
    for instant in instants(root):
        table = same_as_hudi(root, instant)
        assert table.index.version.name == instant
        found.append(table.num_rows)
    assert same_as_hudi(root).index.version.name == instants(root)[-1]
    return found


def rows(start: int, stop: int, p: str = "a") -> pa.Table:
    return pa.table({"id": pa.array(range(start, stop), pa.int64()), "p": [p] * (stop - start)})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a lake" / "tablé"


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("v6_complexkeygen_hivestyle", [3, 4]),
        ("v6_simplekeygen_nonhivestyle_overwritetable", [3, 4, 1]),
        ("v8_simplekeygen_nonhivestyle", [3, 4]),
        ("v8_simplekeygen_hivestyle_no_metafields", [4]),
        ("v9_txns_simple_nometa", [8, 8, 7, 7, 6, 6, 8, 6, 8, 10, 10, 12]),
    ],
)
def test_every_instant_of_tables_that_spark_wrote_is_what_hudi_reads(
    name: str, counts: list[int], tmp_path: Path
) -> None:
    assert same_at_every_instant(written_by_spark(name, tmp_path)) == counts


def test_the_tables_that_spark_wrote_are_unchanged() -> None:
    for line in (SPARK / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((SPARK / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("name", ["mor_v6_nonpartitioned", "mor_table_log_only"])
def test_log_files_that_are_not_compacted_are_refused(name: str, tmp_path: Path) -> None:
    place = written_by_spark(name, tmp_path)
    with pytest.raises(TableError, match=r"file groups of the Hudi table .* have log files .*compaction"):
        open_table(place)


def test_instants_of_merge_on_read_tables_without_log_files_are_read(tmp_path: Path) -> None:
    place = written_by_spark("mor_v6_simplekeygen_nonhivestyle_overwritetable", tmp_path)
    first, second, last = instants(place)
    assert same_as_hudi(place, last).num_rows == 1
    for instant in (first, second):
        with pytest.raises(TableError, match=r"1 of [23] file groups"):
            open_table(place, version=instant)


def test_a_table_that_was_never_written_has_no_rows(tmp_path: Path) -> None:
    table = open_table(written_by_spark("v8_empty", tmp_path))
    assert (table.num_rows, table.index.version.name) == (0, "0") and "id" in table.schema.names


def test_updates_inserts_and_replaced_file_groups_are_told_by_instant(root: Path) -> None:
    lake = Crafted(root, {"hoodie.table.partition.fields": "p"})
    lake.commit(T1, {("p=a", "f1-0"): rows(0, 5), ("p=b", "f2-0"): rows(10, 13, "b")})
    lake.commit(T2, {("p=a", "f1-0"): rows(0, 7), ("p=c d/é%2F", "f3-0"): rows(20, 22, "c")})
    lake.commit(T3, {("p=b", "f4-0"): rows(30, 31, "b")}, action="replacecommit", replaced={"p=b": ["f2-0"]})
    assert same_at_every_instant(root) == [8, 12, 10]


def test_files_and_instants_that_did_not_complete_do_not_exist(root: Path) -> None:
    lake = Crafted(root)
    lake.commit(T1, {("", "f1-0"): rows(0, 5)})
    lake.commit(T2, {("", "f1-0"): rows(0, 9), ("", "f2-0"): rows(50, 60)}, complete=False)
    assert same_at_every_instant(root) == [5]
    with pytest.raises(TableNotFound, match=f"no completed instant {T2}: it has {T1}"):
        open_table(root, version=T2)


VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "day": (pa.date32(), [datetime.date(2024, 2, 29), None]),
    "at": (pa.timestamp("us", "UTC"), [datetime.datetime(2024, 1, 1, 1, 2, 3, 4, UTC), None]),
    "price": (pa.decimal128(8, 2), [Decimal("1.50"), None]),
    "flag": (pa.bool_(), [True, None]),
    "real": (pa.float64(), [float("nan"), -0.0]),
    "raw": (pa.binary(), [b"\0\xff", None]),
    "tags": (pa.list_(pa.int32()), [[1, None], []]),
    "place": (pa.struct([("x", pa.int64()), ("y", pa.string())]), [{"x": 1, "y": None}, None]),
    "more": (pa.map_(pa.string(), pa.int64()), [[("a", 1)], None]),
}


@pytest.mark.parametrize("name", VALUES)
def test_columns_of_every_type_partition_columns_too(root: Path, name: str) -> None:
    kind, values = VALUES[name]
    lake = Crafted(root, {"hoodie.table.partition.fields": name})
    stored = pa.table({"id": pa.array([1, 2], pa.int64()), name: pa.array(values, kind)})
    lake.commit(T1, {("x", "f1-0"): stored})
    assert same_as_hudi(root).schema.field(name).type == kind


def test_columns_that_were_added_or_widened_are_those_of_the_instant(root: Path) -> None:
    lake = Crafted(root)
    lake.commit(T1, {("", "f1-0"): pa.table({"id": pa.array([1, 2], pa.int32())})})
    wide = pa.table({"id": pa.array([2**40], pa.int64()), "new": ["x"]})
    lake.commit(T2, {("", "f2-0"): wide})
    assert same_at_every_instant(root) == [2, 3]
    old, new = (open_table(root, version=instant) for instant in (T1, T2))
    assert old.schema.field("id").type == pa.int32() and "new" not in old.schema.names
    assert new.schema.field("id").type == pa.int64() and new.schema.names[-1] == "new"
    digest = old.index.digest
    lake.commit(T3, {("", "f3-0"): pa.table({"id": ["text"], "new": ["x"], "newer": [0.5]})})
    assert open_table(root, version=T1).index.digest == digest
    told = open_table(root).schema
    lake.commit(T4, {}, action="replacecommit", replaced={"": ["f1-0"]}, schema=pa.schema([("id", pa.string())]))
    assert told.names[-2:] == ["new", "newer"] and open_table(root).schema.names[-1] == "id"


def test_versions_are_named_by_instant(root: Path) -> None:
    lake = Crafted(root)
    for number, instant in enumerate((T1, T2, T3), 1):
        lake.commit(instant, {("", f"f{number}-0"): rows(number * 10, number * 10 + 1)})

    assert open_table(root).index.version.name == T3
    assert open_table(root, version=int(T2)).num_rows == 2
    assert open_table(root, version=T2).index.version.timestamp_ms == 1_704_196_800_000
    with pytest.raises(TableNotFound, match=rf"no completed instant {int(T1) + 1}: .*those before were archived"):
        open_table(root, version=int(T1) + 1)


def test_an_instant_of_writers_whose_zone_nobody_knows_has_no_time(root: Path) -> None:
    lake = Crafted(root, {"hoodie.table.timeline.timezone": "LOCAL"})
    lake.commit(T1, {("", "f1-0"): rows(0, 3)})
    assert same_as_hudi(root, T1).index.version.timestamp_ms is None


@pytest.mark.parametrize(
    ("properties", "match"),
    [
        ({"hoodie.table.base.file.format": "LANCE"}, "are LANCE"),
        ({"hoodie.bootstrap.base.path": "s3://elsewhere"}, "bootstrapped"),
        ({"hoodie.datasource.write.drop.partition.columns": "true"}, "drop.partition.columns"),
        ({"hoodie.table.version": "5"}, "table version 6, 8, and 9"),
    ],
)
def test_what_cannot_be_read_exactly_is_refused_by_name(root: Path, properties: dict[str, str], match: str) -> None:
    Crafted(root, properties).commit(T1, {("", "f1-0"): rows(0, 3)})
    with pytest.raises(TableError, match=match):
        open_table(root)


def test_schemas_that_are_evolved_on_read_are_refused(root: Path) -> None:
    lake = Crafted(root)
    lake.commit(T1, {("", "f1-0"): rows(0, 3)})
    lake.commit(T2, {("", "f2-0"): rows(3, 5)}, latest_schema='{"version_id": 1}')
    assert open_table(root, version=T1).num_rows == 3
    with pytest.raises(TableError, match="schema on read"):
        open_table(root)


def test_files_that_were_cleaned_or_written_again_are_named(root: Path) -> None:
    lake = Crafted(root)
    lake.commit(T1, {("", "f1-0"): rows(0, 3)})
    lake.commit(T2, {("", "f1-0"): rows(0, 5)})
    pinned = open_table(root, version=T1)
    (path,) = root.glob(f"*_{T1}.parquet")
    kept = path.read_bytes()
    path.write_bytes(kept + b"more")
    with pytest.raises(DataFileChanged):
        pinned.verify()
    path.unlink()
    with pytest.raises(TableVersionGone) as gone:
        pinned.verify()
    assert gone.value.files == (path.name,)
    with pytest.raises(TableVersionGone, match=f"Hudi instant {T1} of .*{path.name}' is gone") as gone:
        open_table(root, version=T1)
    assert gone.value.files == (path.name,)
    assert same_as_hudi(root, T2).num_rows == 5
    next(root.glob(f"*_{T2}.parquet")).rename(root / "moved")
    path.write_bytes(kept)  # hudi finds the older file where the newer one is lost
    assert sum(batch.num_rows for batch in theirs(root, T2)) == 3
    with pytest.raises(TableVersionGone, match=T2):
        open_table(root)
    path.write_bytes(kept + b"more")
    with pytest.raises(DataFileChanged, match="bytes, not"):
        open_table(root, version=T1)


def test_files_whose_commits_are_archived_are_missed_too(root: Path) -> None:
    lake = Crafted(root, {"hoodie.table.partition.fields": "p"})
    lake.commit(T1, {("a", "f1-0"): rows(0, 3), ("a", "f2-0"): rows(3, 5), ("a", "f3-0"): rows(5, 9)})
    lake.commit(T2, {("b", "f4-0"): rows(20, 22)})
    lake.commit(T3, {("a", "f1-0"): rows(0, 2)}, before=T1)
    lake.commit(T4, {("a", "f5-0"): rows(30, 31)}, action="replacecommit", replaced={"a": ["f2-0"]})
    for path in (root / ".hoodie").glob(f"{T1}.*"):
        path.unlink()
    assert same_at_every_instant(root) == [11, 10, 9]
    for name in ("f1-0", "f2-0"):
        (path,) = root.glob(f"a/{name}*_{T1}.parquet")
        kept = path.read_bytes()
        path.unlink()
        with pytest.raises(TableVersionGone) as gone:
            open_table(root, version=T2)
        assert [file.partition("_")[0] for file in gone.value.files] == [f"a/{name}"]
        assert same_as_hudi(root, T4).num_rows == 9
        path.write_bytes(kept)


def test_damaged_timelines_are_said_to_be(root: Path) -> None:
    Crafted(root).commit(T1, {("", "f1-0"): rows(0, 3)})
    (root / ".hoodie" / f"{T1}.commit").write_text("{")
    with pytest.raises(TableError, match=r"of the Hudi table .*, hudi cannot read"):
        open_table(root)


def test_without_hudi_the_error_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakeckpt.lake.formats import library as pinned

    Crafted(root).commit(T1, {("", "f1-0"): rows(0, 3)})
    find = pinned.importlib.util.find_spec
    monkeypatch.setattr(pinned.importlib.util, "find_spec", lambda name: None if name == "hudi" else find(name))
    with pytest.raises(ConfigError, match=r'pip install "lakeckpt\[hudi\]"'):
        open_table(root)


def test_every_row_that_exists_counts_once(root: Path) -> None:
    lake = Crafted(root)
    lake.commit(T1, {("", "f1-0"): rows(0, 11), ("", "f2-0"): rows(20, 27)})
    lake.commit(T2, {("", "f1-0"): rows(0, 9)})
    table = open_table(root, version=T2)

    def make_loader(rank: int, world_size: int, num_workers: int, **options: Any) -> LakeLoader:
        dataset = dataset_of(
            table, batch_size=3, shuffle=True, columns=["id"], rank=rank, world_size=world_size, **options
        )
        return LakeLoader(dataset, num_workers=num_workers)

    assert_exactly_once(make_loader, topologies=[(1, 0), (2, 0)], offsets=3, key="id")


FILES = st.dictionaries(st.integers(0, 4), st.integers(1, 5), min_size=1, max_size=3)


@settings(max_examples=examples(10))
@given(history=st.lists(st.tuples(st.booleans(), FILES), min_size=1, max_size=5))
def test_every_instant_of_any_history_is_what_hudi_reads(history: list[tuple[bool, dict[int, int]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = Crafted(Path(folder, "t"))
        made: list[str] = []
        for number, (overwrite, files) in enumerate(history):
            instant = f"202401{number + 1:02}120000000"
            new = {
                ("", f"f{file}{'r' + str(number) if overwrite else ''}-0"): rows(100 * number, 100 * number + count)
                for file, count in files.items()
            }
            action = "replacecommit" if overwrite else "commit"
            lake.commit(instant, new, action=action, replaced={"": made} if overwrite else None)
            made = list(dict.fromkeys([*([] if overwrite else made), *(file_id for _, file_id in new)]))
        same_at_every_instant(lake.root)


def test_a_table_on_s3_is_read_with_the_options_of_its_storage(root: Path, s3: S3) -> None:
    lake = Crafted(root, {"hoodie.table.partition.fields": "p"})
    lake.commit(T1, {("a b", "f1-0"): rows(0, 5), ("c", "f2-0"): rows(5, 9)})
    for path in root.rglob("*"):
        if path.is_file():
            s3.client.put_object(Bucket=s3.bucket, Key=f"lake/h/{path.relative_to(root)}", Body=path.read_bytes())
    place = f"s3://{s3.bucket}/lake/h"
    table = open_table(place, storage_options=s3.options)
    assert delivered_of(table) == delivered_of(same_as_hudi(root)) and table.index.etags[0] is not None
    with pytest.raises(TableNotFound) as refused:
        open_table(place, version=T4, storage_options=s3.options)
    assert CANARY not in "".join(traceback.format_exception(refused.value)) + repr(table)
