"""The simulation of recovery uses what restarts decide: fewer faults lead back to storage, the more nodes keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("simpy")
from benchmarks.recovery_simulation import SCHEMES, Inputs, rows_of, simulated

FAULTS = 25


def test_each_tier_that_is_added_saves_time() -> None:
    found = {scheme: simulated(scheme, 256, Inputs(), FAULTS) for scheme in SCHEMES}
    assert [one["faults"] for one in found.values()] == [FAULTS] * len(SCHEMES)
    assert found["checkpoints"]["to_storage"] == FAULTS
    assert 0 < found["memory"]["to_storage"] < FAULTS
    assert found["natural"]["to_storage"] == found["copy"]["to_storage"] == found["3+1"]["to_storage"] == 0
    assert found["checkpoints"]["effective"] < found["memory"]["effective"] < found["copy"]["effective"] < 1
    assert found["natural"]["steps_again"] < 1 < found["copy"]["steps_again"] < found["memory"]["steps_again"]
    assert len(rows_of(list(found.values()))) == len(SCHEMES)


def test_a_micro_batch_that_kills_the_job_leaves_the_deal_at_the_third_death() -> None:
    found = simulated("natural", 256, replace(Inputs(), poison=1.0), 3)
    assert found["faults"] == 3 + 3 + 1, "the simulation ends at the last of three micro-batches"
    assert found["seconds"].get("operator", 0) == 0


def test_a_rack_that_is_lost_costs_no_share_of_groups_that_lie_across_racks() -> None:
    racks = replace(Inputs(), rack=1.0, poison=0.0)
    assert simulated("copy", 256, racks, 5)["to_storage"] == simulated("3+1", 256, racks, 5)["to_storage"] == 0
    assert simulated("memory", 256, racks, 5)["to_storage"] == 5
