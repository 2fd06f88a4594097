"""What the loop takes and does not train on is on record: the audit says PROVED EXCEPT these rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.audit_report import AuditReport
from lakeckpt.cli.main import main
from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.checkpoint.scripts import write_table
from tests.data.reading import dataset_of

ROWS = 200


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> lakeckpt.Table:
    return lakeckpt.open_table(str(write_table(tmp_path_factory.mktemp("lake"))))


def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"id": row["id"]}, {"id": row["id"]}]


def words(text: str) -> list[int]:
    return [int(text.split()[1]) % 7, *range(int(text.split()[1]) % 4)]


def reader_of(table: lakeckpt.Table, kind: str, rank: int = 0, world_size: int = 1) -> lakeckpt.LakeLoader:
    ranks = {"rank": rank, "world_size": world_size}
    if kind == "mix":
        parts = {name: (dataset_of(table, batch_size=10, columns=["id"], **ranks), 0.5) for name in ("web", "code")}
        return lakeckpt.LakeLoader(lakeckpt.mix(parts, seed=1, batch_size=10))
    if kind in ("tokens", "whole"):
        dataset = dataset_of(table, batch_size=2, **ranks)
        return lakeckpt.LakeLoader(lakeckpt.pack(dataset, length=8, column="text", tokenizer=words))
    options: dict[str, Any] = {"columns": ["id"], "batch_size": 10, "shuffle": True, **ranks}
    if kind == "single":
        options["batch_size"] = None
    if kind == "many":
        options |= {"rows": "many", "transform": twice, "endless": world_size > 1}
    if kind == "filter":
        options["filters"] = [("id", ">=", 110)]
    return lakeckpt.LakeLoader(dataset_of(table, **options))


def ids(batch: Any) -> list[int]:
    return sorted({int(one) for one in batch["id"].reshape(-1)})


def run_of(
    storage: Any, reader: lakeckpt.LakeLoader, *, skips: Callable[[int], bool], steps: int, **options: Any
) -> Any:
    """An attempt that takes so many batches, and skips those whose number ``skips`` names; the ids it skipped."""
    exchange = options.pop("exchange", None)
    kwargs = {} if exchange is None else {"exchange": exchange}
    saver = manager(storage, {"count": Counter(), "reader": reader}, persist_every=2, **kwargs, **options)
    saver.restore()
    skipped: list[int] = []
    for number, batch in enumerate(reader):
        if skips(number):
            saver.skip(batch)
            skipped += ids(batch) if "id" in batch else [0]
        saver.step(batch)
        if number + 1 == steps:
            break
    saver.save()
    saver.close()
    return skipped


def named(report: AuditReport, table: lakeckpt.Table) -> list[int]:
    """The ids of the rows that a report lists as excluded."""
    starts, done = {}, 0
    index = table.index
    for ordinal, rows in enumerate(index.group_rows.tolist()):
        file, group = index.group(ordinal)
        starts[index.paths[file], group] = done
        done += rows
    every = [one for reader in report.readers for one in reader.excluded]
    return [
        starts[one.file, one.row_group] + row
        for one in every
        for start, stop in one.ranges
        for row in range(start, stop)
    ]


@pytest.mark.parametrize("kind", ["rows", "single", "mix"])
def test_rows_that_were_skipped_are_excluded_by_name(table: lakeckpt.Table, kind: str) -> None:
    storage = MemoryStorage()
    steps = 100 if kind == "single" else 8
    skipped = run_of(storage, reader_of(table, kind), skips=lambda n: n in (2, 3, 6), steps=steps)
    skipped += run_of(storage, reader_of(table, kind), skips=lambda n: n == 1, steps=4)
    report = audit(storage)
    count = 4 if kind == "single" else 40
    assert (report.verdict, report.exit_status, report.exactly_once) == ("except", 0, True), report.words
    assert report.headline == f"PROVED EXCEPT {count} rows" and report.excluded == count
    assert sorted(set(named(report, table))) == sorted(set(skipped))
    assert sum(epoch.once for reader in report.readers for epoch in reader.epochs) == (
        104 - count if kind == "single" else 120 - count
    )
    assert {one.reason for reader in report.readers for one in reader.excluded} == {"trainer"}


@pytest.mark.parametrize("kind", ["many", "tokens"])
def test_rows_of_flows_that_were_skipped_are_excluded(table: lakeckpt.Table, kind: str) -> None:
    storage = MemoryStorage()
    run_of(storage, reader_of(table, kind), skips=lambda n: n in (1, 2), steps=9)
    report = audit(storage)
    assert report.verdict == "except" and 0 < report.excluded <= 20, report.words
    (epoch,) = report.readers[0].epochs
    assert epoch.excluded == report.excluded and epoch.once + epoch.excluded + epoch.left == epoch.rows


def test_packed_sequences_that_were_skipped_are_excluded(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = pa.array([[n] * (n % 9) for n in range(60)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens": documents}), tmp_path / "t.parquet", row_group_size=20)
    storage = MemoryStorage()
    reader = lakeckpt.LakeLoader(lakeckpt.pack(lakeckpt.LakeDataset(tmp_path / "t.parquet", batch_size=2), length=8))
    run_of(storage, reader, skips=lambda n: n == 1, steps=5)
    report = audit(storage)
    assert (report.headline, report.readers[0].excluded[0].rows) == ("PROVED EXCEPT 2 sequences", 2)


@pytest.mark.parametrize("kind", ["rows", "many"])
def test_each_rank_skips_batches_of_its_own(table: lakeckpt.Table, kind: str) -> None:
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def body(rank: int, exchange: HubExchange) -> Any:
        reader = reader_of(table, kind, rank, 2)
        return run_of(storage, reader, skips=lambda n: n == 2 + rank, steps=6, exchange=exchange, waiter=waiter)

    skipped = good(run_ranks(2, body, waiters=[waiter]))
    report = audit(storage)
    assert report.verdict == "except", report.words
    assert sorted(set(named(report, table))) == sorted({*skipped[0], *skipped[1]})
    assert {(one.rank, one.step) for one in report.readers[0].excluded} == {(0, 3), (1, 4)}


def test_what_is_captured_beside_training_has_what_was_skipped(table: lakeckpt.Table, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options: dict[str, Any] = {"capture_every": 1, "arenas": tmp_path / "arenas"}
    reader = reader_of(table, "rows")
    with lakeckpt.CheckpointManager(run, {"count": Counter(), "reader": reader}, persist_every=100, **options) as saver:
        saver.restore()
        for number, batch in enumerate(reader):
            if number in (1, 5):
                saver.skip(batch)
            saver.step(batch)
    assert audit(LocalStorage(run)).headline == "PROVED EXCEPT 20 rows"


def test_a_batch_that_is_skipped_counts_with_the_step_after_it(table: lakeckpt.Table) -> None:
    storage = MemoryStorage()
    for _ in range(2):
        reader = reader_of(table, "rows")
        saver = manager(storage, {"count": Counter(), "reader": reader})
        saver.restore()
        batches = iter(reader)
        saver.step(next(batches))
        saver.skip(next(batches))
        saver.skip(reader.last_receipt)  # the same one
        saver.step(next(batches))
        saver.skip(next(batches))  # no step follows: it comes again
        saver.save()
    report = audit(storage)
    assert report.headline == "PROVED EXCEPT 20 rows" and report.readers[0].epochs[0].left == ROWS - 60


def test_what_a_step_has_used_cannot_be_skipped(table: lakeckpt.Table) -> None:
    reader = reader_of(table, "rows")
    saver = manager(MemoryStorage(), {"count": Counter(), "reader": reader})
    saver.restore()
    batches = iter(reader)
    batch = next(batches)
    saver.step(batch)
    with pytest.raises(ConfigError, match="which an earlier step has used"):
        saver.skip(batch)
    with pytest.raises(ConfigError, match="takes the batch that is not trained on"):
        saver.skip(None)


def test_the_commands_say_what_was_skipped(
    table: lakeckpt.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(LocalStorage(tmp_path), reader_of(table, "rows"), skips=lambda n: n == 1, steps=4)
    assert main(["audit", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "PROVED EXCEPT 10 rows  " in said and "10 excluded (trainer)" in said
    assert "excluded: trainer: " in said and "before or at step 2 on rank 0" in said
    assert main(["audit", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["excluded"]) == ("except", 10)
    assert main(["explain", str(tmp_path), "--step", "2"]) == 0
    assert "excluded: trainer" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "--step", "3"]) == 0
    assert "excluded" not in capsys.readouterr().out
    assert main(["explore", str(tmp_path), "-o", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text("utf-8")
    assert "PROVED EXCEPT 10 rows" in page and '"excluded":"trainer"' in page.replace(": ", ":")


def test_rows_that_are_counted_among_those_that_a_filter_keeps_are_said_to_be(
    table: lakeckpt.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(LocalStorage(tmp_path), reader_of(table, "filter"), skips=lambda n: n == 1, steps=9)
    for step in range(1, 10):
        assert main(["explain", str(tmp_path), "--step", str(step), "--json", "--rows"]) == 0
        (reader,) = json.loads(capsys.readouterr().out)["readers"]
        ((rank,), (row_groups,)) = reader["ranks"], [reader["ranks"][0]["row_groups"]]
        selected = {(one["file"], one["row_group"]) for one in row_groups if one["counted"] == "selected"}
        assert {(one[0], one[1]) for one in rank["order"] if one[3:] == ["selected"]} == selected
        if selected:
            break
    else:
        pytest.fail("no step read a row group of which the filter keeps a part")
    assert main(["explain", str(tmp_path), "--step", str(step)]) == 0
    assert "(counted among the rows that the filter keeps)" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "--step", str(step), "--rows"]) == 0
    assert " of the kept" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "said"), [("tokens", "16 tokens per batch"), ("rows", "10 rows per batch")])
def test_an_audit_says_what_batches_are_counted_in(
    table: lakeckpt.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, said: str
) -> None:
    run_of(LocalStorage(tmp_path), reader_of(table, kind), skips=lambda n: False, steps=3)
    assert main(["audit", str(tmp_path)]) == 0
    assert said in capsys.readouterr().out
