"""Row groups that are skipped: recorded at the cut, replayed by whoever goes on, told by audit and explain."""

from __future__ import annotations

import random
from collections import Counter as Bag
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakeckpt import LakeDataset, LakeLoader, SkipList, open_table
from lakeckpt.checkpoint.audit import audit
from lakeckpt.checkpoint.explain import explain
from lakeckpt.checkpoint.ledger import read_history
from lakeckpt.checkpoint.log import put_entry, read_log
from lakeckpt.checkpoint.manifest import ReaderRecord, entry_from_bytes, entry_to_bytes
from lakeckpt.cli.main import main
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.skips import SkippedGroup
from lakeckpt.errors import StateMismatch, WireDamaged
from lakeckpt.lake.local import LocalStorage
from lakeckpt.wire.skips import skips_from_wire, skips_to_wire
from tests.checkpoint.rig import EventWaiter, HubExchange, MemoryStorage, Reader, good, manager, run_ranks
from tests.reading.cases import write_file
from tests.reading.damage import Damage

pytestmark = pytest.mark.filterwarnings("ignore::lakeckpt.SkipWarning")
ROWS = 120


@pytest.fixture
def damage(tmp_path: Path) -> Damage:
    """120 rows in two files of three row groups of twenty rows."""
    groups = [pa.table({"id": np.arange(start, start + 20)}) for start in range(0, ROWS, 20)]
    write_file(tmp_path / "lake" / "a.parquet", groups[:3], write_page_checksum=True)
    write_file(tmp_path / "lake" / "b.parquet", groups[3:], write_page_checksum=True)
    return Damage(open_table(tmp_path / "lake"))


class Job:
    """Attempts of one run. ``rows`` are the history's, by optimizer step and rank; ``short`` what did not come."""

    def __init__(self, damage: Damage, **options: Any) -> None:
        self.damage = damage
        self.storage = MemoryStorage()
        self.options = {"batch_size": 4, "shuffle": True, "shuffle_window": 3, "num_lanes": 4, **options}
        self.rows: dict[tuple[int, int], list[int]] = {}
        self.short: Bag[tuple[str, int]] = Bag()
        self.attempts: list[int] = []
        self.over = False

    def attempt(
        self,
        world_size: int,
        *,
        steps: int,
        saved: int,
        num_workers: int = 0,
        weather: Callable[[], None] | None = None,
    ) -> None:
        """Go on for ``steps`` steps (less where the epoch ends); the last save is after ``saved``, then it dies.

        ``weather`` is called by rank 0 after each step.
        """
        waiter = EventWaiter(self.storage)

        def body(rank: int, exchange: HubExchange) -> list[Any]:
            dataset = LakeDataset(
                self.damage.table, rank=rank, world_size=world_size, on_bad_row_group="skip", **self.options
            )
            loader = LakeLoader(dataset, num_workers=num_workers)
            saver = manager(self.storage, {"reader": loader}, exchange=exchange, waiter=waiter)
            done, got, ended = saver.restore(), [], False
            for batch in loader:
                saver.step(batch)
                got.append((saver.steps_done, rank, batch["id"].tolist(), batch.receipt))
                if weather is not None and rank == 0:
                    weather()
                if saver.steps_done == done + saved:
                    saver.save()
                if saver.steps_done == done + steps:
                    break
            else:
                self.over = ended = True
            if ended or len(got) < saved:  # what was read to the end of the epoch is of the history
                saver.save()
            return [one for one in got if one[0] <= saver._saved_step]

        self.attempts.append(world_size)
        for got in good(run_ranks(world_size, body, waiters=[waiter])):
            for step, rank, ids, receipt in got:
                self.rows[step, rank] = ids
                for skip in receipt.skips:
                    self.short[skip.group.file, skip.group.row_group] += skip.rows

    @property
    def every(self) -> Bag[int]:
        return Bag(row for rows in self.rows.values() for row in rows)


def test_skips_are_recorded_replayed_on_other_topologies_though_healed_and_audited(damage: Damage) -> None:
    job = Job(damage)
    damage.hurt("a.parquet", 1)
    damage.hurt("b.parquet", 2)
    job.attempt(2, steps=7, saved=5)
    assert job.short
    damage.heal("a.parquet")
    damage.heal("b.parquet")
    job.attempt(3, steps=3, saved=2)
    job.attempt(1, steps=10**6, saved=10**6)
    assert all(count == 1 for count in job.every.values())
    missing = set(range(ROWS)) - set(job.every)
    assert missing and missing <= {*range(20, 40), *range(100, 120)} and sum(job.short.values()) == len(missing)
    report = audit(job.storage)
    assert (report.verdict, report.lost, report.repeated, report.skipped) == ("proved", 0, 0, len(missing))
    assert f"{len(missing)} SKIPPED" in report.words
    told = {(one.file, one.row_group): one.rows for one in report.readers[0].skips}
    assert told == dict(job.short)
    assert all("cannot be decoded" in one.reason for one in report.readers[0].skips)
    (epoch,) = report.readers[0].epochs
    assert (epoch.once, epoch.skipped) == (ROWS - len(missing), len(missing))


