"""The plan of faults: enough of them, at places that hurt, on topologies that differ."""

from __future__ import annotations

import pytest

from lakeckpt.demo.scenario import DemoConfig, Phase, scenario_for

SIZES = [
    (steps, save_every)
    for save_every in (1, 2, 3, 4, 7, 32)
    for steps in (max(16, 8 * save_every), 10 * save_every + 5, 480)
]


@pytest.mark.parametrize(("steps", "save_every"), SIZES)
def test_faults_come_in_order_inside_of_the_training(steps: int, save_every: int) -> None:
    faults = [phase.fault.step for phase in scenario_for(steps, save_every, kills=5) if phase.fault is not None]
    assert len(faults) == 5
    assert faults == sorted(set(faults))
    assert faults[0] >= 1 and faults[-1] < steps


@pytest.mark.parametrize(("steps", "save_every"), SIZES)
def test_faults_in_a_save_fall_on_a_save_and_the_others_between_two(steps: int, save_every: int) -> None:
    for phase in scenario_for(steps, save_every, kills=5):
        if phase.fault is not None and save_every > 1:
            saving = phase.fault.point == "after-order"
            assert (phase.fault.step % save_every == 0) == saving, phase.fault


def test_the_topology_holds_for_three_kills_and_then_changes_in_ranks_and_workers() -> None:
    phases = scenario_for(480, 40, kills=5)
    sizes = [(phase.world_size, phase.workers) for phase in phases]
    assert len(set(sizes[:4])) == 1
    assert {8 % world_size == 0 for world_size, _ in sizes[4:]} == {True, False}
    assert len({workers for _, workers in sizes}) == 3


def test_every_number_of_kills_ends_with_a_phase_that_is_left_alone() -> None:
    for kills in range(1, 6):
        phases = scenario_for(480, 40, kills=kills)
        assert [phase.fault is None for phase in phases] == [False] * kills + [True]
        assert phases[-1].world_size != phases[0].world_size


def test_a_launcher_starts_all_phases_up_to_another_topology_or_the_loss_of_the_whole_job() -> None:
    config = DemoConfig(lake="/l", folder="/f", steps=32, save_every=4, phases=scenario_for(32, 4, kills=5))
    assert config.launches == [range(4), range(4, 5), range(5, 6)]
    assert DemoConfig(lake="/l", folder="/f", steps=32, save_every=4, phases=config.phases[:1]).launches == [range(1)]


def test_a_config_comes_back_from_json_as_it_was() -> None:
    config = DemoConfig(lake="/l", folder="/f", steps=32, save_every=4, phases=scenario_for(32, 4, kills=5))
    assert DemoConfig.from_json(config.to_json()) == config


def test_a_constant_global_batch_where_the_ranks_allow_it() -> None:
    assert [Phase(world_size=w, workers=0).accumulate * w for w in (1, 2, 4)] == [4, 4, 4]
    assert Phase(world_size=3, workers=0).accumulate == 1
