"""Versions of a table under a run: it keeps the one it pinned, refuses by name, or moves where an epoch begins."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, ReadOptions, open_table
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.audit_report import AuditReport
from lakeckpt.checkpoint.ledger.explain import explain
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.errors import (
    ConfigError,
    DamageWarning,
    DataFileChanged,
    SchemaError,
    StateMismatch,
    TableVersionGone,
)
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.table import Table
from tests.checkpoint.rig import HubExchange, MemoryStorage, good, manager, run_ranks
from tests.data.reading import dataset_of
from tests.patience import PATIENCE_S
from tests.tracking.processes import run_processes

deltalake = pytest.importorskip("deltalake")


def write(lake: Path, name: str, first: int, stop: int, **columns: Any) -> None:
    lake.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": list(range(first, stop)), **columns}), lake / f"{name}.parquet", row_group_size=7)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    write(tmp_path / "lake", "a", 0, 30)
    write(tmp_path / "lake", "b", 30, 53)
    return tmp_path / "lake"


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    folder = tmp_path / "delta"
    for first in (0, 20, 40):
        deltalake.write_deltalake(folder, pa.table({"id": list(range(first, first + 20))}), mode="append")
    return folder


def loader_of(table: Table | Path, *, workers: int = 0, persistent: bool = False, **options: Any) -> LakeLoader:
    settings = {"batch_size": 5, "shuffle": True, "seed": 4, **options}
    opened = open_table(table) if isinstance(table, Path) else table
    return LakeLoader(dataset_of(opened, **settings), num_workers=workers, persistent_workers=persistent)


def train(run: Path, loader: LakeLoader, *, steps: int | None = None, epochs: int = 1) -> list[list[int]]:
    """Restore, and train for ``steps`` steps or to the end of epoch ``epochs - 1``; the ids of every step."""
    model = torch.nn.Linear(1, 1)
    seen: list[list[int]] = []
    with CheckpointManager(run, {"model": model, "reader": loader}, persist_every=1) as manager:
        manager.restore()
        while loader.epoch < epochs:
            for batch in loader:
                seen.append(batch["id"].tolist())
                manager.step(batch)
                if len(seen) == steps:
                    return seen
    return seen


def audited(run: Path) -> AuditReport:
    return audit(LocalStorage(run))


def rows_of(*parts: list[list[int]]) -> list[int]:
    return sorted(row for part in parts for batch in part for row in batch)


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_a_run_goes_on_with_the_version_it_began_with(kind: str, lake: Path, delta: Path, tmp_path: Path) -> None:
    table, rows = (lake, 53) if kind == "parquet" else (delta, 60)
    first = train(tmp_path / "run", loader_of(table), steps=3)
    if kind == "parquet":
        write(lake, "0-new", 1000, 1050)
    else:
        deltalake.write_deltalake(delta, pa.table({"id": [1000, 1001]}), mode="append")
        deltalake.DeltaTable(delta).delete("id < 30")
        deltalake.DeltaTable(delta).optimize.compact()
    newest = loader_of(table)
    assert 1000 in rows_of([newest.table.storage and batch["id"].tolist() for batch in loader_of(table)])
    rest = train(tmp_path / "run", newest, epochs=2)
    assert rows_of(first, rest) == sorted([*range(rows), *range(rows)])
    report = audited(tmp_path / "run")
    assert report.verdict == "proved", report
    assert [epoch.once for reader in report.readers for epoch in reader.epochs] == [rows, rows]


def test_a_table_compacted_and_vacuumed_under_a_run_is_refused_before_anything_changes(
    delta: Path, tmp_path: Path
) -> None:
    train(tmp_path / "run", loader_of(delta), steps=3)
    pinned = open_table(delta).index.paths
    table = deltalake.DeltaTable(delta)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    loader, model = loader_of(delta), torch.nn.Linear(1, 1)
    before, weights = loader.state_dict(), model.weight.clone()
    slots = sorted(os.listdir(tmp_path / "run" / "log"))
    with pytest.raises(
        TableVersionGone, match=r"Delta version 2.*3 of its 3 files are gone.*--remap.*on_version"
    ) as told:
        CheckpointManager(tmp_path / "run", {"model": model, "reader": loader}).restore()
    assert told.value.files == pinned
    assert loader.state_dict() == before and torch.equal(model.weight, weights)
    assert sorted(os.listdir(tmp_path / "run" / "log")) == slots
    assert rows_of([batch["id"].tolist() for batch in loader]) == list(range(60))  # and it can still be used


def test_a_file_of_the_version_that_was_written_again_is_refused_by_name(lake: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", loader_of(lake), steps=3)
    write(lake, "b", 130, 153)
    write(lake, "c", 1000, 1005)
    with pytest.raises(DataFileChanged, match=r"b\.parquet.*(written again|bytes, not)"):
        train(tmp_path / "run", loader_of(lake))


def test_another_etag_of_a_file_is_refused_though_its_footer_is_the_same(lake: Path, tmp_path: Path) -> None:
    def with_etags(*etags: str) -> Table:
        table = open_table(lake)
        object.__setattr__(table.index, "etags", etags)
        return table

    train(tmp_path / "run", loader_of(with_etags("1", "2")), steps=3)
    with pytest.raises(DataFileChanged, match=r"'b\.parquet' has the ETag 3, not 2.*accept_changes"):
        train(tmp_path / "run", loader_of(with_etags("1", "3")))
    loader = loader_of(with_etags("1", "3"), accept_changes=["table"])
    assert len(rows_of(train(tmp_path / "run", loader))) == 53 - 15


@pytest.mark.parametrize(
    ("options", "said", "unsaid"),
    [
        ({}, "--remap RUN --key COLUMN.*on_version_gone", "endless"),
        ({"filters": [("id", ">", 3)]}, "on_version_gone", "--remap"),
        ({"endless": True}, "An endless stream cannot go on", "on_version_gone|--remap"),
    ],
)
def test_a_version_that_is_gone_is_refused_with_advice_that_can_be_followed(
    options: dict[str, Any], said: str, unsaid: str, delta: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    loader = loader_of(delta, **options)
    with CheckpointManager(run, {"reader": loader}) as manager:
        manager.restore()
        manager.step(next(iter(loader)))
    table = deltalake.DeltaTable(delta)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(TableVersionGone, match=said) as raised:
        CheckpointManager(run, {"reader": loader_of(delta, **options)}).restore()
    assert re.search(unsaid, str(raised.value)) is None


def test_a_version_that_was_named_is_never_exchanged_for_the_states(delta: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", loader_of(open_table(delta, version=1)), steps=3)
    with pytest.raises(
        StateMismatch, match=r"table: '\w+' \(Delta version 2\) in this dataset, '\w+' \(Delta version 1\) in the state"
    ):
        train(tmp_path / "run", loader_of(open_table(delta, version=2)))
    train(tmp_path / "run", loader_of(delta))  # not named: as the state has it
    assert audited(tmp_path / "run").readers[0].epochs[0].rows == 40


def test_a_newer_version_of_the_same_files_is_no_other_table(delta: Path, tmp_path: Path) -> None:
    first = train(tmp_path / "run", loader_of(delta), steps=3)
    deltalake.DeltaTable(delta).alter.set_table_properties({"delta.logRetentionDuration": "interval 60 days"})
    newer = loader_of(delta)
    assert str(newer.table.index.version) == "Delta version 3"
    assert rows_of(first, train(tmp_path / "run", newer)) == [*range(60)]


def test_a_version_without_the_columns_that_are_read_is_refused(delta: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", loader_of(delta), steps=3)
    wider = pa.table({"id": [70], "more": [1.5]})
    deltalake.write_deltalake(delta, wider, mode="append", schema_mode="merge")
    with pytest.raises(SchemaError, match=r"Delta version 2 .*has no column 'more'.*columns="):
        train(tmp_path / "run", loader_of(delta, columns=["id", "more"], nulls="mask"))
    assert len(rows_of(train(tmp_path / "run", loader_of(delta, columns=["id"])))) == 45


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_begins_goes_on_with_the_newest_version(workers: int, delta: Path, tmp_path: Path) -> None:
    loader = loader_of(delta, workers=workers, persistent=workers > 0, on_new_version="next_epoch")
    run = tmp_path / "run"
    seen: dict[int, list[int]] = {}
    with CheckpointManager(run, {"reader": loader}, persist_every=2) as manager:
        manager.restore()
        while loader.epoch < 3:
            epoch = loader.epoch
            for number, batch in enumerate(loader):
                seen.setdefault(epoch, []).extend(batch["id"].tolist())
                manager.step(batch)
                if number == 4 and epoch < 2:  # in the midst: not before the next epoch
                    deltalake.write_deltalake(delta, pa.table({"id": [100 * epoch + 70]}), mode="append")
    assert {epoch: sorted(rows) for epoch, rows in seen.items()} == {
        0: [*range(60)],
        1: [*range(60), 70],
        2: [*range(60), 70, 170],
    }
    report = audited(run)
    assert report.verdict == "proved", report
    assert [epoch.rows for epoch in report.readers[0].epochs] == [60, 61, 62]
    assert not report.readers[0].doubts
    history = read_history(LocalStorage(run))
    tables = [record.state["identity"]["version"] for one in history.chain for record in one.readers.values()]
    assert list(dict.fromkeys(tables)) == ["Delta version 2", "Delta version 3", "Delta version 4"]
    step = 60 // 5 + 1 + 1
    found = explain(LocalStorage(run), step).readers
    assert [one.table for one in found] == [history.chain[step // 2].readers["reader"].index]


@pytest.mark.parametrize("capture_every", [None, 1, 2])
def test_a_step_over_the_border_of_two_versions_is_explained_by_both(
    capture_every: int | None, delta: Path, tmp_path: Path
) -> None:
    loader = loader_of(delta, on_new_version="next_epoch")
    with CheckpointManager(tmp_path / "run", {"reader": loader}, capture_every=capture_every) as manager:
        manager.restore()
        for _ in loader:
            pass
        deltalake.write_deltalake(delta, pa.table({"id": [70]}), mode="append")
        manager.step(next(iter(loader)))  # one optimizer step: all of epoch 0, and a micro-batch of epoch 1
    found = explain(LocalStorage(tmp_path / "run"), 1).readers
    assert [(one.epochs, one.rows) for one in found] == [((0,), 60), ((1,), 5)]
    assert audited(tmp_path / "run").verdict == "proved"


@pytest.mark.parametrize("steps", [3, 12, 15])
def test_a_run_that_moves_is_killed_and_goes_on_exactly(steps: int, delta: Path, tmp_path: Path) -> None:
    first = train(tmp_path / "run", loader_of(delta, on_new_version="next_epoch"), steps=steps, epochs=2)
    deltalake.write_deltalake(delta, pa.table({"id": [70, 71]}), mode="append")
    rest = train(tmp_path / "run", loader_of(delta, on_new_version="next_epoch"), epochs=2)
    second = [*range(60)] if steps == 15 else [*range(60), 70, 71]  # of epoch 1 something had been read
    assert rows_of(first, rest) == sorted([*range(60), *second])
    assert audited(tmp_path / "run").verdict == "proved"


@pytest.mark.parametrize(("rows", "tail"), [(0, "short"), (3, "drop")])
def test_an_epoch_of_a_version_too_small_for_a_step_is_counted_by_that_version(
    rows: int, tail: str, delta: Path, tmp_path: Path
) -> None:
    loader = loader_of(delta, on_new_version="next_epoch", tail=tail)
    with CheckpointManager(tmp_path / "run", {"reader": loader}, persist_every=1) as manager:
        manager.restore()
        for kept in (rows, 20, 20):
            for batch in loader:
                manager.step(batch)
            table = pa.table({"id": pa.array(range(kept), pa.int64())})
            deltalake.write_deltalake(delta, table, mode="overwrite")
    report = audited(tmp_path / "run")
    assert report.verdict == "proved", report
    counted = [(one.epoch, one.rows, one.once, one.lost, one.dropped) for one in report.readers[0].epochs]
    assert counted == [(0, 60, 60, 0, 0), *([(1, rows, 0, 0, rows)] if rows else []), (2, 20, 20, 0, 0)]


def test_at_an_epochs_start_a_run_that_moves_needs_nothing_of_the_old_version(delta: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", loader_of(delta, on_new_version="next_epoch"), epochs=1)
    table = deltalake.DeltaTable(delta)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(TableVersionGone):
        train(tmp_path / "run", loader_of(delta), epochs=2)
    rest = train(tmp_path / "run", loader_of(delta, on_new_version="next_epoch"), epochs=2)
    assert rows_of(rest) == [*range(60)]
    assert audited(tmp_path / "run").verdict == "proved"


def test_the_rest_of_an_epoch_whose_version_is_gone_is_skipped_openly(delta: Path, tmp_path: Path) -> None:
    first = train(tmp_path / "run", loader_of(delta), steps=3)
    table = deltalake.DeltaTable(delta)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.warns(DamageWarning, match="skips the rest of its epoch"):
        rest = train(tmp_path / "run", loader_of(delta, on_version_gone="next_epoch"), epochs=2)
    assert len(rows_of(first)) == 15 and rows_of(rest) == [*range(60)]
    report = audited(tmp_path / "run").readers[0]
    assert [(one.status, one.once, one.dropped, one.lost) for one in report.epochs] == [
        ("skipped", 15, 45, 0),
        ("complete", 60, 0, 0),
    ]
    assert any("was skipped" in note for note in report.notes)


def test_filters_are_counted_anew_for_the_version_that_is_gone_to(delta: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"filters": [("id", ">=", 50)], "batch_size": 4, "on_new_version": "next_epoch"}
    first = train(tmp_path / "run", loader_of(delta, **options), steps=2, epochs=2)
    deltalake.write_deltalake(delta, pa.table({"id": [1, 70]}), mode="append")
    rest = train(tmp_path / "run", loader_of(delta, **options), epochs=2)
    assert rows_of(first, rest) == sorted([*range(50, 60), *range(50, 60), 70])
    assert audited(tmp_path / "run").verdict == "proved"


def rank_of_a_job(rank: int, world_size: int, folder: str, epochs: int) -> None:
    """Rank 1 opens the table after a commit that rank 0 has not seen; there is another commit in each epoch."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meet{epochs}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    delta = Path(folder, "delta")
    if rank:
        dist.barrier()
        deltalake.write_deltalake(delta, pa.table({"id": [100 * epochs]}), mode="append")
    loader = loader_of(delta, on_new_version="next_epoch")
    if not rank:
        dist.barrier()
    with CheckpointManager(f"{folder}/run", {"reader": loader}, timeout_s=PATIENCE_S) as manager:
        manager.restore()
        while loader.epoch < epochs:
            epoch = loader.epoch
            for batch in loader:
                with Path(folder, f"seen{epoch}.{rank}").open("a") as file:
                    file.writelines(f"{row}\n" for row in batch["id"].tolist())
                manager.step(batch)
            if rank:
                deltalake.write_deltalake(delta, pa.table({"id": [100 * epochs + 1 + epoch]}), mode="append")
            dist.barrier()
    dist.destroy_process_group()


