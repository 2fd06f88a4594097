"""Ranks agree on the latest of the cuts at which they can stop."""

from __future__ import annotations

import pytest

from lakeckpt.checkpoint.preemption.agreement import Agreement
from tests.checkpoint.rig import Hub


def ranks_of(hub: Hub) -> list[Agreement]:
    return [Agreement(hub.of(rank)) for rank in range(hub.world_size)]


@pytest.mark.parametrize("cuts", [(4, 5, 4), (7, 7, 7), (9, 8, 10)])
def test_all_ranks_stop_at_the_latest_cut_at_which_any_can_stop(cuts: tuple[int, ...]) -> None:
    ranks = ranks_of(Hub(3))
    for rank, (one, cut) in enumerate(zip(ranks, cuts, strict=True)):
        assert [other.cut() for other in ranks] == [None] * 3 and rank in ranks[0].missing()
        one.state(cut)
    assert [one.cut() for one in ranks] == [max(cuts)] * 3


def test_one_signal_is_known_to_all_and_the_first_counts() -> None:
    ranks = ranks_of(Hub(3))
    assert [one.signal() for one in ranks] == [None] * 3
    ranks[2].announce(15)
    ranks[1].announce(10)
    assert [one.signal() for one in ranks] == [15] * 3


def test_without_a_signal_there_is_no_note() -> None:
    hub = Hub(2)
    for one in ranks_of(hub):
        assert one.signal() is None
    assert hub.notes == {}
