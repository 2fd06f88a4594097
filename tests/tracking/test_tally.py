"""The tally of facts: which rank states what, and refusals by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import DisagreementError
from lakeckpt.tracking.tally import Tally, name_ranks, ranks_of

facts = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), max_size=3)


@given(st.lists(facts, min_size=1, max_size=9))
def test_a_tally_has_what_each_rank_states_and_nothing_else(stated: list[dict[str, str]]) -> None:
    tally = Tally.from_plain(Tally.of(stated).to_plain())
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
    with pytest.raises(DisagreementError, match=r"^the ranks are not at .*: step: 8 on ranks 0-1, 3; 7 on rank 2$"):
        tally.require_agreement(["attempt", "step"])


def test_ranks_in_words() -> None:
    assert name_ranks(Intervals.of([(5, 6)])) == "rank 5"
    assert name_ranks(Intervals.of([(0, 2), (5, 6)])) == "ranks 0-1, 5"
