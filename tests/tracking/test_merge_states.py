"""Joining the ranks' states: equal whole states, or parts whose lanes add up."""

from __future__ import annotations

from typing import Any

import pytest

from lakeckpt import merge_states
from lakeckpt.errors import (
    ConfigError,
    DisagreementError,
    GapError,
    MissingRanksError,
    OverlapError,
    StateInvalid,
)


def part(rank: int, lanes: list[int], *, world_size: int = 2, num_lanes: int = 4, **fields: Any) -> dict[str, Any]:
    mark = {
        "rank": rank,
        "world_size": world_size,
        "num_lanes": num_lanes,
        "lanes": [[lane, 0, 100 * lane, 3] for lane in lanes],
    }
    return {"epoch": 5, **fields, "part": mark}


def test_equal_whole_states_are_the_state_of_the_job() -> None:
    state = {"epoch": 1, "step": 9}
    assert merge_states([state, dict(state), dict(state)]) == state


def test_a_rank_whose_whole_state_differs_is_named() -> None:
    with pytest.raises(DisagreementError, match="'step': 9 on ranks 0, 2; 8 on rank 1"):
        merge_states([{"step": 9}, {"step": 8}, {"step": 9}])


def test_a_rank_with_other_fields_is_named() -> None:
    with pytest.raises(DisagreementError, match="rank 1"):
        merge_states([{"step": 9}, {"step": 9, "more": 1}])


def test_parts_join_in_any_order() -> None:
    joined = {"epoch": 5, "num_lanes": 4, "lanes": [[lane, 0, 100 * lane, 3] for lane in range(4)]}
    assert merge_states([part(0, [0, 2]), part(1, [3, 1])]) == joined
    assert merge_states([part(1, [1, 3]), part(0, [2, 0])]) == joined


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(MissingRanksError, match="rank 1 of 2"):
        merge_states([part(0, [0, 1, 2, 3])])


def test_a_rank_that_comes_twice_is_named() -> None:
    with pytest.raises(OverlapError, match="rank 0 reported twice"):
        merge_states([part(0, [0, 2]), part(0, [1, 3])])


def test_a_lane_of_two_ranks_and_a_lane_of_none_are_named() -> None:
    with pytest.raises(OverlapError, match="lane 2 is reported by ranks 0 and 1"):
        merge_states([part(0, [0, 2]), part(1, [1, 2, 3])])
    with pytest.raises(GapError, match=r"\[3, 4\)"):
        merge_states([part(0, [0, 2]), part(1, [1])])


def test_parts_that_differ_elsewhere_are_refused() -> None:
    with pytest.raises(DisagreementError, match="'epoch'"):
        merge_states([part(0, [0, 2]), part(1, [1, 3], epoch=6)])
    with pytest.raises(GapError, match="8 lanes"):
        merge_states([part(0, [0, 2]), part(1, [1, 3], num_lanes=8)])
    with pytest.raises(DisagreementError, match="ranks"):
        merge_states([part(0, [0, 2]), part(1, [1, 3], world_size=3)])


@pytest.mark.parametrize(
    "mark",
    [
        None,
        {"rank": 2, "world_size": 2, "num_lanes": 1, "lanes": []},
        {"rank": 0, "world_size": 2, "num_lanes": 1, "lanes": [[1, 0, 0, 0]]},
        {"rank": 0, "world_size": 2, "num_lanes": 1, "lanes": [[0, 0]]},
    ],
)
def test_a_malformed_part_is_refused(mark: object) -> None:
    with pytest.raises(StateInvalid):
        merge_states([{"part": mark}, part(1, [1, 3])])


def test_nothing_and_mixtures_are_refused() -> None:
    with pytest.raises(ConfigError, match="got none"):
        merge_states([])
    with pytest.raises(ConfigError, match="state 1 is of the whole job and state 0 is a rank's part"):
        merge_states([part(0, [0, 1, 2, 3]), {"epoch": 5}])
