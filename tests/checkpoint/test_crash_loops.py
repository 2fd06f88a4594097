"""A job that dies again and again at one place goes back, or stops and names the rows; other deaths change nothing.

Attempts follow each other in one process, as torchrun starts them: each one dies by an exception in its loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lakeckpt
from lakeckpt.checkpoint.faults.records import faults_of
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.restore.report import RestoreReport
from lakeckpt.errors import CrashLoop, SaveFailed, StorageError
from lakeckpt.lake.storage.open import open_storage
from tests.frameworks.harness import write_table

Dies = Callable[[int, list[int]], object]
ROWS, BATCH = 120, 4
POISON = 77


class Job:
    """A job in ``folder`` that `attempt` starts again and again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        self.options: dict[str, Any] = {}
        self.used: dict[int, list[int]] = {}
        """step → the rows that the newest attempt of it used."""
        write_table(folder / "table", rows=ROWS)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", folder.name)
        self.restarts = 0
        self.begun: list[int] = []
        self.report: RestoreReport | None = None

    def attempt(self, dies: Dies = lambda step, ids: None, *, by_hand: bool = False) -> str:
        """Train until ``dies(step, ids)`` raises, with the number of the step to come. Returns the error's name."""
        self.restarts = 0 if by_hand or not self.begun else self.restarts + 1
        self._patch.setenv("TORCHELASTIC_RESTART_COUNT", str(self.restarts))
        model = torch.nn.Linear(1, 2)
        dataset = lakeckpt.LakeDataset(self.folder / "table", batch_size=BATCH, shuffle=True, seed=3)
        loader = lakeckpt.LakeLoader(dataset)
        try:
            with lakeckpt.CheckpointManager(
                self.folder / "run",
                {"model": model, "reader": loader},
                persist_every=3,
                keep=9,
                arenas=self.folder / "arenas",
                **self.options,
            ) as manager:
                self.begun.append(manager.restore())
                self.report = manager.restore_report
                for batch in loader:
                    dies(manager.steps_done + 1, batch["id"].tolist())
                    manager.step(batch)
                    self.used[manager.steps_done] = batch["id"].tolist()
        except Exception as error:
            return type(error).__name__
        return ""

    def log(self) -> list[str]:
        return sorted(os.listdir(self.folder / "run" / "log"))

    def faults(self) -> list[dict[str, Any]]:
        storage = open_storage(self.folder / "run")
        return [one.to_plain() for one in faults_of(storage, read_history(storage))[0]]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def poison(step: int, ids: list[int]) -> None:
    if POISON in ids:
        raise ValueError(f"the row {POISON} is bad")


def at(step: int, error: type[Exception]) -> Dies:
    def dies(now: int, ids: list[int]) -> None:
        if now == step:
            raise error(f"at step {step}")

    return dies


