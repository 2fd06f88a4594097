"""Which share of what was copied moved in bubbles."""

from __future__ import annotations

from lakeckpt.checkpoint.bubbles.policy import IdleWindow
from lakeckpt.checkpoint.bubbles.profile import IterationRecord, MovedSlice, shares, windows_by_site

RECORD = IterationRecord(
    step=3,
    begin_s=0.0,
    end_s=100.0,
    windows=(
        IdleWindow(site="forward 0", kind="free", begin_s=0.0, end_s=30.0),
        IdleWindow(site="gap 0", kind="bubble", begin_s=10.0, end_s=20.0),
        IdleWindow(site="gap 1", kind="bubble", begin_s=40.0, end_s=50.0),
    ),
    slices=(
        MovedSlice(size_bytes=100, begin_s=15.0, end_s=25.0),  # half in the bubble, half in free time
        MovedSlice(size_bytes=100, begin_s=45.0, end_s=55.0),  # half in the bubble, half outside
        MovedSlice(size_bytes=10, begin_s=90.0, end_s=90.0, urgent=True),
        MovedSlice(size_bytes=10, begin_s=45.0, end_s=45.0),
    ),
)


def test_slices_count_by_the_time_that_they_were_in_bubbles() -> None:
    found = shares([RECORD])
    assert (found.moved_bytes, found.bubble_bytes, found.free_bytes) == (220, 110.0, 50.0)
    assert found.outside_bytes == 60.0
    assert found.urgent_bytes == 10
    assert found.bubble_share == 0.5
    assert (found.iterations, found.seconds, found.bubble_s) == (1, 100.0, 20.0)


def test_windows_that_overlap_count_once() -> None:
    twice = IterationRecord(
        step=0, begin_s=0.0, end_s=10.0, windows=(RECORD.windows[1], RECORD.windows[1]), slices=RECORD.slices[:1]
    )
    assert shares([twice]).bubble_bytes == 50.0
    assert shares([twice]).bubble_s == 10.0


def test_windows_are_summed_up_by_where_they_are() -> None:
    assert windows_by_site([RECORD, RECORD]) == {
        ("forward 0", "free"): (2, 60.0, 200.0),
        ("gap 0", "bubble"): (2, 20.0, 100.0),
        ("gap 1", "bubble"): (2, 20.0, 120.0),
    }


def test_nothing_moved_is_all_in_bubbles() -> None:
    assert shares([]).bubble_share == 1.0
