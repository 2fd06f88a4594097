"""When saves fall: by steps without a word, by the clock with a few notes, announced a step ahead."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from itertools import chain, pairwise, repeat

import pytest

from lakeckpt.checkpoint.schedule import Schedule, interval_of
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
    schedule = Schedule(3, hub.of(1), Clock())
    schedule.start(4)
    assert [step for step in range(5, 15) if schedule.is_due(step)] == [6, 9, 12]
    assert hub.notes == {}


@pytest.mark.parametrize("step_s", [0.001, 0.5, 7.0, 40.0])
def test_by_the_clock_all_ranks_save_at_the_same_steps_and_read_few_notes(step_s: float) -> None:
    hub, clock = Hub(3), Clock()
    ranks = [hub.of(rank) for rank in range(3)]
    schedules = [Schedule(timedelta(seconds=20.0), one, clock) for one in ranks]
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
    gaps = [after - before for before, after in zip([100.0, *saves], saves, strict=False)]
    assert len(saves) >= 2
    assert all(20.0 - step_s <= gap <= 20.0 + 2 * step_s + 0.01 for gap in gaps)
    assert len(ranks[1].fetched) <= min(steps, 250) and ranks[0].fetched == []


def saved_at(schedules: list[Schedule], clock: Clock, paces_s: Iterable[float], saves: int) -> list[float]:
    """The times of the first saves, since the start, of ranks whose steps take so long."""
    begun_s, found = clock.time_s, []
    for schedule in schedules:
        schedule.start(0)
    for step, step_s in enumerate(paces_s, 1):
        clock.time_s += step_s
        due = {schedule.is_due(step) for schedule in schedules}
        assert len(due) == 1
        found += [clock.time_s - begun_s] * due.pop()
        if len(found) == saves:
            break
    return found


@pytest.mark.parametrize(("quick_s", "quick", "slow_s"), [(0.01, 3, 1.0), (0.05, 20, 2.0), (0.0, 1, 0.3)])
def test_steps_that_are_quick_at_first_do_not_put_the_first_save_off(quick_s: float, quick: int, slow_s: float) -> None:
    """A GPU's queue fills: the first steps return at once."""
    hub, clock = Hub(3), Clock()
    ranks = [hub.of(rank) for rank in range(3)]
    schedules = [Schedule(timedelta(seconds=600.0), one, clock) for one in ranks]
    first, second = saved_at(schedules, clock, chain([quick_s] * quick, repeat(slow_s, 20_000)), 2)
    assert 600 - slow_s <= first <= 600 + 3 * slow_s and 600 - slow_s <= second - first <= 600 + 3 * slow_s
    assert len(ranks[1].fetched) < 60


@pytest.mark.parametrize(("before_s", "after_s", "late_s"), [(0.1, 3.0, 600.0), (2.0, 0.05, 1.0), (0.5, 1.0, 80.0)])
def test_a_change_of_pace_makes_a_save_late_by_no_more_than_an_eighth_of_the_interval_takes_then(
    before_s: float, after_s: float, late_s: float
) -> None:
    hub, clock = Hub(2), Clock()
    schedules = [Schedule(timedelta(seconds=600.0), hub.of(rank), clock) for rank in range(2)]
    paces_s = chain([before_s] * 1000, repeat(after_s, 30_000))
    times_s = [0.0, *saved_at(schedules, clock, paces_s, 5)]
    gaps_s = [after - before for before, after in pairwise(times_s)]
    assert len(gaps_s) == 5 and all(595 <= gap_s <= 600 + late_s for gap_s in gaps_s)
    assert gaps_s[-1] <= 600 + 3 * after_s


def test_a_rank_that_is_alone_looks_at_the_clock_at_every_step_and_leaves_no_notes() -> None:
    hub, clock = Hub(1), Clock()
    paces_s = chain([0.1] * 1000, repeat(3.0, 2000))
    first, second = saved_at([Schedule(timedelta(seconds=600.0), hub.of(0), clock)], clock, paces_s, 2)
    assert 597 <= first <= 606 and 597 <= second - first <= 606
    assert hub.notes == {}


def test_a_rank_reads_a_note_only_at_the_cut_after_the_check() -> None:
    """Rank 0 may be a step behind another rank: a note is fetched when it must have been published."""
    hub, clock = Hub(2), Clock()
    first, second = (Schedule(timedelta(seconds=5.0), hub.of(rank), clock) for rank in range(2))
    second.start(0)
    first.start(0)
    assert not first.is_due(1) and not second.is_due(1)


def test_what_a_user_may_ask_for() -> None:
    assert interval_of(7) == 7
    assert interval_of(timedelta(minutes=2)) == timedelta(minutes=2)
    assert interval_of(None) == timedelta(minutes=10)
    for bad in (0, -1, True, timedelta(0), 2.5):
        with pytest.raises(ConfigError, match="persist_every is a positive int"):
            interval_of(bad)
