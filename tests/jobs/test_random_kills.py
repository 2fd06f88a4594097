"""A random rank is killed at a random moment, again and again: at most one step again each, no row lost, same weights.

`python -m benchmarks.kills --kills 200` is the long form, and says what each kill cost.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.random_kills import BATCH, STEPS_A_KILL, killed


@pytest.mark.soak
@pytest.mark.parametrize("kills", [4, 20])
def test_killed_at_random_moments_a_job_ends_with_the_rows_and_weights_of_one_that_was_not(
    tmp_path: Path, kills: int
) -> None:
    rows = 2 * BATCH * STEPS_A_KILL * kills
    job = killed(tmp_path / "killed", kills=kills, seed=kills, rows=rows)
    assert not job.problem and len(job.kills) == kills
    assert [one for one in job.kills if one.steps_again > 1] == []
    assert {one["cause"] for one in job.faults["faults"]} == {"signal"}
    assert job.weights == killed(tmp_path / "other", kills=0, rows=rows).weights
