"""plan tells what a loader will find: steps, cut row groups, bytes, and what is unwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lakeckpt
from lakeckpt.cli.plan.columns import ColumnBytes, column_bytes
from lakeckpt.cli.plan.facts import PlannedTopology, plan_facts, warnings_of
from tests.checkpoint.scripts import write_table

Ask = Callable[..., tuple[int, Any]]
Show = Callable[..., tuple[int, str]]


@pytest.mark.parametrize("tail", ["short", "drop"])
@pytest.mark.parametrize(("world_size", "workers", "batch_size"), [(1, 0, 7), (2, 3, 5), (4, 0, 50), (8, 4, 64)])
def test_steps_lanes_and_dropped_rows_are_those_of_a_loader(
    lake: Path, ask: Ask, tail: str, world_size: int, workers: int, batch_size: int
) -> None:
    words = ["--world-size", world_size, "--workers", workers, "--batch-size", batch_size, "--tail", tail]
    status, plain = ask("plan", lake, *words)
    assert status == 0 and (plain["files"], plain["row_groups"], plain["rows"]) == (3, 7, 200)
    loaders = [
        lakeckpt.LakeLoader(
            lakeckpt.LakeDataset(
                str(lake),
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                options=lakeckpt.ReadOptions(num_lanes=plain["lanes"]),
                drop_last=tail == "drop",
            )
        )
        for rank in range(world_size)
    ]
    batches = [list(loader) for loader in loaders]
    assert plain["lanes"] == world_size * max(1, workers)
    assert {len(one) for one in batches} == {plain["steps"]}
    assert plain["dropped_rows"] == 200 - sum(len(batch["id"]) for one in batches for batch in one)
    rows = [sum(len(one[step]["id"]) for one in batches) for step in range(plain["steps"])]
    assert plain["short_steps"] == sum(count < batch_size * world_size for count in rows)
    assert plain["windows_open"] == plain["lanes"] // world_size


def test_bytes_of_the_asked_columns_only(lake: Path, ask: Ask) -> None:
    _, one = ask("plan", lake, "--columns", "id")
    _, both = ask("plan", lake, "--columns", "id,text")
    _, every = ask("plan", lake)
    stored = 0
    for path in lake.glob("*.parquet"):
        metadata = pq.read_metadata(path)
        groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
        stored += sum(group.column(0).total_compressed_size for group in groups if group.num_rows)
    assert (one["columns"], one["stored_bytes"], one["decoded_bytes"]) == (["id"], stored, 8 * 200)
    assert both["stored_bytes"] > one["stored_bytes"] and both["decoded_bytes"] > one["decoded_bytes"]
    assert both == every


def test_memory_is_that_of_the_windows_that_are_held(tmp_path: Path, ask: Ask) -> None:
    write_table(tmp_path, files=[(100,) * 10, (100,) * 10])
    words = ["--columns", "id", "--world-size", 2, "--workers", 2, "--batch-size", 10]
    _, flat = ask("plan", tmp_path, *words)
    assert (flat["windows_open"], flat["windows_held"], flat["window_bytes"], flat["memory_bytes"]) == (2, 8, 800, 6400)
    _, mixed = ask("plan", tmp_path, *words, "--shuffle", "--window", 4)
    assert (mixed["windows_open"], mixed["window_bytes"], mixed["memory_bytes"]) == (2, 3200, 25600)
    _, narrow = ask("plan", tmp_path, *words, "--shuffle", "--window", 8, "--lanes", 10)  # a window ends with its lane
    assert (narrow["windows_held"], narrow["window_bytes"], narrow["most_memory_bytes"]) == (12, 1600, 19200)


@pytest.mark.parametrize(("lanes", "cut"), [(1, 0), (2, 0), (4, 0), (8, 4), (40, 20), (3, 2)])
def test_row_groups_are_cut_where_lanes_end_inside_of_them(tmp_path: Path, ask: Ask, lanes: int, cut: int) -> None:
    write_table(tmp_path, files=[(100,) * 20])
    _, plain = ask("plan", tmp_path, "--lanes", lanes)
    assert plain["cut_row_groups"] == cut


def test_decoded_bytes_are_those_of_delivered_values(tmp_path: Path, ask: Ask) -> None:
    widths = {
        pa.bool_(): 1,
        pa.int16(): 2,
        pa.timestamp("us"): 8,
        pa.decimal128(20, 2): 8,
        pa.list_(pa.float32(), 3): 12,
        pa.struct([("a", pa.int8()), ("b", pa.float64())]): 9,
    }
    schema = pa.schema([(f"column{number}", kind) for number, kind in enumerate(widths)])
    pq.write_table(schema.empty_table(), tmp_path / "none.parquet")
    pq.write_table(pa.table([pa.nulls(10, kind) for kind in widths], schema=schema), tmp_path / "ten.parquet")
    _, plain = ask("plan", tmp_path)
    assert plain["decoded_bytes"] == 10 * sum(widths.values())


def test_partition_columns_are_told_and_cost_nothing(tmp_path: Path, ask: Ask) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"x": np.arange(10)}), tmp_path / f"day={day}" / "a.parquet")
    _, plain = ask("plan", tmp_path)
    assert plain["partition_columns"] == ["day"] and plain["columns"] == ["x"]
    _, plain = ask("plan", tmp_path, "--columns", "x,day")
    assert plain["decoded_bytes"] == 160


def test_an_unknown_column_is_an_error_that_names_those_there_are(lake: Path, show: Show) -> None:
    status, told = show("plan", lake, "--columns", "id,nope")
    assert status == 2 and "'nope'" in told and "'id', 'text'" in told


def test_a_table_that_is_not_there_is_an_error(tmp_path: Path, ask: Ask) -> None:
    status, plain = ask("plan", tmp_path / "none")
    assert status == 2 and plain["error"]["kind"] == "table_not_found"


@pytest.mark.parametrize("words", [("--world-size", 0), ("--batch-size", 0), ("--workers", -1), ("--lanes", 0)])
def test_topologies_that_cannot_be_are_refused(lake: Path, ask: Ask, words: tuple[object, ...]) -> None:
    assert ask("plan", lake, *words)[0] == 2


def test_several_files_and_a_table_without_rows(tmp_path: Path, lake: Path, ask: Ask) -> None:
    _, plain = ask("plan", lake / "part-0.parquet", lake / "part-2.parquet")
    assert (plain["files"], plain["rows"]) == (2, 174)
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "empty.parquet")
    status, plain = ask("plan", tmp_path)
    assert (status, plain["rows"], plain["steps"], plain["memory_bytes"]) == (0, 0, 0, 0)
    assert plain["warnings"] == ["no row is read"]


def test_what_is_unwise_is_said(tmp_path: Path, lake: Path, ask: Ask, show: Show) -> None:
    write_table(tmp_path, files=[(10,)] * 40)
    _, plain = ask("plan", tmp_path, "--batch-size", 64, "--tail", "drop", "--lanes", 50)
    assert [text.split(":")[0].split(" (")[0] for text in plain["warnings"]] == [
        "tiny files",
        "small row groups",
        "more lanes",
        "drop_last=True drops 100.0 % of each epoch",
    ]
    status, told = show("plan", tmp_path, "--batch-size", 64)
    assert status == 0 and "tiny files" in told


def test_giant_row_groups_are_named(lake: Path) -> None:
    table = lakeckpt.open_table(str(lake))
    sizes = column_bytes(table, None)
    giant = sizes.decoded.copy()
    giant[4] = 6 * 10**8
    topology = PlannedTopology(
        world_size=1, workers=0, batch_size=8, num_lanes=None, shuffle=False, window=1, tail="short"
    )
    sizes = ColumnBytes(names=sizes.names, stored=sizes.stored, decoded=giant)
    warnings = warnings_of(plan_facts(table, sizes, topology), table, sizes)
    assert [text for text in warnings if "row group 1 of 'part-1.parquet', to 600 MB" in text]


def test_the_table_for_people_holds_the_figures(lake: Path, show: Show) -> None:
    status, told = show("plan", lake, "--world-size", 2, "--batch-size", 16, "--shuffle")
    assert status == 0
    for text in ("Parquet", "row groups", "7, 28 rows each", "2 ranks × 0 workers", "32 per step", "held at once"):
        assert text in told


@pytest.mark.parametrize(
    "words",
    [
        ("--lanes", 2**21),
        ("--world-size", 2**21),
        ("--workers", 2**21),
        ("--batch-size", 2**40),
        ("--window", 2**40, "--shuffle"),
        ("--world-size", 0),
        ("--lanes", 0),
        ("--workers", -1),
    ],
)
def test_a_topology_that_cannot_be_is_refused_by_name(lake: Path, ask: Ask, words: tuple[object, ...]) -> None:
    status, plain = ask("plan", lake, *words)
    assert status == 2 and plain["error"]["kind"] == "config"


def test_one_of_a_thing_is_told_as_one(tmp_path: Path, show: Show) -> None:
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "one.parquet")
    status, told = show("plan", tmp_path, "--workers", 2)
    assert status == 0 and "cut 1 row group, which is decoded again" in told
    status, told = show("plan", tmp_path, "--lanes", 3)
    assert status == 0 and "cut 1 row group, which is decoded again" in told
    pq.write_table(pa.table({"id": [1]}), tmp_path / "one.parquet")
    status, told = show("plan", tmp_path)
    assert status == 0 and "1 row each on average" in told and "their borders cut no row group" in told
