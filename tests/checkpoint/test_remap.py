"""The rows that a run has consumed are found in a rewritten table by a key, and another run leaves them out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt import open_table
from lakeckpt.checkpoint.ledger.consumed_keys import ConsumedKeys, consumed_keys
from lakeckpt.cli.main import main
from lakeckpt.errors import CheckpointNotFound, ConfigError, TableError, TableVersionGone
from lakeckpt.lake.storage.local import LocalStorage
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


def keys(delta: Path, run: Path, key: str = "id") -> ConsumedKeys:
    return consumed_keys(LocalStorage(run), open_table(delta), key=key)


@pytest.mark.parametrize(("steps", "shuffle"), [(5, False), (1, True), (5, True), (11, True)])
def test_a_run_over_the_rewritten_table_leaves_out_what_another_has_consumed(
    steps: int, shuffle: bool, delta: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "num_lanes": 3}
    first = train(tmp_path / "run", loader_of(delta, **options), steps=steps)
    compact(delta)
    done = keys(delta, tmp_path / "run")
    assert sorted(done.values.to_pylist()) == rows_of(first) and done.left == len(ROWS) - len(rows_of(first))
    vacuum(delta)
    rest = train(tmp_path / "next", loader_of(delta, consumed=("id", done.values), **options), epochs=2)
    assert rows_of(first, rest) == sorted(2 * ROWS)
    report = audited(tmp_path / "next")
    assert report.verdict == "proved", report
    assert any("by consumed=" in note for note in report.readers[0].notes)


@pytest.mark.parametrize("seed", range(2))
def test_random_rewrites_lose_and_repeat_nothing(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    folder, ids = tmp_path / "table", list(range(200))
    choose.shuffle(ids)
    for part in range(5):
        deltalake.write_deltalake(folder, pa.table({"id": ids[part * 40 : part * 40 + 40]}), mode="append")
    parts: list[list[list[int]]] = []
    options: dict[str, Any] = {}
    while len(rows_of(*parts)) < 200:
        run = tmp_path / f"run {len(parts)}"
        loader = loader_of(folder, num_lanes=choose.choice([1, 3]), batch_size=choose.choice([3, 8]), **options)
        parts.append(train(run, loader, steps=choose.randrange(1, 12)))
        table = deltalake.DeltaTable(folder)
        table.optimize.z_order(["id"]) if choose.random() < 0.5 else table.optimize.compact()
        options = {"consumed": ("id", keys(folder, run).values)}
        vacuum(folder)
    assert rows_of(*parts) == list(range(200))


def add_a_row(delta: Path) -> None:
    deltalake.write_deltalake(delta, pa.table({"id": [300], "name": ["n"], "same": [1]}), mode="append")


def gone(delta: Path) -> None:
    compact(delta)
    vacuum(delta)


@pytest.mark.parametrize(
    ("change", "key", "error", "said"),
    [
        (add_a_row, "id", TableError, "has 58 rows and .* has 59: rows were added or deleted"),
        (compact, "same", TableError, "'same' .* values in several rows"),
        (compact, "other", ConfigError, "no column 'other'"),
        (gone, "id", TableVersionGone, "files are gone"),
    ],
)
def test_what_cannot_be_found_again_is_refused(
    change: Callable[[Path], None], key: str, error: type[Exception], said: str, delta: Path, tmp_path: Path
) -> None:
    train(tmp_path / "run", loader_of(delta), steps=3)
    change(delta)
    with pytest.raises(error, match=said):
        keys(delta, tmp_path / "run", key)


def test_filtered_and_endless_readers_and_places_without_a_checkpoint_are_refused(delta: Path, tmp_path: Path) -> None:
    for name, options in (("a", {"filters": [("id", ">", 3)]}), ("b", {"endless": True})):
        train(tmp_path / name, loader_of(delta, **options), steps=2)
    compact(delta)
    refusals = {"a": (ConfigError, "filter"), "b": (ConfigError, "endless"), "c": (CheckpointNotFound, "no checkpoint")}
    for name, (error, said) in refusals.items():
        with pytest.raises(error, match=said):
            keys(delta, tmp_path / name)


def test_the_command_writes_the_keys_and_says_what_to_do_with_them(
    delta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "consumed.parquet"
    first = train(run, loader_of(delta), steps=3)
    compact(delta)
    assert main(["plan", str(delta), "--remap", str(run)]) != 0
    assert "--key" in capsys.readouterr().err
    asked = ["plan", str(delta), "--remap", str(run), "--key", "id", "--out", str(out)]
    assert main([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["consumed"], said["left"], said["step"]) == (15, 43, 3)
    assert main(asked) == 0 and "15 rows consumed, 43 rows left" in capsys.readouterr().out
    assert sorted(pq.read_table(out)["id"].to_pylist()) == rows_of(first)
