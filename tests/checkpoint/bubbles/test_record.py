"""How long ranks waited at each site, and which share of what was copied moved meanwhile."""

from __future__ import annotations

import pytest

from lakeckpt.checkpoint.bubbles.policy import IdleWindow
from lakeckpt.checkpoint.bubbles.record import IterationRecord, MovedSlice, waits_of, waits_of_job
from lakeckpt.checkpoint.format.parts import SiteWaits

RECORD = IterationRecord(
    step=3,
    begin_s=0.0,
    end_s=100.0,
    windows=(
        IdleWindow(site="forward 0", kind="free", begin_s=0.0, end_s=30.0),
        IdleWindow(site="gap 0", kind="bubble", begin_s=10.0, end_s=20.0),
        IdleWindow(site="gap 1", kind="bubble", begin_s=40.0, end_s=54.0),
        IdleWindow(site="the lock 0", kind="bubble", begin_s=60.0, end_s=61.0),
    ),
    slices=(
        MovedSlice(size_bytes=100, begin_s=15.0, end_s=25.0),  # half in the bubble, half in free time
        MovedSlice(size_bytes=100, begin_s=49.0, end_s=59.0),  # half in the bubble, half outside
        MovedSlice(size_bytes=10, begin_s=90.0, end_s=90.0, urgent=True),
        MovedSlice(size_bytes=10, begin_s=45.0, end_s=45.0),
    ),
)


def test_waits_are_summed_up_by_site_and_slices_count_by_the_time_that_they_were_in_them() -> None:
    assert waits_of([RECORD, RECORD]) == (
        SiteWaits(site="forward", kind="free", median_s=30.0, share=50 / 220),
        SiteWaits(site="gap", kind="bubble", median_s=12.0, share=110 / 220),
        SiteWaits(site="the lock", kind="bubble", median_s=1.0, share=0.0),
    )
    assert waits_of([]) == ()


def test_the_waits_of_a_job_are_those_of_its_ranks() -> None:
    def waits(site: str, median_s: float, share: float) -> SiteWaits:
        return SiteWaits(site=site, kind="bubble", median_s=median_s, share=share)

    ranks = [[waits("pipeline", 3.0, 0.9)], [waits("pipeline", 1.0, 0.5), waits("data", 0.5, 0.3)], []]
    assert waits_of_job(ranks) == (
        waits("pipeline", 2.0, pytest.approx(1.4 / 3)),  # type: ignore[arg-type]
        waits("data", 0.5, pytest.approx(0.1)),  # type: ignore[arg-type]
    )
