"""When saves fall: by steps without a word, by the clock with a few notes, announced a step ahead."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lakeckpt.checkpoint.policy import EverySeconds, EverySteps, policy_of
from lakeckpt.checkpoint.schedule import Schedule
from lakeckpt.errors import ConfigError
from tests.checkpoint.rig import Hub


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now(self) -> float:
        return self.time_s

    def wait(self, seconds: float) -> None:
        raise AssertionError("nobody waits here")


def test_by_steps_every_rank_answers_alone() -> None:
    hub = Hub(2)
    schedule = Schedule(EverySteps(3), hub.of(1), Clock())
    schedule.start(4)
    assert [step for step in range(5, 15) if schedule.is_due(step)] == [6, 9, 12]
    assert hub.notes == {}


@pytest.mark.parametrize("step_s", [0.001, 0.5, 7.0, 40.0])
def test_by_the_clock_all_ranks_save_at_the_same_steps_and_read_few_notes(step_s: float) -> None:
    hub, clock = Hub(3), Clock()
    ranks = [hub.of(rank) for rank in range(3)]
    schedules = [Schedule(EverySeconds(20.0), one, clock) for one in ranks]
    for schedule in schedules:
        schedule.start(10)
    saves = []
    steps = int(200 / step_s)
    for step in range(11, 11 + steps):
        clock.time_s += step_s
        due = {schedule.is_due(step) for schedule in schedules}
        assert len(due) == 1
        if due == {True}:
            saves.append(clock.time_s)
            for schedule in schedules:
                schedule.saved()
    gaps = [after - before for before, after in zip([100.0, *saves], saves, strict=False)]
    assert len(saves) >= 2
    assert all(20.0 - step_s <= gap <= 20.0 + 2 * step_s + 0.01 for gap in gaps)
    assert len(ranks[1].fetched) <= min(steps, 200) and ranks[0].fetched == []


def test_a_rank_reads_a_note_only_at_the_cut_after_the_check() -> None:
    """Rank 0 may be a step behind another rank: a note is fetched when it must have been published."""
    hub, clock = Hub(2), Clock()
    first, second = (Schedule(EverySeconds(5.0), hub.of(rank), clock) for rank in range(2))
    second.start(0)
    first.start(0)
    assert not first.is_due(1) and not second.is_due(1)


def test_what_a_user_may_ask_for() -> None:
    assert policy_of(7, None) == EverySteps(7)
    assert policy_of(timedelta(minutes=2), None) == EverySeconds(120.0)
    assert policy_of(None, EverySteps(2)) == EverySteps(2)
    assert policy_of(None, None) == EverySeconds(600.0)
    with pytest.raises(ConfigError, match="either"):
        policy_of(7, EverySteps(7))
    for bad in (0, -1, True):
        with pytest.raises(ConfigError, match="positive int"):
            policy_of(bad, None)
    with pytest.raises(ConfigError, match="positive number"):
        policy_of(timedelta(0), None)
