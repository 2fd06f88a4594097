"""The rest of an epoch is carried over to another version of the table: proved by a key, or refused, nothing done."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from lakeckpt import CheckpointManager, open_table
from lakeckpt.checkpoint.ledger.explain import explain
from lakeckpt.checkpoint.restore.rest_of_epoch import carry_over
from lakeckpt.cli.main import main
from lakeckpt.errors import ConfigError, TableError, TableVersionGone
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.index import TableIndex
from tests.checkpoint.test_versions import audited, loader_of, rows_of, train

deltalake = pytest.importorskip("deltalake")


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    folder = tmp_path / "delta"
    for first in (0, 20, 40):
        ids = list(range(first, first + 20))
        columns = {"id": ids, "name": [f"n{i}" for i in ids], "same": [1] * 20}
        deltalake.write_deltalake(folder, pa.table(columns), mode="append")
    deltalake.DeltaTable(folder).delete("id in (5, 25)")
    return folder


ROWS = [row for row in range(60) if row not in (5, 25)]


def compact(delta: Path) -> None:
    deltalake.DeltaTable(delta).optimize.compact()


def vacuum(delta: Path) -> None:
    deltalake.DeltaTable(delta).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


def carry(delta: Path, run: Path, *key: str) -> Any:
    return carry_over(LocalStorage(run), open_table(delta), key=key or ("id",))


@pytest.mark.parametrize(("steps", "shuffle"), [(5, False), (1, True), (5, True), (12, True)])
def test_a_place_is_carried_over_a_compaction_and_nothing_is_lost_or_repeated(
    steps: int, shuffle: bool, delta: Path, tmp_path: Path
) -> None:
    run, options = tmp_path / "run", {"shuffle": shuffle, "num_lanes": 3}
    first = train(run, loader_of(delta, **options), steps=steps)
    compact(delta)
    done = carry(delta, run)
    assert (done.consumed, done.left) == (len(rows_of(first)), len(ROWS) - len(rows_of(first)))
    vacuum(delta)
    rest = train(run, loader_of(delta, **options), epochs=2)
    assert rows_of(first, rest) == sorted(2 * ROWS)
    report = audited(run)
    assert report.verdict == "proved", report
    counted = [(one.epoch, one.status, one.once, one.lost) for one in report.readers[0].epochs]
    assert counted[0] == (0, "carried over" if done.left else "complete", done.consumed, 0)
    assert counted[-1] == (1, "complete", len(ROWS), 0)
    assert done.left == 0 or counted[1] == (0, "complete", done.left, 0)


def test_a_job_of_another_size_goes_on_from_what_was_carried_over_and_is_killed_again(
    delta: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    parts = [train(run, loader_of(delta, num_lanes=2), steps=4)]
    compact(delta)
    carry(delta, run)
    vacuum(delta)
    for steps, batch_size, workers in ((2, 3, 0), (3, 4, 2), (None, 7, 0)):
        loader = loader_of(delta, batch_size=batch_size, workers=workers, num_lanes=2)
        parts.append(train(run, loader, steps=steps, epochs=2))
    assert rows_of(*parts) == sorted(2 * ROWS)
    assert audited(run).verdict == "proved"
    found = explain(LocalStorage(run), 5).readers[0]
    assert found.rows == 3 and found.table == json_of(run)["index"]


@pytest.mark.parametrize("skips", [False, True])
def test_after_what_was_carried_over_the_place_is_one_in_the_whole_version(
    skips: bool, delta: Path, tmp_path: Path
) -> None:
    read = train(tmp_path / "run", loader_of(delta), steps=4)
    compact(delta)
    carry(delta, tmp_path / "run")
    loader = loader_of(delta)
    CheckpointManager(tmp_path / "run", {"model": torch.nn.Linear(1, 1), "reader": loader}).restore()
    assert loader.state_dict()["identity"]["rows"] == len(ROWS) - len(rows_of(read))
    if skips:
        loader.set_epoch(1)
    else:
        assert rows_of(read, [batch["id"].tolist() for batch in loader]) == ROWS
    state = loader.state_dict()
    assert (state["epoch"], state["identity"]["rows"]) == (1, len(ROWS))
    another = loader_of(delta)
    another.load_state_dict(state)
    assert rows_of([batch["id"].tolist() for batch in another]) == ROWS


def json_of(run: Path) -> dict[str, Any]:
    from lakeckpt.wire.envelope import loads

    (path,) = (run / "remap").rglob("*.lkc")
    found: dict[str, Any] = loads(path.read_bytes(), kind="carried-over", supported=(1, 0))["reader"]
    return found


@pytest.mark.parametrize("moves", ["keep", "next_epoch"])
@pytest.mark.parametrize(("batch_size", "steps"), [(13, 3), (16, 2)])
def test_too_little_carried_over_for_a_step_is_told_as_dropped(
    batch_size: int, steps: int, moves: str, delta: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = {"num_lanes": 2, "batch_size": batch_size, "drop_last": True, "on_new_version": moves}
    first = train(run, loader_of(delta, **options), steps=steps)
    compact(delta)
    left = len(ROWS) - steps * batch_size
    assert carry(delta, run).left == left < 2 * batch_size - 1  # no lane of two makes a batch of it
    rest = train(run, loader_of(delta, **options), steps=1, epochs=2)
    assert rows_of(first, rest) != [] and len(rows_of(rest)) == batch_size
    report = audited(run)
    assert report.verdict == "proved", report
    counted = [(one.epoch, one.status, one.once, one.lost, one.dropped) for one in report.readers[0].epochs]
    assert counted[:2] == [(0, "carried over", steps * batch_size, 0, 0), (0, "complete", 0, 0, left)]
    assert counted[2][:4] == (1, "in progress", batch_size, 0)


def test_what_was_carried_over_can_be_carried_over_again(delta: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    parts = [train(run, loader_of(delta), steps=3)]
    compact(delta)
    carry(delta, run)
    parts.append(train(run, loader_of(delta), steps=4))
    deltalake.DeltaTable(delta).optimize.z_order(["name"])
    assert carry(delta, run).consumed == len(rows_of(*parts))
    vacuum(delta)
    parts.append(train(run, loader_of(delta)))
    assert rows_of(*parts) == ROWS
    report = audited(run)
    assert report.verdict == "proved", report
    assert [one.status for one in report.readers[0].epochs] == ["carried over", "carried over", "complete"]


def test_what_had_been_read_before_the_run_is_told_of_the_version_that_it_was_read_of(
    delta: Path, tmp_path: Path
) -> None:
    """The run goes on from a state that was saved elsewhere, in the midst of an epoch."""
    run, elsewhere = tmp_path / "run", loader_of(delta)
    before = [batch["id"].tolist() for batch in itertools.islice(elsewhere, 3)]
    loader = loader_of(delta)
    loader.load_state_dict(elsewhere.state_dict())
    parts = [before, train(run, loader, steps=3)]
    compact(delta)
    carry(delta, run)
    parts.append(train(run, loader_of(delta), epochs=2))
    assert rows_of(*parts) == sorted(2 * ROWS)
    (reader,) = audited(run).readers
    counted = [(one.status, one.before, one.once, one.left, one.lost) for one in reader.epochs]
    left = len(ROWS) - 30
    assert counted == [("carried over", 15, 15, left, 0), ("complete", 0, left, 0, 0), ("complete", 0, len(ROWS), 0, 0)]
    assert [doubt.partition(",")[0] for doubt in reader.doubts] == [
        "the record begins inside of epoch 0: 15 rows had been consumed before it"
    ]


def test_a_run_that_moves_reads_what_is_left_and_then_the_newest_version(delta: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = train(run, loader_of(delta, on_new_version="next_epoch"), steps=3)
    compact(delta)
    carry(delta, run)
    deltalake.write_deltalake(delta, pa.table({"id": [70], "name": ["x"], "same": [1]}), mode="append")
    rest = train(run, loader_of(delta, on_new_version="next_epoch"), epochs=2)
    assert rows_of(first, rest) == sorted([*ROWS, *ROWS, 70])
    assert audited(run).verdict == "proved"


def change_a_key(delta: Path) -> None:
    deltalake.DeltaTable(delta).update({"id": "100"}, predicate="id = 30")
    compact(delta)


def exchange_a_row(delta: Path) -> None:
    deltalake.DeltaTable(delta).delete("id = 30")
    deltalake.write_deltalake(delta, pa.table({"id": [300], "name": ["n"], "same": [1]}), mode="append")


def add_a_row(delta: Path) -> None:
    deltalake.write_deltalake(delta, pa.table({"id": [300], "name": ["n"], "same": [1]}), mode="append")


def gone(delta: Path) -> None:
    compact(delta)
    vacuum(delta)


@pytest.mark.parametrize(
    ("change", "key", "error", "said"),
    [
        (change_a_key, ["id"], TableError, "given other keys"),
        (exchange_a_row, ["id"], TableError, "rows were added, deleted"),
        (add_a_row, ["id"], TableError, "0 and 1 keys in the files that differ.*rows were added"),
        (compact, ["same"], TableError, "'same' is no unique key"),
        (compact, ["other"], ConfigError, "no column 'other'"),
        (compact, [], ConfigError, "name the column"),
        (gone, ["id"], TableVersionGone, "files are gone"),
        (lambda delta: None, ["id"], ConfigError, "nothing to carry over"),
    ],
)
def test_what_cannot_be_proved_is_refused_and_nothing_is_written(
    change: Callable[[Path], None], key: list[str], error: type[Exception], said: str, delta: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(run, loader_of(delta), steps=3)
    before = sorted(path for path in run.rglob("*"))
    change(delta)
    with pytest.raises(error, match=said):
        carry_over(LocalStorage(run), open_table(delta), key=key)
    assert sorted(path for path in run.rglob("*")) == before


def test_filtered_and_endless_readers_are_refused(delta: Path, tmp_path: Path) -> None:
    for name, options in (("a", {"filters": [("id", ">", 3)]}), ("b", {"endless": True})):
        train(tmp_path / name, loader_of(delta, **options), steps=2)
    compact(delta)
    with pytest.raises(ConfigError, match="filter"):
        carry(delta, tmp_path / "a")
    with pytest.raises(ConfigError, match="endless"):
        carry(delta, tmp_path / "b")


def test_the_command_says_what_it_did_and_refuses_by_name(
    delta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(run, loader_of(delta), steps=3)
    shutil.copytree(delta, tmp_path / "copy")
    shutil.copytree(run, tmp_path / "again")
    gone(tmp_path / "copy")
    with pytest.raises(TableVersionGone, match="--remap"):
        train(run, loader_of(tmp_path / "copy"))
    compact(delta)
    assert main(["plan", str(delta), "--remap", str(run)]) != 0
    assert "--key" in capsys.readouterr().err
    assert main(["plan", str(delta), "--remap", str(run), "--key", "id", "--key", "same", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["consumed"], said["left"], said["version"]) == (15, 43, "Delta version 4")
    assert main(["plan", str(delta), "--remap", str(tmp_path / "again"), "--key", "id"]) == 0
    assert "15 rows" in capsys.readouterr().out


def test_an_index_of_a_rest_comes_back_from_its_document(delta: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", loader_of(delta), steps=3)
    compact(delta)
    carry(delta, tmp_path / "run")
    path = tmp_path / "run" / "index" / f"{json_of(tmp_path / 'run')['index']}.lkc"
    index = TableIndex.loads(path.read_bytes())
    assert index.rest is not None and index.rest.epoch == 0 and index.num_rows == 43
    assert TableIndex.loads(index.dumps()) == index != index.whole == open_table(delta).index


@pytest.mark.parametrize("seed", range(2))
def test_random_rewrites_carry_over_exactly(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    folder, run, ids = tmp_path / "table", tmp_path / "run", list(range(200))
    choose.shuffle(ids)
    for part in range(5):
        deltalake.write_deltalake(folder, pa.table({"id": ids[part * 40 : part * 40 + 40]}), mode="append")
    parts = []
    while not parts or len(rows_of(*parts)) < 200:
        loader = loader_of(folder, num_lanes=choose.choice([1, 3]), batch_size=choose.choice([3, 8]))
        parts.append(train(run, loader, steps=choose.randrange(1, 12)))
        table = deltalake.DeltaTable(folder)
        table.optimize.z_order(["id"]) if choose.random() < 0.5 else table.optimize.compact()
        if open_table(folder).index.digest != loader.table.index.whole.digest:
            carry_over(LocalStorage(run), open_table(folder), key=["id"])
            vacuum(folder)
    assert rows_of(*parts) == list(range(200))
    assert audited(run).verdict == "proved"