def test_damage_that_stays_is_skipped_whole_and_explained_step_by_step(damage: Damage) -> None:
    job = Job(damage)
    damage.hurt("b.parquet", 0)
    job.attempt(2, steps=6, saved=4)
    job.attempt(3, steps=4, saved=3, num_workers=0)
    job.attempt(2, steps=10**6, saved=10**6)
    assert job.every == Bag([*range(60), *range(80, 120)])
    assert job.short == {("b.parquet", 0): 20}
    skipped = 0
    for step in range(1, max(job.rows)[0] + 1):
        for rank in explain(job.storage, step).readers[0].ranks:
            assert rank.table_rows.tolist() == job.rows[step, rank.rank]
            skipped += rank.skipped
    assert skipped == 20


def test_the_ledger_is_of_all_ranks_though_only_one_met_the_damage(damage: Damage) -> None:
    job = Job(damage, shuffle=False, num_lanes=2)
    damage.hurt("a.parquet", 0)  # in the lane of rank 0
    job.attempt(2, steps=2, saved=2)
    record = read_history(job.storage).tip.readers["reader"]
    assert [(one.file, one.row_group, one.positions.pairs()) for one in record.skips] == [("a.parquet", 0, [(0, 8)])]
    damage.heal("a.parquet")
    job.attempt(1, steps=10**6, saved=10**6)
    assert job.every == Bag(range(20, ROWS))


def test_what_was_skipped_after_the_cut_is_tried_again(damage: Damage) -> None:
    job = Job(damage, shuffle=False, num_lanes=1)
    damage.hurt("a.parquet", 2)
    job.attempt(1, steps=12, saved=10)  # rows 0 to 39 are in the checkpoint, and none was skipped
    damage.heal("a.parquet")
    job.attempt(1, steps=10**6, saved=10**6)
    assert job.every == Bag(range(ROWS))
    assert audit(job.storage).skipped == 0


def test_a_second_save_keeps_the_list_of_the_epoch_and_a_new_epoch_begins_an_empty_one(damage: Damage) -> None:
    job = Job(damage, shuffle=False, num_lanes=1)
    damage.hurt("a.parquet", 0)
    job.attempt(1, steps=2, saved=2)
    job.attempt(1, steps=2, saved=2)
    records = [one.readers["reader"] for one in read_history(job.storage).chain]
    assert [one.skips.to_plain()[0][4] for one in records] == [[[0, 8]], [[0, 16]]]
    job.attempt(1, steps=10**6, saved=10**6)
    damage.heal("a.parquet")
    job.attempt(1, steps=3, saved=3)
    job.attempt(1, steps=3, saved=3)
    assert not read_history(job.storage).tip.readers["reader"].skips
    report = audit(job.storage)
    assert [(one.epoch, one.skipped) for one in report.readers[0].epochs] == [(0, 20), (1, 0)]
    assert report.exactly_once


def test_rows_that_came_twice_are_told_though_their_row_group_was_skipped_once(damage: Damage, tmp_path: Path) -> None:
    damage.hurt("a.parquet", 0)
    loader = LakeLoader(LakeDataset(damage.table, batch_size=10, on_bad_row_group="skip"))
    with manager(tmp_path / "run", {"reader": loader}) as saver:
        saver.restore()
        for _ in range(2):
            for _, batch in zip(range(5), loader, strict=False):
                saver.step(batch)
            loader.rewind()
    report = audit(LocalStorage(tmp_path / "run"))
    assert report.verdict == "not proved" and report.repeated == 50


