"""Rows under the deletion vectors of a Delta table do not exist; vectors that cannot be honoured are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from lakeckpt import LakeLoader, open_table
from lakeckpt.errors import DataFileDamaged, TableVersionGone
from lakeckpt.testing import assert_exactly_once
from tests.data.reading import dataset_of
from tests.lake.formats.delta_log import adds, commit, delete_rows, upgrade
from tests.lake.formats.delta_tables import actions_of, assert_all_versions, of, theirs, write
from tests.lake.formats.rows import bag, delivered_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake ü =x"


@pytest.mark.parametrize("kind", ["inline", "relative", "absolute"])
def test_rows_under_deletion_vectors_do_not_exist(root: Path, kind: Any) -> None:
    write(root, of(0, 90), partition_by=["s"], mode="append")
    plain = open_table(root)
    commit(root, [upgrade("deletionVectors")])
    first, second, *_ = sorted(adds(root))
    size = {row["path"]: row["num_records"] for row in actions_of(root)}
    delete_rows(root, {first: range(0, size[first], 2)}, kind)
    delete_rows(root, {first: range(size[first]), second: [0, size[second] - 1]}, kind)
    assert_all_versions(root)
    table = open_table(root)
    assert plain.num_rows == 90 and table.num_rows == 90 - size[first] - 2
    assert table.index.digest != plain.index.digest
    assert open_table(root, version=0).index.digest == plain.index.digest
    # A reader of another make, on the version before the columns' own features matter.
    assert polars_rows(root) == delivered_of(table)


def polars_rows(root: Path) -> Counter[Hashable]:
    table = DeltaTable(str(root))
    frames = []
    kept = {
        name.rpartition("/")[2]: np.array(vector)
        for name, vector in (row.values() for row in pa.table(table.deletion_vectors()).to_pylist())
    }
    for action in pa.table(table.get_add_actions()).to_pylist():
        name = action["path"].rpartition("/")[2]
        (path,) = root.rglob(name)
        frame = pl.read_parquet(path, hive_partitioning=False)
        frame = frame.filter(pl.Series(kept[name])) if name in kept else frame
        frames += [row | action["partition"] for row in frame.to_dicts()]
    return bag([{name: row[name] for name in ("id", "p", "s")} for row in frames])


def test_every_row_that_exists_counts_once(tmp_path: Path) -> None:
    root = tmp_path / "t"
    for start in (0, 40):
        write(root, of(start, 20), mode="append", partition_by=["p"])
    DeltaTable(str(root)).delete("id % 7 = 3")
    commit(root, [upgrade("deletionVectors")])
    sizes = [(row["path"], row["num_records"]) for row in actions_of(root)]
    delete_rows(root, {sizes[0][0]: range(sizes[0][1]), sizes[1][0]: [1], sizes[2][0]: [0, 2]})
    table = open_table(root)
    assert 0 < table.num_rows < 37

    def make_loader(rank: int, world_size: int, num_workers: int, **options: Any) -> LakeLoader:
        dataset = dataset_of(table, batch_size=3, shuffle=True, columns=["id", "p"], nulls="mask", rank=rank,
                             world_size=world_size, **options)  # fmt: skip
        return LakeLoader(dataset, num_workers=num_workers)

    expected = theirs(root)
    assert sum(expected.values()) == table.num_rows == len(delivered_of(table))
    assert_exactly_once(make_loader, topologies=[(1, 0), (2, 0), (3, 0)], offsets=4, key="id")


@pytest.mark.parametrize("how", ["magic", "checksum", "cut"])
def test_a_damaged_deletion_vector_is_refused(root: Path, how: str) -> None:
    write(root, of(0, 9))
    commit(root, [upgrade("deletionVectors")])
    crafted: dict[str, dict[str, Any]] = {"magic": {"magic": 7}, "checksum": {"broken": True}}
    delete_rows(root, {next(iter(adds(root))): [1, 2]}, **crafted.get(how, {}))
    if how == "cut":
        (path,) = root.rglob("deletion_vector_*.bin")
        path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(DataFileDamaged, match=r"deltalake cannot read its deletion vectors.*(magic|CRC32|not enough)"):
        open_table(root)


def test_a_deletion_vector_that_is_gone_is_refused(root: Path) -> None:
    write(root, of(0, 9))
    commit(root, [upgrade("deletionVectors")])
    delete_rows(root, {next(iter(adds(root))): [1, 2]})
    next(root.rglob("deletion_vector_*.bin")).unlink()
    with pytest.raises(TableVersionGone, match=r"deletion_vector_.*\.bin.*one is gone"):
        open_table(root)
