"""Real jobs on a Delta table that others append to, compact and vacuum, killed with SIGKILL while they do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from harness import Attempt, Job

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage

deltalake = pytest.importorskip("deltalake")

ROWS, MORE = 1_600, 90


def append(folder: Path, first: int, stop: int) -> None:
    columns = {"id": np.arange(first, stop), "x": np.linspace(0, 1, stop - first, dtype="float32")}
    deltalake.write_deltalake(folder, pa.table(columns), mode="append")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    for first in range(0, ROWS, 400):
        append(tmp_path / "lake", first, first + 400)
    return tmp_path / "lake"


def compact(table: Path) -> None:
    deltalake.DeltaTable(table).optimize.compact()


def vacuum(table: Path) -> None:
    deltalake.DeltaTable(table).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


@pytest.mark.soak
def test_a_table_compacted_and_vacuumed_under_a_killed_job_is_refused_before_any_row(
    table: Path, tmp_path: Path
) -> None:
    job = Job(tmp_path / "job", table, ["--shuffle", "--every", "2"])
    job.attempt(Attempt(ranks=2, kill_after=(7, 0.05)))
    compact(table)
    vacuum(table)
    with pytest.raises(AssertionError, match=r"TableVersionGone: .* files are gone"):
        job.attempt(Attempt(ranks=2, workers=1))
    assert all(not path.read_text() for path in job.notes.glob("001-*"))  # nothing restored, nothing read


@pytest.mark.soak
def test_every_row_counts_once_though_the_table_is_appended_to_and_compacted(table: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", table, ["--shuffle", "--every", "2", "--on-new-version", "next_epoch"])
    job.attempt(Attempt(ranks=2, kill_after=(9, 0.05)))
    compact(table)  # the old files can still be read: the job goes on with them
    job.attempt(Attempt(ranks=3, workers=1, kill_after=(6, 0.05)))
    job.attempt(Attempt(ranks=1, workers=2, kill_after=(5, 0.0)))
    append(table, ROWS, ROWS + MORE)
    job.attempt(Attempt(ranks=2))
    counts = job.surviving_rows()
    assert set(counts.values()) == {1}
    assert set(counts) == {(0, row) for row in range(ROWS)} | {(1, row) for row in range(ROWS + MORE)}
    report = audit(open_storage(str(job.run)))
    assert report.verdict == "proved", report


@pytest.mark.soak
def test_a_followed_table_counts_every_row_once_though_it_is_compacted_and_the_job_is_killed(
    table: Path, tmp_path: Path
) -> None:
    job = Job(tmp_path / "job", table, ["--shuffle", "--every", "2", "--follow"])
    job.attempt(Attempt(ranks=2, kill_after=(9, 0.05)))
    append(table, ROWS, ROWS + MORE)
    compact(table)
    append(table, ROWS + MORE, ROWS + 2 * MORE)
    job.attempt(Attempt(ranks=3, workers=1, kill_after=(30, 0.05)))
    append(table, ROWS + 2 * MORE, ROWS + 3 * MORE)
    job.attempt(Attempt(ranks=1, workers=2, kill_after=(5, 0.0)))
    job.attempt(Attempt(ranks=2))
    append(table, ROWS + 3 * MORE, ROWS + 4 * MORE)
    job.attempt(Attempt(ranks=2))  # it goes on after the end of the stream
    counts = Counter(row for (_, row), count in job.surviving_rows().items() for _ in range(count))
    assert set(counts.values()) == {1}
    assert set(counts) == set(range(ROWS + 4 * MORE))
    report = audit(open_storage(str(job.run)))
    assert report.verdict == "proved", report