@pytest.mark.soak
def test_all_ranks_go_to_the_version_that_the_first_one_finds(delta: Path, tmp_path: Path) -> None:
    run_processes(2, rank_of_a_job, 2, str(tmp_path), 2)
    run_processes(2, rank_of_a_job, 2, str(tmp_path), 3)
    seen = [
        sorted(int(row) for rank in (0, 1) for row in (tmp_path / f"seen{epoch}.{rank}").read_text().split())
        for epoch in range(3)
    ]
    assert [rows[:60] for rows in seen] == 3 * [[*range(60)]]
    # Rank 0 opened before what rank 1 wrote; what was written after an epoch counts in the next one.
    assert [rows[60:] for rows in seen] == [[], [200, 201], [200, 201, 202]]
    assert audited(tmp_path / "run").verdict == "proved"


def test_all_ranks_give_an_epoch_up_together(delta: Path) -> None:
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> list[int]:
        loader = loader_of(delta, rank=rank, world_size=2, on_version_gone="next_epoch")
        held = manager(storage, {"reader": loader}, exchange=exchange)
        held.restore()
        seen = []
        for batch in loader:
            seen += batch["id"].tolist()
            held.step(batch)
            if loader.epoch == 0 and len(seen) == 10:
                held.save()
                break
        return seen

    run_ranks(2, body)
    table = deltalake.DeltaTable(delta)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.warns(DamageWarning, match="skips the rest of its epoch"):
        mine, other = run_ranks(2, body)
    assert sorted(mine + other) == [*range(60)]


