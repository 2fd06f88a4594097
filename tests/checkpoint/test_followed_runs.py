"""A run over a table that grows: killed, restored, audited and explained from its log and its indexes alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, open_table
from lakeckpt.checkpoint.ledger.audit import audit, read_run
from lakeckpt.checkpoint.ledger.audit_report import AuditReport
from lakeckpt.checkpoint.ledger.explain import explain_history
from lakeckpt.checkpoint.ledger.indexes import orders_of
from lakeckpt.cli.main import main
from lakeckpt.data.position import following
from lakeckpt.errors import StateMismatch, TableVersionGone
from lakeckpt.lake.formats import appends
from lakeckpt.lake.storage.open import open_storage
from tests.data.growing import AT_ONCE, NOT_THIRDS, Growing, follower


class History:
    """A job in one process: what its surviving history consumed, step by step."""

    def __init__(self, folder: Path, **dataset: Any) -> None:
        self.lake, self.run, self.dataset = Growing(folder / "lake"), folder / "run", dataset
        self.steps: dict[int, list[int]] = {}

    def attempt(self, steps: int, appends: dict[int, int], *, every: int = 1, **dataset: Any) -> bool:
        """Go on for ``steps`` steps and stop without a last save, as a kill does; return whether the stream ended."""
        loader = follower(self.lake.folder, **self.dataset, **dataset)
        manager = CheckpointManager(self.run, {"reader": loader}, persist_every=every)
        done = manager.restore()
        self.steps = {step: rows for step, rows in self.steps.items() if step <= done}
        try:
            for batch in loader:
                done += 1
                self.steps[done] = batch["id"].tolist()
                manager.step(batch)
                if (rows := appends.pop(done, None)) is not None:
                    self.lake.append(rows)
                steps -= 1
                if not steps:
                    manager.wait()
                    return False
            manager.save()
            return True
        finally:
            manager.close()

    @property
    def ids(self) -> list[int]:
        return [row for _, rows in sorted(self.steps.items()) for row in rows]

    def audited(self) -> AuditReport:
        return audit(open_storage(str(self.run)))


@pytest.mark.parametrize(
    "dataset", [{}, {"filters": NOT_THIRDS}, {"shuffle": False}], ids=["shuffled", "filtered", "in order"]
)
def test_a_killed_run_counts_every_row_once_and_its_audit_and_its_steps_say_so(
    tmp_path: Path, dataset: dict[str, Any]
) -> None:
    chance = random.Random(3)
    history = History(tmp_path, **dataset)
    history.lake.append(40)
    appends = {step: chance.randrange(1, 30) for step in range(2, 40, 3)}
    ends = 0
    while ends < 3:
        ends += history.attempt(
            chance.randrange(1, 14),
            appends,
            every=chance.randrange(1, 4),
            batch_size=chance.randrange(2, 6),
            num_lanes=chance.choice([None, 1, 2, 3]),
            workers=chance.choice([0, 0, 0, 1]),
        )
        if ends in (1, 2):
            history.lake.append(7)
    assert sorted(history.ids) == [row for row in range(history.lake.rows) if "filters" not in dataset or row % 3]
    report = history.audited()
    assert (report.verdict, report.every_doubt) == ("proved", ())
    (reader,) = report.readers
    assert sum(one.once for one in reader.epochs) == len(history.ids)
    assert {one.status for one in reader.epochs[:-1]} <= {"carried over", "complete"}
    assert sum(one.status == "carried over" for one in reader.epochs) > 2
    _check_explained(history, are_named="filters" not in dataset)


def _check_explained(history: History, *, are_named: bool) -> None:
    """Each step has as many rows as the loop got; by file, row group and row they must be the same, if they are named.

    A filter's rows are only counted.
    """
    storage = open_storage(str(history.run))
    run = read_run(storage)
    orders = orders_of(storage, run)
    starts = {one.name: int(pq.read_table(one)["id"][0].as_py()) for one in history.lake.files}
    for step, ids in history.steps.items():
        readers = explain_history(run, orders, step).readers
        groups = [group for reader in readers for rank in reader.ranks for group in rank.where]
        assert sum(one.rows for one in readers) == len(ids)
        if are_named:
            each = [(starts[one.file] + 7 * one.row_group, pair) for one in groups for pair in one.rows.pairs()]
            assert sorted(row for begin, pair in each for row in range(begin + pair[0], begin + pair[1])) == sorted(ids)


def grown(tmp_path: Path) -> History:
    """A run over three tranches; the second has rows left of the first."""
    history = History(tmp_path, shuffle=True)
    history.lake.append(30)
    assert history.attempt(1000, {3: 9, 8: 12})
    return history


def test_the_command_says_what_is_left_of_each_tranche(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = grown(tmp_path)
    assert main(["audit", str(history.run)]) == 0
    out = capsys.readouterr().out
    assert "PROVED" in out and "carried over" in out
    assert "a growing table is followed: epochs are tranches" in out


@pytest.mark.parametrize(
    ("fault", "words"),
    [("drop", "1 rows that were left before are not part of it"), ("more", "1 rows that had been consumed before")],
)
def test_a_tranche_with_other_rows_than_were_left_is_not_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    real = following.rows_left

    def wrong(*arguments: Any) -> dict[int, Any]:
        found = real(*arguments)
        for file, rows in found.items():
            other = np.setdiff1d(np.arange(30), rows)[:1]
            found[file] = rows[1:] if fault == "drop" else np.union1d(rows, other)
            break
        return found

    monkeypatch.setattr(following, "rows_left", wrong)
    history = grown(tmp_path)
    assert sorted(history.ids) != list(range(51))
    report = history.audited()
    assert report.verdict == "not proved"
    assert any(words in doubt for doubt in report.every_doubt), report.every_doubt


def test_a_file_that_comes_again_in_a_later_tranche_is_not_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path)
    history.lake.append(8)
    assert not history.attempt(1, {})
    monkeypatch.setattr(appends, "known_marks", lambda index: set())  # so that every file seems to be new
    monkeypatch.setattr(following, "rows_left", lambda *arguments: {})
    assert not history.attempt(3, {})
    assert sorted(history.ids) == sorted([*range(8), *range(8)])
    assert "8 rows that had been consumed before" in str(history.audited().every_doubt)


def test_a_tranche_whose_files_are_gone_is_refused_by_name(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.lake.append(40)
    assert not history.attempt(4, {})
    history.lake.files[0].unlink()
    history.lake.append(40)
    with pytest.raises(TableVersionGone, match="A stream that follows a table needs the files of its tranche"):
        history.attempt(4, {})


def test_another_exclude_in_the_middle_of_a_tranche_is_refused(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.lake.append(40)
    assert not history.attempt(4, {})
    table = open_table(history.lake.folder, exclude=[("0-0.parquet", 1)])
    loader = LakeLoader(LakeDataset(table, batch_size=4, shuffle=True, follow=AT_ONCE))
    with (
        CheckpointManager(history.run, {"reader": loader}) as manager,
        pytest.raises(StateMismatch, match=r"exclude= of the table .* is followed"),
    ):
        manager.restore()


def test_only_what_was_added_is_written_for_a_tranche(tmp_path: Path) -> None:
    history = History(tmp_path, shuffle=False)
    for _ in range(30):
        history.lake.append(4)
    assert history.attempt(1000, {20: 4})
    report = history.audited()
    assert [one.rows for one in report.readers[0].epochs] == [120, 4]
    assert report.verdict == "proved"


def test_the_place_in_a_tranche_is_not_carried_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = History(tmp_path)
    history.lake.append(40)
    assert not history.attempt(4, {})
    history.lake.append(2)
    assert main(["plan", str(history.lake.folder), "--remap", str(history.run), "--key", "id", "--out", "x"]) != 0
    assert "follows a growing table" in capsys.readouterr().err
