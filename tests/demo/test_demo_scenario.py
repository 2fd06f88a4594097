"""The plan of faults: enough of them, at places that hurt, on topologies that differ."""

from __future__ import annotations

import pytest

from lakeckpt.cli.demo.scenario import (
    MOST_KILLS,
    DemoConfig,
    Fault,
    Phase,
    scenario_for,
    steps_per_epoch,
    usual_save_every,
)
from lakeckpt.errors import ConfigError

SIZES = [
    (steps, save_every)
    for save_every in (1, 2, 3, 4, 7, 32)
    for steps in (max(8, 4 * save_every), 5 * save_every + 5, 482)
] + [(steps, usual_save_every(steps)) for steps in (8, 9, 13, 31, 88, 127, 128, 129)]


@pytest.mark.parametrize(("steps", "save_every"), SIZES)
def test_faults_come_in_order_inside_of_the_two_epochs(steps: int, save_every: int) -> None:
    faults = [phase.fault.step for phase in scenario_for(steps, save_every) if phase.fault is not None]
    assert len(faults) == MOST_KILLS >= 3
    assert faults == sorted(set(faults))
    assert faults[0] >= 1 and faults[-1] < 2 * steps


@pytest.mark.parametrize(("steps", "save_every"), SIZES)
def test_faults_in_a_save_fall_on_a_save_and_the_others_between_two(steps: int, save_every: int) -> None:
    for phase in scenario_for(steps, save_every):
        if phase.fault is not None and save_every > 1:
            saving = phase.fault.point in ("before-part", "before-commit")
            assert (phase.fault.step % save_every == 0) == saving, phase.fault


def test_the_topology_holds_for_three_kills_and_then_changes_in_ranks_and_workers() -> None:
    phases = scenario_for(482, 40)
    sizes = [(phase.world_size, phase.workers) for phase in phases]
    assert len(set(sizes[:4])) == 1
    assert {8 % world_size == 0 for world_size, _ in sizes[4:]} == {True, False}
    assert len({workers for _, workers in sizes}) == 3


def test_every_number_of_kills_ends_with_a_phase_that_is_left_alone() -> None:
    for kills in range(1, MOST_KILLS + 1):
        phases = scenario_for(482, 40, kills=kills)
        assert [phase.fault is None for phase in phases] == [False] * kills + [True]
        assert phases[-1].world_size != phases[0].world_size
    with pytest.raises(ConfigError, match="kills must be"):
        scenario_for(482, 40, kills=0)


def test_saves_that_are_too_rare_for_the_faults_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least every 4 steps"):
        scenario_for(16, 5)


def test_too_few_rows_for_the_faults_are_refused() -> None:
    with pytest.raises(ConfigError, match="need 8"):
        scenario_for(7, 1)


def test_a_config_comes_back_from_json_as_it_was() -> None:
    config = DemoConfig(
        lake="/l",
        checkpoints="/c",
        records="/r",
        epochs=2,
        batch_size=8,
        save_every=4,
        num_lanes=8,
        seed=7,
        learning_rate=0.006,
        steps_per_epoch=16,
        phases=scenario_for(16, 4),
    )
    assert DemoConfig.from_json(config.to_json()) == config


def test_a_constant_global_batch_where_the_ranks_allow_it() -> None:
    assert [Phase(world_size=w, workers=0).accumulate * w for w in (1, 2, 4)] == [4, 4, 4]
    assert Phase(world_size=3, workers=0).accumulate == 1


def test_impossible_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="names rank 2"):
        Phase(world_size=2, workers=0, fault=Fault(rank=2, step=1, point="before-cut"))
    with pytest.raises(ValueError, match="point must be one of"):
        Fault(rank=0, step=1, point="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step >= 1"):
        Fault(rank=0, step=0, point="before-cut")


@pytest.mark.parametrize(("rows", "expected"), [(512, 16), (513, 18), (8, 2), (15394, 482)])
def test_steps_of_an_epoch_count_short_lanes_too(rows: int, expected: int) -> None:
    assert steps_per_epoch(rows, 8, 8) == expected


def test_saves_usually_come_every_32_steps_and_more_often_where_there_is_little_text() -> None:
    assert [usual_save_every(steps) for steps in (482, 128, 127, 88, 8)] == [32, 32, 31, 22, 2]