def test_ranks_that_give_an_epoch_up_read_on_from_the_version_that_rank_0_opened(delta: Path) -> None:
    storage = MemoryStorage()

    def begin(rank: int, exchange: HubExchange) -> None:
        loader = loader_of(delta, rank=rank, world_size=2)
        held = manager(storage, {"reader": loader}, exchange=exchange)
        held.restore()
        held.step(next(iter(loader)))
        held.save()

    good(run_ranks(2, begin))
    table = deltalake.DeltaTable(delta)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    tables = [open_table(delta)]
    deltalake.write_deltalake(delta, pa.table({"id": [70, 71, 72]}), mode="append")
    tables.append(open_table(delta))

    def go_on(rank: int, exchange: HubExchange) -> list[int]:
        loader = loader_of(tables[rank], rank=rank, world_size=2, on_version_gone="next_epoch")
        held = manager(storage, {"reader": loader}, exchange=exchange)
        held.restore()
        assert loader.epoch == 1
        return [row for batch in loader for row in batch["id"].tolist()]

    with pytest.warns(DamageWarning, match="skips the rest of its epoch"):
        mine, other = good(run_ranks(2, go_on))
    assert sorted(mine + other) == [*range(60)]


def test_where_a_run_begins_all_ranks_read_the_version_of_rank_0(delta: Path) -> None:
    tables = [open_table(delta)]
    deltalake.write_deltalake(delta, pa.table({"id": [70]}), mode="append")
    tables.append(open_table(delta))
    storage = MemoryStorage()

    def body(rank: int, exchange: HubExchange) -> list[int]:
        loader = loader_of(tables[rank], rank=rank, world_size=2)
        manager(storage, {"reader": loader}, exchange=exchange).restore()
        return [row for batch in loader for row in batch["id"].tolist()]

    mine, other = run_ranks(2, body)
    assert sorted(mine + other) == [*range(60)]