def test_the_command_line_tells_what_was_skipped(
    damage: Damage, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    damage.hurt("a.parquet", 1)
    loader = LakeLoader(LakeDataset(damage.table, batch_size=40, on_bad_row_group="skip"))
    with manager(tmp_path / "run", {"reader": loader}) as saver:
        saver.restore()
        for batch in loader:
            saver.step(batch)
    assert main(["audit", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "100 rows counted exactly once, 0 lost, 0 repeated, 20 SKIPPED because they could not be read" in said
    assert "20 rows of row group 1 of 'a.parquet' in epoch 0: " in said
    assert main(["explain", str(tmp_path / "run"), "--step", "1"]) == 0
    assert "skipped: could not be read" in capsys.readouterr().out


def group(**changes: Any) -> SkippedGroup:
    base = {"table": "t", "epoch": 0, "num_lanes": 1, "rotation": 0, "group": 0, "file": "a", "row_group": 0}
    return SkippedGroup(**{**base, "reason": "why", "positions": Intervals.of([(0, 4)]), **changes})


def test_a_reader_that_cannot_skip_refuses_a_checkpoint_of_one_that_did(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    with manager(storage, {"reader": Reader()}) as saver:
        saver.restore()
        next(iter(saver._objects["reader"]))
        saver.step()
    tip = read_log(storage).manifests[0]
    record = tip.readers["reader"]
    changed = ReaderRecord(state=record.state, index=record.index, skips=SkipList([group()]))
    put_entry(storage, _next(tip, changed))
    with pytest.raises(StateMismatch, match="cannot skip them again"):
        manager(storage, {"reader": Reader()}).restore()


def _next(tip: Any, record: ReaderRecord) -> Any:
    from dataclasses import replace

    return replace(tip, slot=tip.slot + 1, parent=tip.slot, readers={"reader": record}, write_id="x")


def test_a_crafted_list_is_refused_or_doubted_and_never_believed(damage: Damage) -> None:
    for bad in (
        None,
        3,
        [3],
        [[]],
        [["t", 0, 1, 0, 0, "a", 0, "why", "no bytes"]],
        [["t", -1, 1, 0, 0, "a", 0, "", b""]],
        [["t", 0, 1, 0, 0, "a", -1, "", b""]],
    ):
        with pytest.raises(WireDamaged):
            skips_from_wire(bad)
    assert skips_from_wire(skips_to_wire(SkipList([group()]))) == SkipList([group()])
    job = Job(damage)
    damage.hurt("a.parquet", 0)
    job.attempt(1, steps=10**6, saved=10**6)
    path, data = max((one for one in job.storage.objects.items() if one[0].startswith("log/")), key=lambda one: one[0])
    entry: Any = entry_from_bytes(data)
    record = entry.readers["reader"]
    for changes in (
        {"num_lanes": 2**40},
        {"group": 10**6},
        {"positions": Intervals.of([(0, 2**50)])},
        {"rotation": 7},
        {"table": "another"},
    ):
        lie = SkipList([group(**{"table": next(iter(record.skips)).table, **changes})])
        object.__setattr__(record, "skips", lie)
        job.storage.objects[path] = entry_to_bytes(entry)
        report = audit(job.storage)
        assert report.verdict == "not proved" and "skipped row group 0 of 'a' stood where" in report.every_doubt[0]


def any_history(damage: Damage, seed: int) -> None:
    """Attempts on random topologies, while row groups are hurt and healed between and inside of them."""
    dice = random.Random(seed)
    shuffle = dice.random() < 0.7
    job = Job(
        damage,
        batch_size=dice.choice((1, 3, 4, 7, 50)),
        shuffle=shuffle,
        shuffle_window=dice.choice((1, 2, 3, 6)),
        num_lanes=dice.choice((None, 1, 3, 4, 12)),
    )

    def weather() -> None:
        for file in damage.table.index.paths:
            if dice.random() < 0.5:
                damage.heal(file)
            for group in range(3):
                if dice.random() < 0.25:
                    damage.hurt(file, group)

    while not job.over:
        weather()
        saved = dice.randrange(1, 9)
        steps = 10**6 if len(job.attempts) > 7 else saved + dice.randrange(3)
        saved = 10**6 if steps == 10**6 else saved
        job.attempt(
            dice.choice((1, 1, 2, 3, 5)), steps=steps, saved=saved, weather=weather if dice.random() < 0.5 else None
        )
    missing = Bag(range(ROWS)) - job.every
    assert job.every | missing == Bag(range(ROWS)) and all(count == 1 for count in job.every.values())
    assert sum(job.short.values()) == missing.total()
    report = audit(job.storage)
    assert (report.verdict, report.skipped) == ("proved", missing.total()), report.words
    told: Bag[tuple[str, int]] = Bag()
    for one in report.readers[0].skips:
        told[one.file, one.row_group] += one.rows
    assert told == job.short == Bag(("ab"[row // 60] + ".parquet", row % 60 // 20) for row in missing)
    for step in range(1, max(job.rows)[0] + 1):
        for rank in explain(job.storage, step).readers[0].ranks:
            assert rank.table_rows.tolist() == job.rows[step, rank.rank]


@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_whatever_is_damaged_whenever_what_came_and_what_was_skipped_are_the_table(damage: Damage, seed: int) -> None:
    any_history(damage, seed)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(100, 160, 10))
def test_many_histories_of_damage(damage: Damage, first: int) -> None:
    for seed in range(first, first + 10):
        any_history(damage, seed)
