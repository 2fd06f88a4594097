"""The merge of reports: one result in any order and grouping, and refusals by name."""

from __future__ import annotations

import random
from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import MissingRanksError, TrackingError, WireDamaged
from lakeckpt.tracking.tally import Tally, name_ranks
from lakeckpt.wire.envelope import dumps


def report(rank: int, *, world_size: int = 4, **facts: str) -> Tally:
    return Tally.of_rank(rank, world_size=world_size, facts=facts or {"step": "7"})


def settled(tallies: list[Tally]) -> Tally:
    job = tallies[0].merge(*tallies[1:])
    job.settle(agreed=["step"])
    return job


jobs = st.integers(1, 9).map(lambda size: [report(rank, world_size=size) for rank in range(size)])


@given(jobs, st.randoms(use_true_random=False))
def test_any_order_and_grouping_gives_one_tally(tallies: list[Tally], chance: random.Random) -> None:
    expected = reduce(lambda one, other: one.merge(other), tallies)
    groups = list(tallies)
    while len(groups) > 1:
        one = groups.pop(chance.randrange(len(groups)))
        other = groups.pop(chance.randrange(len(groups)))
        groups.append(Tally.from_bytes(one.to_bytes()).merge(other))
    assert groups[0].to_bytes() == expected.to_bytes()
    settled(groups)
    assert groups[0].reported.size == len(tallies)


@given(jobs, st.data())
def test_a_dropped_or_repeated_report_never_settles(tallies: list[Tally], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tallies) - 1))
    with pytest.raises(TrackingError, match=f"rank {at} reported twice"):
        settled([*tallies, tallies[at]])
    if len(tallies) > 1:
        with pytest.raises(MissingRanksError, match=rf"rank {at} of"):
            settled([tally for rank, tally in enumerate(tallies) if rank != at])


def test_a_disagreement_names_the_ranks_and_what_they_say() -> None:
    tallies = [report(rank, step="7" if rank == 2 else "8") for rank in range(4)]
    with pytest.raises(TrackingError, match="step: 8 on ranks 0-1, 3; 7 on rank 2"):
        settled(tallies)


def test_reports_of_jobs_of_different_sizes_do_not_add_up() -> None:
    with pytest.raises(TrackingError, match="4 and 2 ranks"):
        report(0).merge(report(1, world_size=2))


def test_a_damaged_message_is_refused() -> None:
    data = bytearray(report(0).to_bytes())
    data[len(data) // 2] ^= 1
    with pytest.raises(WireDamaged):
        Tally.from_bytes(bytes(data))


def test_ranks_in_words() -> None:
    assert name_ranks(Intervals.of([(5, 6)])) == "rank 5"
    assert name_ranks(Intervals.of([(0, 2), (5, 6)])) == "ranks 0-1, 5"


@pytest.mark.parametrize(
    "value",
    [
        {},
        [1],
        None,
        {"world_size": "a", "reported": b"", "facts": {}},
        {"world_size": 0, "reported": b"", "facts": {}},
        {"world_size": 1, "reported": "", "facts": []},
        {"world_size": 1, "reported": b"", "facts": {"a": 3}},
        {"world_size": 1, "reported": b"\xff", "facts": {}},
    ],
)
def test_a_document_of_something_else_is_refused(value: Any) -> None:
    with pytest.raises(WireDamaged):
        Tally.from_bytes(dumps(value, kind="tally", version=(1, 0)))
