"""The merge of reports: one result in any order and grouping, and refusals by name."""

from __future__ import annotations

import random
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.errors import DisagreementError, GapError, MissingRanksError, OverlapError, WireDamaged
from lakeckpt.tracking.tally import Tally, name_ranks
from lakeckpt.wire.codec import dumps


def receipt(start: int, stop: int, *, epoch: int = 0, rank: int = 0, world_size: int = 4) -> Receipt:
    return Receipt(
        epoch=epoch,
        micro_batch=rank,
        lane=0,
        step=0,
        rank=rank,
        world_size=world_size,
        spans=(Span(epoch=epoch, start=start, stop=stop),),
        step_rows=10_000,
    )


def report(rank: int, rows: list[tuple[int, int]], *, world_size: int = 4, **facts: str) -> Tally:
    workers = [
        Tally.of_worker([receipt(start, stop, rank=rank, world_size=world_size)], rank=rank, world_size=world_size)
        for start, stop in rows
    ]
    return Tally.of_rank(rank, world_size=world_size, facts=facts or {"step": "7"}, workers=workers)


def settled(tallies: list[Tally], **how: object) -> Tally:
    job = tallies[0].merge(*tallies[1:])
    job.settle(agreed=["step"], **how)  # type: ignore[arg-type]
    return job


@st.composite
def whole_jobs(draw: st.DrawFn) -> tuple[int, int, list[Tally]]:
    """A job whose rows are dealt to workers of ranks anyhow."""
    world_size = draw(st.integers(1, 5))
    cuts = sorted({0, *draw(st.lists(st.integers(1, 99), max_size=12)), 100})
    pieces = list(pairwise(cuts))
    rows: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(world_size)}
    for piece in pieces:
        rows[draw(st.integers(0, world_size - 1))].append(piece)
    return world_size, 100, [report(rank, rows[rank], world_size=world_size) for rank in range(world_size)]


@given(whole_jobs(), st.randoms(use_true_random=False))
def test_any_order_and_grouping_gives_one_tally(job: tuple[int, int, list[Tally]], chance: random.Random) -> None:
    world_size, rows, tallies = job
    expected = reduce(lambda one, other: one.merge(other), tallies)
    groups = list(tallies)
    while len(groups) > 1:
        one = groups.pop(chance.randrange(len(groups)))
        other = groups.pop(chance.randrange(len(groups)))
        groups.append(Tally.from_bytes(one.to_bytes()).merge(other))
    assert groups[0].to_bytes() == expected.to_bytes()
    settled(groups, expected={0: Intervals.whole(rows)})
    assert groups[0].reported.size == world_size


@given(whole_jobs(), st.data())
def test_a_dropped_repeated_or_moved_report_never_settles(
    job: tuple[int, int, list[Tally]], data: st.DataObject
) -> None:
    _, rows, tallies = job
    at = data.draw(st.integers(0, len(tallies) - 1))
    with pytest.raises(OverlapError, match=f"rank {at} reported twice"):
        settled([*tallies, tallies[at]])
    if len(tallies) > 1:
        with pytest.raises(MissingRanksError, match=rf"rank {at} of"):
            settled([tally for rank, tally in enumerate(tallies) if rank != at])
    with pytest.raises(GapError):
        settled(tallies, expected={0: Intervals.whole(rows + 1)})
    with pytest.raises(OverlapError, match="consumed before"):
        settled(tallies, expected={0: Intervals.of([(1, rows)])})


def test_two_ranks_with_the_same_rows_are_named() -> None:
    with pytest.raises(OverlapError, match=r"epoch 0: ranks 1 and 3 both report 5 positions: Intervals\(\[15, 20\)\)"):
        settled([report(0, []), report(1, [(10, 20)]), report(2, []), report(3, [(15, 30)])])


def test_two_workers_of_a_rank_with_the_same_rows_are_told() -> None:
    with pytest.raises(OverlapError, match="two workers of rank 2"):
        report(2, [(0, 10), (9, 12)])
    with pytest.raises(OverlapError, match="rank 0 delivered positions twice"):
        Tally.of_worker([receipt(0, 10), receipt(5, 15)], rank=0, world_size=4)


def test_a_disagreement_names_the_ranks_and_what_they_say() -> None:
    tallies = [report(rank, [], step="7" if rank == 2 else "8") for rank in range(4)]
    with pytest.raises(DisagreementError, match="step: 8 on ranks 0-1, 3; 7 on rank 2"):
        settled(tallies)


def test_reports_of_jobs_of_different_sizes_do_not_add_up() -> None:
    with pytest.raises(DisagreementError, match="4 and 2 ranks"):
        report(0, []).merge(report(1, [], world_size=2))


def test_a_damaged_message_is_refused() -> None:
    data = bytearray(report(0, [(0, 5)]).to_bytes())
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
        {"world_size": "a", "reported": b"", "facts": {}, "claims": []},
        {"world_size": 0, "reported": b"", "facts": {}, "claims": []},
        {"world_size": 1, "reported": "", "facts": [], "claims": []},
        {"world_size": 1, "reported": b"", "facts": {"a": 3}, "claims": []},
        {"world_size": 1, "reported": b"", "facts": {}, "claims": [[0, 0]]},
        {"world_size": 1, "reported": b"\xff", "facts": {}, "claims": []},
    ],
)
def test_a_document_of_something_else_is_refused(value: Any) -> None:
    with pytest.raises(WireDamaged):
        Tally.from_bytes(dumps(value, kind="tally", version=(1, 0)))