def test_a_row_that_kills_three_times_is_named_and_the_job_stops(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    assert [job.attempt(poison) for _ in range(3)] == ["ValueError"] * 3
    assert job.begun[0] == 0 and job.begun[1] == job.begun[2] > 0
    before = job.log()
    with caplog.at_level(logging.ERROR):
        assert job.attempt(poison) == "CrashLoop"
    assert job.log() == before, "a job that stops writes nothing"
    text = caplog.text
    table = lakeckpt.open_table(str(job.folder / "table"))
    named = [path for path in table.index.paths if f"{path}, row group" in text]
    assert named and "by exception ValueError" in text and f"the row {POISON} is bad" in text
    assert POISON in rows_named(job.folder / "table", text)
    assert job.attempt(poison) == "CrashLoop", "a launcher that starts it again is told the same"
    assert len(job.begun) == 3


def rows_named(table: Path, text: str) -> list[int]:
    """The ids of the rows that a message names."""
    import pyarrow.parquet as pq

    found = []
    for line in text.splitlines():
        if ".parquet, row group " in line:
            name, _, rest = line.strip().partition(", row group ")
            group, _, rows = rest.partition(": rows ")
            ids = pq.ParquetFile(table / name).read_row_group(int(group)).column("id").to_pylist()
            for part in rows.split(", "):
                low, _, high = part.partition("-")
                found += ids[int(low) : int(high or low) + 1]
    assert len(found) == BATCH
    return found


def test_the_error_ends_the_process_with_status_93() -> None:
    assert isinstance(CrashLoop("x"), SystemExit) and (CrashLoop("x").code, str(CrashLoop("x"))) == (93, "x")


def test_a_row_that_fails_two_times_of_three_stops_nothing(job: Job) -> None:
    assert [job.attempt(poison), job.attempt(poison), job.attempt()] == ["ValueError", "ValueError", ""]
    assert job.report is not None and job.report.passed_over == ()


def test_deaths_that_are_not_alike_lead_to_older_checkpoints_and_then_to_the_end(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    ends = [job.attempt(at(11, error)) for error in (KeyError, ValueError, KeyError, ValueError, KeyError)]
    assert ends == ["KeyError", "ValueError", "KeyError", "ValueError", "KeyError"]
    assert job.begun == [0, 9, 9, 6, 3]
    assert job.report is not None and "before step 6" in job.report.passed_over[0]
    assert job.attempt() == "CrashLoop" and "no restart helps" in caplog.text
    assert [one["deaths"] for one in job.faults()] == [1, 2, 3, 4, 0]
    assert job.attempt(by_hand=True) == "" and job.begun[-1] == 9, "newer checkpoints were not abandoned"


def test_the_older_branch_goes_on_when_it_has_come_past_the_newest_checkpoint(job: Job) -> None:
    for error in (KeyError, ValueError, KeyError):
        job.attempt(at(11, error))
    assert job.attempt(at(14, KeyError)) == "KeyError" and job.begun[-1] == 6
    assert job.attempt() == "" and job.begun[-1] == 12


def test_starts_by_hand_roll_back_nothing(job: Job) -> None:
    ends = [
        job.attempt(at(11, error), by_hand=True) for error in (KeyError, ValueError, KeyError, ValueError, KeyError)
    ]
    assert len(ends) == 5 and job.begun == [0, 9, 9, 9, 9]
    assert job.attempt(by_hand=True) == ""


@pytest.mark.parametrize("error", [SaveFailed, StorageError])
def test_what_storage_refuses_rolls_back_nothing(job: Job, error: type[Exception]) -> None:
    for _ in range(6):
        job.attempt(at(11, error))
    assert job.begun == [0, 9, 9, 9, 9, 9]


def test_a_fault_is_recorded_with_its_phases_and_what_was_done_again(job: Job) -> None:
    job.attempt(poison)
    assert job.attempt() == ""
    (fault,) = job.faults()
    assert (fault["cause"], fault["what"], fault["rank"], fault["doing"]) == ("exception", "ValueError", 0, "compute")
    assert fault["step"] - fault["back_to"] == fault["steps_again"] and fault["back_to"] == job.begun[1]
    assert (fault["tier"], fault["rows_again"]) == ("storage", fault["steps_again"] * BATCH) and fault["bytes"] == 16
    assert set(fault["phases"]) == {"processes", "imports", "group", "decided", "restored", "first step"}
    assert all(seconds >= 0 for seconds in fault["phases"].values())
    assert not [one for one in os.listdir(job.folder / "arenas") if one.endswith((".beat", ".fault"))]


def test_a_micro_batch_that_kills_three_times_leaves_the_deal_and_all_other_rows_count_once(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.options = {"on_crash_loop": "exclude"}
    assert [job.attempt(poison) for _ in range(4)] == ["ValueError"] * 3 + [""]
    assert job.report is not None and len(job.report.excluded) == 1 and "crash" in job.report.excluded[0]
    gone = rows_named(job.folder / "table", caplog.text)
    assert POISON in gone
    used = [one for _, ids in sorted(job.used.items()) for one in ids]
    assert sorted(used) == sorted(set(range(ROWS)) - set(gone)), "every other row once"
    assert all(job.used.values()), "no batch is empty"
    assert audit(open_storage(job.folder / "run")).headline == f"PROVED EXCEPT {BATCH} rows"


def test_a_verdict_that_was_wrong_is_withdrawn_in_words_and_the_rows_are_dealt_again(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.options = {"on_crash_loop": "exclude"}
    assert [job.attempt(at(11, ValueError)) for _ in range(4)] == ["ValueError"] * 4
    assert job.attempt(at(11, ValueError)) == "CrashLoop" and "the verdict is withdrawn" in caplog.text
    assert job.attempt(by_hand=True) == ""
    assert job.report is not None and "withdrawn: attempt" in job.report.excluded[0]
    assert sorted(one for ids in job.used.values() for one in ids) == list(range(ROWS))


def test_at_most_so_many_micro_batches_are_excluded(job: Job) -> None:
    job.options = {"on_crash_loop": "exclude", "max_excluded": 1}
    others = {POISON, 5, 99}

    def dies(step: int, ids: list[int]) -> None:
        if others.intersection(ids):
            raise ValueError("one of these is bad")

    ends = [job.attempt(dies) for _ in range(7)]
    assert ends == ["ValueError"] * 6 + ["CrashLoop"]
