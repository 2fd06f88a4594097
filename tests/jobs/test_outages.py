"""A real job trains on while its store is away, and loses nothing. `python -m tests.jobs.outages` runs all cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.outages import Case, run
from tests.lake.conftest import moto_endpoint

__all__ = ["moto_endpoint"]

CASES = [
    Case(place="s3", fault="refuse", captures=True, ranks=2),
    Case(place="s3", fault="hang", captures=False, ranks=1, total_s=1.0),
    Case(place="local", fault="renamed", captures=True, ranks=1),
    Case(place="local", fault="emptied", captures=False, ranks=2),
]


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_job_trains_on_while_its_store_is_away_and_every_row_counts_once(
    case: Case, tmp_path: Path, moto_endpoint: str
) -> None:
    found = run(case, tmp_path, moto_endpoint)
    assert not found.problem, f"{found}\n{(tmp_path / 'log.txt').read_text()[-4000:]}"
    assert found.meanwhile >= 12
