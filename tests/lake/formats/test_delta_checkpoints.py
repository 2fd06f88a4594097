"""Versions of a Delta table whose commits were cleaned up: told by checkpoints of every kind, deletion vectors too."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from lakeckpt import open_table
from lakeckpt.errors import TableNotFound
from tests.lake.formats.delta_log import adds, commit, delete_rows, upgrade
from tests.lake.formats.delta_tables import of, theirs, write
from tests.lake.formats.rows import delivered_of

LAST = 4


def as_it_is(root: Path, classic: Path) -> None:
    """One file, as deltalake writes it."""


def in_parts(root: Path, classic: Path) -> None:
    actions = pq.read_table(classic)
    for part, start in enumerate(range(0, actions.num_rows, 2), 1):
        parts = (actions.num_rows + 1) // 2
        pq.write_table(
            actions.slice(start, 2), classic.parent / f"{LAST:020}.checkpoint.{part:010}.{parts:010}.parquet"
        )
    (classic.parent / "_last_checkpoint").write_text(
        json.dumps({"version": LAST, "size": actions.num_rows, "parts": parts})
    )
    classic.unlink()


def with_sidecars(root: Path, classic: Path) -> None:
    """Version 2 of checkpoints: the table's actions in JSON, those of files in a Parquet file beside."""
    actions = pq.read_table(classic)
    files = actions.filter(pc.is_valid(actions["add"])).select(["add"])
    sidecars = classic.parent / "_sidecars"
    sidecars.mkdir()
    beside = sidecars / f"{uuid.uuid4()}.parquet"
    pq.write_table(files, beside)
    told = {"path": beside.name, "sizeInBytes": beside.stat().st_size, "modificationTime": 1}
    lines = [{"checkpointMetadata": {"version": LAST}}, {"sidecar": told}, upgrade("deletionVectors", "v2Checkpoint")]
    first = (classic.parent / f"{0:020}.json").read_text().splitlines()
    lines += [json.loads(line) for line in first if "metaData" in line]
    name = classic.parent / f"{LAST:020}.checkpoint.{uuid.uuid4()}.json"
    name.write_text("\n".join(map(json.dumps, lines)) + "\n")
    (classic.parent / "_last_checkpoint").unlink()
    classic.unlink()


@pytest.mark.skipif(
    metadata.version("deltalake") == "1.6.0", reason="this deltalake writes to no table of V2Checkpoint"
)
@pytest.mark.parametrize("kind", [as_it_is, in_parts, with_sidecars])
def test_versions_are_told_by_checkpoints(kind: Callable[[Path, Path], None], tmp_path: Path) -> None:
    root = tmp_path / "t"
    write(root, of(0, 9), partition_by=["p"])
    commit(root, [upgrade("deletionVectors", "v2Checkpoint")])
    first, second, third = sorted(adds(root))
    delete_rows(root, {first: [0]}, "inline")
    delete_rows(root, {second: [1], third: [0, 1]}, "relative")
    write(root, of(20, 5), mode="append")
    expected = [theirs(root, version) for version in range(LAST + 1)]
    DeltaTable(str(root)).create_checkpoint()
    log = root / "_delta_log"
    kind(root, log / f"{LAST:020}.checkpoint.parquet")
    for version in range(LAST):
        (log / f"{version:020}.json").unlink()
    assert delivered_of(open_table(root)) == theirs(root) == expected[LAST]
    assert sum(expected[LAST].values()) == 10
    commit(root, [{"remove": {"path": first, "dataChange": True}}])
    assert delivered_of(open_table(root)) == theirs(root)
    assert delivered_of(open_table(root, version=LAST)) == expected[LAST]
    with pytest.raises(TableNotFound, match=f"its version {LAST - 1}"):
        open_table(root, version=LAST - 1)
