"""Row groups that are excluded: from the start, from the midst of an epoch on, and read again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakeckpt import LakeDataset, LakeLoader, Table, open_table
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.audit_report import AuditReport
from lakeckpt.checkpoint.ledger.explain import explain
from lakeckpt.cli.main import main
from lakeckpt.errors import ConfigError, DataFileDamaged, StateMismatch
from lakeckpt.lake.table.index import TableIndex
from tests.checkpoint.rig import EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.data.reading import dataset_of
from tests.reading.cases import write_file
from tests.reading.damage import Damage

ROWS = 120
Pairs = list[tuple[str, int]]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """120 rows in two files of three row groups of twenty rows."""
    groups = [pa.table({"id": np.arange(start, start + 20)}) for start in range(0, ROWS, 20)]
    write_file(tmp_path / "lake" / "a.parquet", groups[:3], write_page_checksum=True)
    write_file(tmp_path / "lake" / "b.parquet", groups[3:], write_page_checksum=True)
    return tmp_path / "lake"


def rows_in(pairs: Pairs) -> set[int]:
    starts = [60 * "ab".index(file[0]) + 20 * group for file, group in pairs]
    return {row for start in starts for row in range(start, start + 20)}


class Job:
    """Attempts of one run; ``rows`` are those of the history, in order."""

    def __init__(self, lake: Path, **options: Any) -> None:
        self.lake, self.storage = lake, MemoryStorage()
        self.options = {"batch_size": 4, "shuffle": True, "shuffle_window": 3, "num_lanes": 4, **options}
        self.rows: list[int] = []
        self.steps = 0

    def attempt(self, exclude: Pairs = [], *, ranks: int = 1, steps: int | None = None, lost: int = 0) -> list[str]:  # noqa: B006
        """Take ``steps`` steps (None: to the end of the epoch), of which the last ``lost`` come after the last save.

        Returns the messages of damage that ended it.
        """
        waiter = EventWaiter(self.storage)

        def body(rank: int, exchange: HubExchange) -> tuple[list[int], int, str]:
            table = open_table(self.lake, exclude=exclude)
            loader = LakeLoader(dataset_of(table, rank=rank, world_size=ranks, **self.options))
            saver = manager(self.storage, {"reader": loader}, exchange=exchange, waiter=waiter)
            done, got, told = saver.restore(), [], ""
            try:
                for batch in loader:
                    if steps is not None and saver.steps_done == done + steps:
                        break
                    saver.step(batch)
                    if steps is None or saver.steps_done <= done + steps - lost:
                        got += batch["id"].tolist()
                        saver.save()
                else:
                    saver.save()
            except DataFileDamaged as error:
                told = str(error)
            return got, saver.steps_done - lost, told

        results = good(run_ranks(ranks, body, waiters=[waiter]))
        self.rows += [row for got, _, _ in results for row in got]
        self.steps = results[0][1]
        return [told for _, _, told in results if told]

    def audited(self) -> AuditReport:
        return audit(self.storage)


def test_excluded_row_groups_are_never_read_and_another_list_is_another_table(lake: Path) -> None:
    damage = Damage(open_table(lake))
    damage.hurt("a.parquet", 1)
    table = open_table(lake, exclude=[("a.parquet", 1), ("b.parquet", 0), ("a.parquet", 1)])
    for num_workers in (0, 1):
        found = [
            row
            for batch in LakeLoader(LakeDataset(table, batch_size=7), num_workers=num_workers)
            for row in batch["id"].tolist()
        ]
        assert found == [*range(20), *range(40, 60), *range(80, 120)]
    assert table.index != damage.table.index and table.index.version_digest == damage.table.index.digest
    assert TableIndex.loads(table.index.dumps()) == table.index == open_table(lake, exclude=table.exclude[::-1]).index
    assert table.index.rows_excluded() == [("a.parquet", 1, 20), ("b.parquet", 0, 20)]


def test_a_list_that_cannot_be_is_refused_and_an_unknown_file_is_warned_of(lake: Path) -> None:
    for wrong in (["a.parquet"], [("a.parquet", "1")], [("a.parquet", True)], [("a.parquet", 1, 2)]):
        with pytest.raises(ConfigError, match="exclude= is a list of"):
            open_table(lake, exclude=wrong)  # type: ignore[arg-type]
    for number in (3, -1):
        with pytest.raises(ConfigError, match=f"row group {number} of 'a.parquet', which has 3 row groups"):
            open_table(lake, exclude=[("a.parquet", number)])
    with pytest.warns(UserWarning, match=r"exclude= names 'c\.parquet'"):
        table = open_table(lake, exclude=[("c.parquet", 0)])
    assert table.index == open_table(lake).index


def test_a_job_goes_on_with_what_the_error_says(lake: Path) -> None:
    job = Job(lake)
    Damage(open_table(lake)).hurt("b.parquet", 1)
    (told,) = job.attempt()
    assert job.rows and "open_table(…, exclude=[('b.parquet', 1)])" in told
    excluded = [("b.parquet", 1)]
    assert job.attempt(excluded) == []
    assert sorted(job.rows) == sorted(set(range(ROWS)) - rows_in(excluded))
    before = list(job.rows)
    assert job.attempt(excluded, steps=4) == []
    assert len(job.rows) == len(before) + 16
    report = job.audited()
    assert report.verdict == "except", report
    counted = [(one.epoch, one.status, one.once) for one in report.readers[0].epochs]
    assert counted[1:] == [(0, "complete", 100 - counted[0][2]), (1, "in progress", 16)]
    assert counted[0][1] == "carried over"
    listed = [(one.epoch, one.file, one.row_group, one.rows) for one in report.readers[0].excluded]
    assert listed == [(0, "b.parquet", 1, 20), (1, "b.parquet", 1, 20)]
    assert report.words.endswith("0 lost, 0 repeated, 40 excluded (damaged)")
    assert "the rest of epoch 0 went on with other excluded row groups" in report.readers[0].notes


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_row_group_that_was_half_read_is_excluded_for_the_rest_and_comes_back_whole(
    lake: Path, shuffle: bool
) -> None:
    job, excluded = Job(lake, shuffle=shuffle, num_lanes=2), [("a.parquet", 0), ("b.parquet", 0)]
    job.attempt(ranks=2, steps=3)
    before = list(job.rows)
    job.attempt(excluded, ranks=1, steps=5, lost=2)
    job.attempt(excluded, ranks=2, steps=2)
    job.attempt(excluded)
    assert sorted(job.rows) == sorted({*before, *(set(range(ROWS)) - rows_in(excluded))})
    report = job.audited()
    assert report.verdict == "except", report
    assert report.excluded == len(rows_in(excluded) - set(before))
    job.rows = []
    job.attempt()
    assert sorted(job.rows) == list(range(ROWS)) and job.audited().verdict == "except"


def test_row_groups_that_are_no_longer_excluded_are_read_in_the_same_epoch(lake: Path) -> None:
    job = Job(lake)
    job.attempt([("a.parquet", 2)], steps=6)
    job.attempt()
    assert sorted(job.rows) == list(range(ROWS))
    report = job.audited()
    assert report.verdict == "proved" and report.excluded == 0, report


def test_at_the_end_of_an_epoch_nothing_is_left_and_the_next_one_goes_without(lake: Path) -> None:
    job, excluded = Job(lake), [("a.parquet", 2)]
    job.attempt()
    assert sorted(job.rows) == list(range(ROWS))
    job.attempt(excluded)
    assert sorted(job.rows[ROWS:]) == sorted(set(range(ROWS)) - rows_in(excluded))
    report = job.audited()
    assert report.verdict == "except", report
    assert [(one.epoch, one.once, one.lost) for one in report.readers[0].epochs if one.once] == [
        (0, 120, 0),
        (1, 100, 0),
    ]


def test_steps_of_the_rest_are_explained_by_the_rows_that_they_read(lake: Path) -> None:
    job, excluded = Job(lake), [("b.parquet", 2)]
    job.attempt(steps=7)
    job.attempt(excluded)
    found = [
        row
        for step in range(1, job.steps + 1)
        for row in explain(job.storage, step).readers[0].ranks[0].table_rows.tolist()
    ]
    assert len(found) == len(job.rows) and sorted({*job.rows} & rows_in(excluded)) == sorted(
        set(job.rows[:28]) & rows_in(excluded)
    )


def test_the_audit_notices_a_rest_that_lacks_other_rows_than_were_consumed(lake: Path) -> None:
    from dataclasses import replace

    from lakeckpt.checkpoint.consumed.rest_of_epoch import rest_of_epoch
    from lakeckpt.lake.table.deletes import Deletes

    job, excluded = Job(lake, shuffle=False, num_lanes=1), [("b.parquet", 2)]
    job.attempt(steps=5)  # rows 0 to 19

    def another(state: Any, there: TableIndex, taken: Deletes) -> Any:
        return rest_of_epoch(state, there, Deletes.of({0: taken.rows(0) + 1}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lakeckpt.checkpoint.consumed.rest_of_epoch.rest_of_epoch", another)
        job.attempt(excluded, steps=2)
    assert replace  # the run as it is tells
    report = job.audited()
    assert report.verdict == "not proved" and "or others, were taken out" in report.every_doubt[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [0, None], ids=["at its start", "at its end"])
def test_with_a_filter_row_groups_are_excluded_between_epochs(lake: Path, steps: int | None, ranks: int) -> None:
    job, excluded = Job(lake, filters=[("id", ">", 3)]), [("b.parquet", 2)]
    job.attempt(ranks=ranks)
    if steps is not None:  # the state of the start of an epoch, of which the loop has seen nothing
        job = Job(lake, filters=[("id", ">", 3)])
        run_start(job, ranks)
    job.rows = []
    job.attempt(excluded, ranks=ranks)
    assert sorted(job.rows) == list(range(4, 100))
    report = job.audited()
    assert report.verdict == "except", report
    assert not [one for one in report.readers[0].epochs if one.status == "skipped"]


def run_start(job: Job, ranks: int) -> None:
    """Save the run of ``job`` before its first step."""
    waiter = EventWaiter(job.storage)

    def body(rank: int, exchange: HubExchange) -> None:
        loader = LakeLoader(dataset_of(open_table(job.lake), rank=rank, world_size=ranks, **job.options))
        saver = manager(job.storage, {"reader": loader}, exchange=exchange, waiter=waiter)
        saver.restore()
        saver.save()

    good(run_ranks(ranks, body, waiters=[waiter]))


def test_a_state_without_a_run_names_the_table_that_it_is_of(lake: Path) -> None:
    def loader(table: Table) -> LakeLoader:
        return LakeLoader(LakeDataset(table, batch_size=4))

    first = loader(open_table(lake))
    next(iter(first))
    with pytest.raises(StateMismatch, match="table"):
        loader(open_table(lake, exclude=[("a.parquet", 2)])).load_state_dict(first.state_dict())


def test_the_command_line_lists_what_was_excluded(
    lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    loader = LakeLoader(LakeDataset(open_table(lake, exclude=[("a.parquet", 1)]), batch_size=40))
    with manager(tmp_path / "run", {"reader": loader}) as saver:
        saver.restore()
        for batch in loader:
            saver.step(batch)
    assert main(["audit", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "100 rows counted exactly once, 0 lost, 0 repeated, 20 excluded (damaged)" in said
    assert "excluded: damaged: 20 rows of row group 1 of 'a.parquet' in epoch 0" in said


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_excluded_whenever_every_other_row_counts_once(lake: Path, seed: int) -> None:
    dice = random.Random(seed)
    job = Job(lake, batch_size=dice.choice((3, 4, 7)), shuffle=dice.random() < 0.7, num_lanes=12)
    excluded: Pairs = []
    for _ in range(4):
        job.attempt(excluded, ranks=dice.choice((1, 2, 3)), steps=dice.randrange(1, 4), lost=dice.randrange(2))
        excluded = [(file, group) for file in ("a.parquet", "b.parquet") for group in range(3) if dice.random() < 0.3]
    before = list(job.rows)
    job.attempt(excluded)
    assert sorted(job.rows) == sorted({*before, *(set(range(ROWS)) - rows_in(excluded))})
    report = job.audited()
    assert report.verdict == ("except" if report.excluded else "proved"), report
