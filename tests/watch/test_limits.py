"""Limits that a job teaches: fifty jobs over 24 hours of virtual time are looked at rarely, and never ended wrongly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lakeckpt.watch.limits import FEW_STEPS, Habits, StallLimits
from tests.watch.traces import Why, gaps, jobs


@dataclass
class Judged:
    looks: int = 0
    acts: int = 0
    wrong: int = 0
    missed: int = 0


def judged(number: int) -> Judged:
    """Watch a job for a day of virtual time, as the watcher does: looks at L, then each time it has doubled."""
    limits, found, job = StallLimits(), Judged(), jobs(50)[number]
    attempt = 0
    for gap in gaps(job):
        if gap.attempt != attempt:
            limits, attempt = StallLimits(limits.habits), gap.attempt
        if gap.why is not Why.SUSPEND:
            limit = limits.look_after_s(gap.phase)
            while gap.length > limit:
                found.looks += 1
                limit *= 2
            acts = not gap.works and not limits.is_new and gap.length > limits.act_after_s(gap.phase)
            found.acts += acts
            found.wrong += acts and gap.length < 300
            found.missed += not gap.heals and not gap.works and not acts and not limits.is_new
        if gap.heals and gap.why is not Why.SUSPEND:
            limits.gap(gap.phase, gap.length)
        if gap.phase == "optimizer":
            limits.stepped([job.step_s])
    return found


def test_in_a_day_of_fifty_jobs_nothing_is_acted_on_before_300_seconds_and_each_hang_that_stands_still_is() -> None:
    days = [judged(number) for number in range(50)]
    assert sum(day.wrong for day in days) == 0
    assert sum(day.missed for day in days) == 0 < sum(day.acts for day in days)
    assert sum(day.looks for day in days) / len(days) <= 20


def test_a_job_of_which_nothing_is_known_is_looked_at_after_a_minute_and_never_ended() -> None:
    limits = StallLimits()
    assert limits.is_new and limits.look_after_s("data") == 60
    limits.stepped([0.1] * FEW_STEPS)
    assert not limits.is_new and limits.look_after_s("data") == 3


@pytest.mark.parametrize(("phase", "looked", "acted"), [("pause", 450, 600), ("data", 30, 300)])
def test_a_phase_has_limits_by_its_own_longest_gap_also_in_the_next_attempt(
    phase: str, looked: float, acted: float
) -> None:
    limits = StallLimits()
    limits.stepped([10.0] * 9)
    limits.gap("pause", 300.0)
    limits.gap("pause", 20.0)
    next_limits = StallLimits(Habits.from_bytes(limits.habits.to_bytes()))
    for one in (limits, next_limits):
        assert (one.look_after_s(phase), one.act_after_s(phase)) == (looked, acted)
    assert next_limits.is_new, "its own steps decide whether it acts"
