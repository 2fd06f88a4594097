"""Real jobs whose run goes away while a rank is killed begin no new run. `python -m tests.jobs.away` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.away import Case, run
from tests.lake.conftest import moto_endpoint

__all__ = ["moto_endpoint"]

CASES = [
    Case(place="local", how="renamed", launcher="torchrun", captures=True, ranks=2),
    Case(place="local", how="emptied", launcher="slurm", captures=False, ranks=1),
    Case(place="s3", how="renamed", launcher="torchrun", captures=False, ranks=1),
    Case(place="s3", how="emptied", launcher="nobody", captures=True, ranks=2),
]


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_job_whose_run_is_away_at_its_restart_goes_on_at_its_newest_cut(
    case: Case, tmp_path: Path, moto_endpoint: str
) -> None:
    found = run(case, tmp_path, moto_endpoint)
    assert not found.problem and found.statuses[-1] == 0, f"{found}\n{(tmp_path / 'log.txt').read_text()[-4000:]}"
    assert found.went_on
