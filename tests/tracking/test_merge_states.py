"""Joining the ranks' states: equal whole states, or parts whose lanes add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lakeckpt import merge_states
from lakeckpt.core.state import ReaderState, Segment
from lakeckpt.errors import (
    ConfigError,
    DisagreementError,
    GapError,
    MissingRanksError,
    OverlapError,
    StateInvalid,
)
from tests.core.states import identity_of


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


def test_the_state_of_the_only_rank_is_the_state_of_the_job() -> None:
    segment = Segment(micro_batch=0, step=0, num_lanes=4, batch_size=4, world_size=1)
    state = ReaderState(identity=identity_of(40), epoch=1, segments=(segment,), step=1).to_plain()
    assert merge_states([state]) == state and merge_states([{"step": 9}]) == {"step": 9}
    assert merge_states([part(0, [1, 0], world_size=1, num_lanes=2)]) == {
        "epoch": 5,
        "num_lanes": 2,
        "lanes": [[0, 0, 0, 3], [1, 0, 100, 3]],
    }


def test_states_of_fewer_or_more_ranks_than_they_say_are_refused() -> None:
    segment = Segment(micro_batch=0, step=0, num_lanes=4, batch_size=4, world_size=4)
    state = ReaderState(identity=identity_of(40), epoch=1, segments=(segment,), step=1)
    plain = state.to_plain()
    assert merge_states(dict(plain) for _ in range(4)) == plain
    with pytest.raises(MissingRanksError, match="ranks 2-3 of 4"):
        merge_states([plain, plain])
    with pytest.raises(OverlapError, match="5 states were given, of a job of 4 ranks"):
        merge_states([plain] * 5)
    over = replace(state, step=3).to_plain()
    assert merge_states([over] * 2) == over  # as two ranks say it that go on with the next epoch
    with pytest.raises(StateInvalid):
        merge_states([{**plain, "segments": []}] * 2)


def test_the_order_in_which_fields_were_set_makes_no_difference() -> None:
    one = {"a": {"x": 1, "y": [{"p": 1, "q": 2}]}, "b": 2}
    assert merge_states([one, {"b": 2, "a": {"y": [{"q": 2, "p": 1}], "x": 1}}]) == one
    with pytest.raises(DisagreementError, match="'a'"):
        merge_states([one, {**one, "a": {"x": 1, "y": [{"q": 1, "p": 2}]}}])


def test_fields_may_be_numbers() -> None:
    assert merge_states([{1: 2, "a": 3}, {"a": 3, 1: 2}]) == {1: 2, "a": 3}


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ([None], StateInvalid, "got NoneType as state 0"),
        ([{"a": 1}, "b"], StateInvalid, "got str as state 1"),
        ("ab", StateInvalid, "got str as state 0"),
        ({"a": 1}, ConfigError, "takes a list of the states of all ranks, got dict"),
        (7, ConfigError, "got int"),
    ],
)
def test_what_is_no_list_of_states_is_refused(given: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        merge_states(given)


def test_a_rank_whose_whole_state_differs_is_named() -> None:
    with pytest.raises(DisagreementError, match="'step': 9 on ranks 0, 2; 8 on rank 1"):
        merge_states([{"step": 9}, {"step": 8}, {"step": 9}])


def test_every_field_that_differs_is_named_by_its_path() -> None:
    segments = [[step, 10 * step, 8, 32, 4] for step in range(8)]
    one = {"identity": {"table": "a", "seed": 7}, "step": 9, "segments": segments}
    other = {"identity": {"table": "a", "seed": 8}, "step": 8, "segments": [*segments[:-1], [7, 70, 8, 32, 2]]}
    with pytest.raises(DisagreementError) as caught:
        merge_states([one, other])
    text = str(caught.value)
    assert "'identity'/'seed': 7 on rank 0; 8 on rank 1" in text and "'step': 9 on rank 0; 8 on rank 1" in text
    assert "[7, 70, 8, 32, 4]] (digest" in text and "[7, 70, 8, 32, 2]] (digest" in text
    assert "'table'" not in text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": {}}, {"a": None}),
        ({"a": {"b": 1}}, {"a/b": 1}),
        ({"a": 1}, {"a": True}),
        ({"a": [1] * 50}, {"a": [*[1] * 20, 2, *[1] * 29]}),
        ({"a": {}}, {}),
        ({"a" * 70: 1}, {"a" * 71: 1}),
    ],
)
def test_states_that_look_alike_and_are_not_are_told_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    with pytest.raises(DisagreementError):
        merge_states([one, other])


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
