"""The tally of facts: which rank states what, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import MissingRanksError, TrackingError, WireDamaged
from lakeckpt.tracking.rounds import answer_to_bytes, facts_from_bytes, tally_from_bytes
from lakeckpt.tracking.tally import Tally, name_ranks, ranks_of
from lakeckpt.wire.envelope import dumps

facts = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), max_size=3)


@given(st.lists(facts, min_size=1, max_size=9))
def test_a_tally_has_what_each_rank_states_and_nothing_else(stated: list[dict[str, str]]) -> None:
    tally = tally_from_bytes(answer_to_bytes(Tally.of(stated)))
    assert tally == Tally.of(stated)
    for rank, mine in enumerate(stated):
        found = {
            name: value
            for name, values in tally.facts.items()
            for value, ranks in values.items()
            if ranks.intersection(ranks_of([rank]))
        }
        assert found == mine


def test_a_disagreement_names_the_ranks_and_what_they_state() -> None:
    tally = Tally.of([{"step": "7" if rank == 2 else "8", "attempt": "1"} for rank in range(4)])
    tally.require_agreement(["attempt", "a fact that nobody states"])
    with pytest.raises(TrackingError, match=r"^the ranks are not at .*: step: 8 on ranks 0-1, 3; 7 on rank 2$"):
        tally.require_agreement(["attempt", "step"])


def test_an_answer_may_be_an_error() -> None:
    with pytest.raises(MissingRanksError, match=r"^rank 1: is gone$"):
        tally_from_bytes(answer_to_bytes(MissingRanksError("rank 1: is gone")))


@pytest.mark.parametrize("value", [[], None, {"tally": {"facts": {"a": 3}}}, {"error": 3}, {"a": {"b": "c"}}, {"a": 1}])
def test_a_message_of_something_else_is_refused(value: Any) -> None:
    with pytest.raises(WireDamaged):
        tally_from_bytes(dumps(value, kind="answer", version=(1, 0)))
    with pytest.raises(WireDamaged):
        facts_from_bytes(dumps(value, kind="facts", version=(1, 0)))


def test_ranks_in_words() -> None:
    assert name_ranks(Intervals.of([(5, 6)])) == "rank 5"
    assert name_ranks(Intervals.of([(0, 2), (5, 6)])) == "ranks 0-1, 5"