@pytest.mark.parametrize(
    ("options", "version", "said"),
    [
        ({"on_new_version": "latest"}, None, "keep"),
        ({"on_version_gone": "skip"}, None, "next_epoch"),
        ({"on_new_version": "next_epoch", "endless": True}, None, "endless"),
        ({"on_version_gone": "next_epoch", "endless": True}, None, "endless"),
        ({"on_new_version": "next_epoch"}, 1, "a version was named"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: dict[str, Any], version: int | None, said: str, delta: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        dataset_of(open_table(delta, version=version), batch_size=4, **options)


def test_workers_of_other_loaders_cannot_move_and_say_so(delta: Path) -> None:
    dataset = LakeDataset(open_table(delta), batch_size=4, options=ReadOptions(on_new_version="next_epoch"))
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1)
    with pytest.raises(ConfigError, match="LakeLoader"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("overwrite", "said"),
    [({"other": [1]}, "Delta version 3 .*has no column 'id'"), ({"id": ["1"]}, "column 'id' is string in .*version 3")],
)
def test_a_new_version_with_other_columns_is_refused_where_the_epoch_begins(
    overwrite: dict[str, Any], said: str, delta: Path
) -> None:
    loader = loader_of(delta, on_new_version="next_epoch", columns=["id"])
    assert len(list(loader)) == 12
    deltalake.write_deltalake(delta, pa.table(overwrite), mode="overwrite", schema_mode="overwrite")
    with pytest.raises(SchemaError, match=said):
        iter(loader)


def test_without_names_all_columns_of_each_version_are_read_before_and_after_a_restore(
    delta: Path, tmp_path: Path
) -> None:
    first = loader_of(delta, on_new_version="next_epoch")
    assert {name for batch in first for name in batch} == {"id"}
    deltalake.write_deltalake(delta, pa.table({"id": [1], "more": [2.5]}), mode="overwrite", schema_mode="overwrite")
    assert {name for batch in first for name in batch} == {"id", "more"}
    train(tmp_path / "run", loader_of(open_table(delta)), steps=1)
    deltalake.write_deltalake(delta, pa.table({"id": [1]}), mode="overwrite", schema_mode="overwrite")
    again = loader_of(delta)
    with CheckpointManager(tmp_path / "run", {"model": torch.nn.Linear(1, 1), "reader": again}) as manager:
        manager.restore()
    assert again.table.schema.names == ["id", "more"]
