"""When saves fall: by steps and by the clock, announced by rank 0 a step ahead, with few notes; later in an outage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from itertools import chain, pairwise, repeat

import pytest

from lakeckpt.checkpoint.outage import Outage
from lakeckpt.checkpoint.schedule import Schedule, interval_of
from lakeckpt.errors import ConfigError, SaveFailed, SaveRefused
from lakeckpt.tracking.exchange import Exchange
from tests.checkpoint.rig import Hub


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now(self) -> float:
        return self.time_s

    def wait(self, seconds: float) -> None:
        raise AssertionError("nobody waits here")


def scheduled(every: int | timedelta, exchange: Exchange, clock: Clock, *, fail_after_s: float = 3600.0) -> Schedule:
    outage = Outage(fail_after_s, clock)
    outage.committed()
    return Schedule(every, exchange, clock, outage)


def passed(schedule: Schedule, step: int) -> bool:
    """Pass a step at which a save succeeds, if one falls there."""
    with schedule.passing(step):
        return schedule.is_due(step)


def test_by_steps_rank_0_leaves_one_note_for_each_save() -> None:
    hub, clock = Hub(2), Clock()
    ranks = [hub.of(rank) for rank in range(2)]
    schedules = [scheduled(3, one, clock) for one in ranks]
    for schedule in schedules:
        schedule.start(4)
    assert [step for step in range(5, 15) if {passed(schedule, step) for schedule in schedules} == {True}] == [6, 9, 12]
    assert ranks[1].fetched == ["check/4", "check/6", "check/9", "check/12"] and ranks[0].fetched == []


def tries_of(
    every: int | timedelta, *, world_size: int, takes_s: float, outage_s: float, step_s: float = 1.0
) -> list[tuple[float, float]]:
    """The tries of a job whose store goes away for ``outage_s`` after 100 s: when each began, and for how long it held
    up training. A try that fails takes ``takes_s``, and one that succeeds no time."""
    hub, clock = Hub(world_size), Clock()
    outages = [Outage(1e9, clock) for _ in range(world_size)]
    schedules = [Schedule(every, hub.of(rank), clock, outages[rank]) for rank in range(world_size)]
    for one in (*schedules, *outages):
        one.start(0) if isinstance(one, Schedule) else one.committed()
    begin_s, found = clock.time_s + 100.0, []
    for step in range(1, 100_000):
        clock.time_s += step_s
        with contextlib.ExitStack() as stack:
            for schedule in schedules:
                stack.enter_context(schedule.passing(step))
            due = {schedule.is_due(step) for schedule in schedules}
            assert len(due) == 1, "all ranks save alike"
            if due == {True} and clock.time_s >= begin_s:
                tried_s = clock.time_s
                if tried_s - begin_s >= outage_s:
                    return [*found, (tried_s - begin_s, 0.0)]
                clock.time_s += takes_s
                for outage in outages:
                    outage.failed(SaveFailed("away"), tried_s)
                found.append((tried_s - begin_s, takes_s))
    raise AssertionError("the store was not tried again")


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("every", [1, 50, timedelta(minutes=10), timedelta(seconds=5)])
def test_a_failed_save_is_tried_again_ever_later_whenever_saves_fall(every: int | timedelta, world_size: int) -> None:
    *failed, (last_s, _) = tries_of(every, world_size=world_size, takes_s=0.0, outage_s=3000.0)
    gaps_s = [after - before for (before, _), (after, _) in pairwise([*failed, (last_s, 0.0)])]
    wanted_s = [20.0, 40.0, 80.0, 160.0] + [300.0] * len(gaps_s)
    assert all(want - 2 <= gap <= 1.2 * want for gap, want in zip(gaps_s, wanted_s, strict=False)), gaps_s


@pytest.mark.parametrize("takes_s", [0.0, 15.0, 45.0, 200.0])
@pytest.mark.parametrize("every", [1, timedelta(minutes=10)])
def test_an_outage_holds_synchronous_saves_up_for_about_a_tenth_of_its_length(
    every: int | timedelta, takes_s: float
) -> None:
    tries = tries_of(every, world_size=2, takes_s=takes_s, outage_s=10_000.0)
    first, *others, (last_s, _) = tries
    assert sum(took for _, took in others) <= 0.11 * (last_s - first[0])


def test_saves_fall_as_before_when_an_outage_is_over() -> None:
    clock = Clock()
    outage = Outage(1e9, clock)
    schedule = Schedule(3, Hub(1).of(0), clock, outage)
    outage.committed()
    schedule.start(0)
    found = []
    for step in range(1, 40):
        clock.time_s += 2.0
        with schedule.passing(step):
            if schedule.is_due(step):
                found.append(step)
                if step == 6:
                    outage.failed(SaveFailed("away"), clock.time_s)
                else:
                    outage.committed()
    assert found[:2] == [3, 6] and 14 <= found[2] <= 17 and found[3:] == list(range(found[2] // 3 * 3 + 3, 40, 3))


def test_a_failure_is_raised_first_of_all_for_good_or_when_the_time_is_over() -> None:
    clock, away = Clock(), SaveFailed("the store is away")
    outage = Outage(100.0, clock)
    with pytest.raises(SaveFailed, match=r"is away$"):
        outage.failed(away, clock.now())
    outage.committed()
    with pytest.raises(SaveRefused, match="is full"):
        outage.failed(SaveRefused("the disk is full"), clock.now())
    assert "after 20 s" in outage.failed(away, clock.now())
    clock.time_s += 70.0
    assert "after 30 s" in outage.failed(away, clock.now())  # the last try falls when the time is over
    clock.time_s += 30.0
    with pytest.raises(SaveFailed, match=r"No save has succeeded for 100 s \(fail_after=100\)"):
        outage.failed(away, clock.now())
    outage.committed()
    assert "after 20 s" in outage.failed(away, clock.now())
    assert Outage(0.0, clock).left_s(0.0) is None


@pytest.mark.parametrize("step_s", [0.001, 0.5, 7.0, 40.0])
def test_by_the_clock_all_ranks_save_at_the_same_steps_and_read_few_notes(step_s: float) -> None:
    hub, clock = Hub(3), Clock()
    ranks = [hub.of(rank) for rank in range(3)]
    schedules = [scheduled(timedelta(seconds=20.0), one, clock) for one in ranks]
    for schedule in schedules:
        schedule.start(10)
    saves = []
    steps = int(200 / step_s)
    for step in range(11, 11 + steps):
        clock.time_s += step_s
        due = {passed(schedule, step) for schedule in schedules}
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
        due = {passed(schedule, step) for schedule in schedules}
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
    schedules = [scheduled(timedelta(seconds=600.0), one, clock) for one in ranks]
    first, second = saved_at(schedules, clock, chain([quick_s] * quick, repeat(slow_s, 20_000)), 2)
    assert 600 - slow_s <= first <= 600 + 3 * slow_s and 600 - slow_s <= second - first <= 600 + 3 * slow_s
    assert len(ranks[1].fetched) < 60


@pytest.mark.parametrize(("before_s", "after_s", "late_s"), [(0.1, 3.0, 600.0), (2.0, 0.05, 1.0), (0.5, 1.0, 80.0)])
def test_a_change_of_pace_makes_a_save_late_by_no_more_than_an_eighth_of_the_interval_takes_then(
    before_s: float, after_s: float, late_s: float
) -> None:
    hub, clock = Hub(2), Clock()
    schedules = [scheduled(timedelta(seconds=600.0), hub.of(rank), clock) for rank in range(2)]
    paces_s = chain([before_s] * 1000, repeat(after_s, 30_000))
    times_s = [0.0, *saved_at(schedules, clock, paces_s, 5)]
    gaps_s = [after - before for before, after in pairwise(times_s)]
    assert len(gaps_s) == 5 and all(595 <= gap_s <= 600 + late_s for gap_s in gaps_s)
    assert gaps_s[-1] <= 600 + 3 * after_s


def test_a_rank_that_is_alone_looks_at_the_clock_at_every_step_and_leaves_no_notes() -> None:
    hub, clock = Hub(1), Clock()
    paces_s = chain([0.1] * 1000, repeat(3.0, 2000))
    first, second = saved_at([scheduled(timedelta(seconds=600.0), hub.of(0), clock)], clock, paces_s, 2)
    assert 597 <= first <= 606 and 597 <= second - first <= 606
    assert hub.notes == {}


def test_a_rank_reads_a_note_only_at_the_cut_after_the_check() -> None:
    """Rank 0 may be a step behind another rank: a note is fetched when it must have been published."""
    hub, clock = Hub(2), Clock()
    first, second = (scheduled(timedelta(seconds=5.0), hub.of(rank), clock) for rank in range(2))
    second.start(0)
    first.start(0)
    assert not passed(first, 1) and not passed(second, 1)


def test_what_a_user_may_ask_for() -> None:
    assert interval_of(7) == 7
    assert interval_of(timedelta(minutes=2)) == timedelta(minutes=2)
    assert interval_of(None) == timedelta(minutes=10)
    for bad in (0, -1, True, timedelta(0), 2.5):
        with pytest.raises(ConfigError, match="persist_every is a positive int"):
            interval_of(bad)
