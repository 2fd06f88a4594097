"""Deals, held to a simulation that deals row by row; and ends, held to their table."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import EpochDeal, Left, Rest, micro_batches, rows_before, turns
from lakeckpt.core.order import Tail
from lakeckpt.core.receipts import Span
from lakeckpt.core.streams.stream import StreamDeal
from tests.examples import examples

Row = tuple[int, int]


def rows_of(spans: list[Span]) -> list[Row]:
    return [(span.epoch, position) for span in spans for position in range(span.start, span.stop)]


def members(positions: Intervals) -> list[int]:
    return [position for start, stop in positions for position in range(start, stop)]


def shares(rows: list[Any], num_lanes: int, rotation: int = 0) -> list[list[Any]]:
    """Rows cut into lanes by counting: each gets as many, and the extra ones go round from ``rotation``."""
    sizes = [len(rows) // num_lanes] * num_lanes
    for extra in range(len(rows) % num_lanes):
        sizes[(rotation + extra) % num_lanes] += 1
    ends = list(itertools.accumulate(sizes, initial=0))
    return [rows[a:b] for a, b in itertools.pairwise(ends)]


# --- one epoch


def sizes_of_a_lane(rows: int, share: int, longest: int, batch: int, tail: Tail) -> list[int]:
    """Rows of each micro-batch of a lane of ``rows``, by dealing them out; ``share``: the rows that every lane has."""
    if tail == "drop":
        return [batch] * (share // batch)
    turns_of_all = -(-longest // batch)
    sizes = []
    for turn in range(turns_of_all):
        left = rows - sum(sizes)
        after = turns_of_all - turn - 1
        sizes.append(min(batch, left) if after > 1 else -(-left // 2) if after else left)
    return sizes


def simulated(positions: list[int], num_lanes: int, batch: int, tail: Tail) -> list[list[int]]:
    lanes = shares(positions, num_lanes)
    share, longest = len(positions) // num_lanes, -(-len(positions) // num_lanes)
    each = [sizes_of_a_lane(len(lane), share, longest, batch, tail) for lane in lanes]
    dealt = []
    queues = [deque(lane) for lane in lanes]
    for turn in range(len(each[0])):
        for lane in range(num_lanes):
            dealt.append([queues[lane].popleft() for _ in range(each[lane][turn])])
    while dealt and not dealt[-1]:
        dealt.pop()
    return dealt


def scattered(pieces: list[tuple[int, int]]) -> Intervals:
    """Intervals of gaps and lengths."""
    ends = list(itertools.accumulate(itertools.chain.from_iterable(pieces), initial=0))
    return Intervals.of(zip(ends[1::2], ends[2::2], strict=True))


lefts = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=6).map(scattered)


@settings(max_examples=examples(300))
@given(lefts, st.integers(1, 8), st.integers(1, 7), st.sampled_from(["short", "drop"]), st.integers(0, 9))
def test_an_epoch_is_dealt_as_the_simulation_deals_it(
    positions: Intervals, num_lanes: int, batch: int, tail: Tail, first: int
) -> None:
    left = Left(epoch=2, positions=positions, num_lanes=3, rotation=0)
    deal = EpochDeal(first=first, num_lanes=num_lanes, batch_size=batch, tail=tail, left=left)
    expected = simulated(members(positions), num_lanes, batch, tail)
    assert deal.end == first + len(expected)
    assert deal.layout(2) == (3, 0)
    taken: set[int] = set()
    for number, rows in enumerate(expected, start=first):
        spans = deal.spans(number)
        assert rows_of(spans) == [(2, row) for row in rows]
        assert deal.rows_of(number, number + 1) == len(rows) <= batch
        assert deal.rows_of(first, number + 1) == sum(map(len, expected[: number + 1 - first]))
        assert set(members(deal.rest(number).begun[0].positions)) == set(members(positions)) - taken
        taken |= set(rows)
    assert set(members(deal.rest(deal.end).begun[0].positions)) == set(members(positions)) - taken
    assert deal.rest(deal.end).next_epoch == 3


@given(st.integers(0, 200), st.integers(1, 9), st.sampled_from(["short", "drop"]))
def test_micro_batches_of_one_row_are_full_until_the_last_one(rows: int, num_lanes: int, tail: Tail) -> None:
    left = Left(epoch=0, positions=Intervals.whole(rows), num_lanes=num_lanes, rotation=0)
    deal = EpochDeal(first=0, num_lanes=num_lanes, batch_size=1, tail=tail, left=left)
    sizes = [sum(span.rows for span in deal.spans(number)) for number in range(deal.end)]
    assert sizes == [1] * (rows if tail == "short" else rows - rows % num_lanes)


def test_an_epoch_that_is_not_dealt_here_is_refused() -> None:
    left = Left(epoch=2, positions=Intervals.whole(5), num_lanes=1, rotation=0)
    deal = EpochDeal(first=0, num_lanes=1, batch_size=2, tail="short", left=left)
    with pytest.raises(ValueError, match="epoch 1 is not dealt here, epoch 2 is"):
        deal.layout(1)


@given(st.integers(0, 60), st.integers(1, 9))
def test_turns_count_what_each_lane_has_given(done: int, num_lanes: int) -> None:
    assert turns(done, num_lanes).tolist() == [len(range(lane, done, num_lanes)) for lane in range(num_lanes)]


@pytest.mark.parametrize(
    ("rows", "num_lanes", "batch", "expected"),
    [
        (41, 4, 5, {"short": 3, "drop": 2}),
        (40, 4, 5, {"short": 2, "drop": 2}),
        (3, 4, 5, {"short": 1, "drop": 0}),
        (0, 4, 5, {"short": 0, "drop": 0}),
        (10**12, 96, 4096, {"short": 2543132, "drop": 2543131}),
    ],
)
def test_micro_batches_of_a_lane(rows: int, num_lanes: int, batch: int, expected: dict[Tail, int]) -> None:
    for tail, count in expected.items():
        assert micro_batches(rows, num_lanes, batch, tail) == count, tail


def test_closed_forms_hold_far_out() -> None:
    rows, lanes, batch = 10**15, 1000, 512
    count = micro_batches(rows, lanes, batch, "short")
    limit = np.array([rows // lanes])
    before = [int(rows_before(limit, count, batch, np.array([turn]))[0]) for turn in (count - 2, count - 1, count)]
    assert before[2] == rows // lanes and before[0] == (count - 2) * batch
    assert 0 <= (before[1] - before[0]) - (before[2] - before[1]) <= 1


# --- endless streams


def simulated_stream(start: Rest, rows: int, num_lanes: int, epochs: int) -> list[list[Row]]:
    """What each lane has, epoch after epoch; extra rows go round over the lanes."""
    lanes: list[list[Row]] = [[] for _ in range(num_lanes)]
    extras = 0
    units = [(left.epoch, members(left.positions)) for left in start.begun]
    units += [(start.next_epoch + i, list(range(rows))) for i in range(epochs)]
    for epoch, positions in units:
        for lane, mine in enumerate(shares(positions, num_lanes, extras % num_lanes)):
            lanes[lane] += [(epoch, position) for position in mine]
        extras += len(positions) % num_lanes
    return lanes


@st.composite
def starts(draw: st.DrawFn, rows: int) -> Rest:
    if draw(st.booleans()):
        return Rest(begun=(), next_epoch=0)
    epochs = draw(st.lists(st.integers(0, 4), unique=True, max_size=3).map(sorted))
    begun = []
    for epoch in epochs:
        chosen = draw(st.sets(st.integers(0, rows - 1), min_size=1, max_size=rows))
        positions = Intervals.of((one, one + 1) for one in chosen)
        begun.append(Left(epoch=epoch, positions=positions, num_lanes=2, rotation=1))
    return Rest(begun=tuple(begun), next_epoch=draw(st.integers(epochs[-1] + 1 if epochs else 0, 7)))


@given(st.data(), st.integers(1, 25), st.integers(1, 7), st.integers(1, 9), st.integers(0, 5))
def test_a_stream_is_dealt_as_the_simulation_deals_it(
    data: st.DataObject, rows: int, num_lanes: int, batch: int, first: int
) -> None:
    start = data.draw(starts(rows))
    deal = StreamDeal(first=first, num_lanes=num_lanes, batch_size=batch, rows=rows, start=start)
    assert deal.end is None
    count = data.draw(st.integers(1, 30))
    needed = -(-count // num_lanes) * batch * num_lanes // rows + 3
    lanes = simulated_stream(start, rows, num_lanes, needed)
    every = {row for lane in lanes for row in lane}
    taken: set[Row] = set()
    for number in range(count):
        turn, lane = divmod(number, num_lanes)
        expected = lanes[lane][turn * batch : (turn + 1) * batch]
        assert rows_of(deal.spans(first + number)) == expected
        assert deal.rows_of(first, first + number + 1) == (number + 1) * batch
        taken |= set(expected)
        rest = deal.rest(first + number + 1)
        left = {(one.epoch, position) for one in rest.begun for position in members(one.positions)}
        left |= {row for row in every if row[0] >= rest.next_epoch}
        assert left == every - taken
        assert all(one.positions for one in rest.begun)
        entered = {epoch for epoch, _ in taken} | {one.epoch for one in start.begun}
        assert (
            rest.next_epoch == max(entered | {start.next_epoch - 1}) + 1
        )  # an epoch that nobody entered has not begun
        for one in rest.begun:
            assert (one.num_lanes, one.rotation) == deal.layout(one.epoch)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 30))
def test_layouts_of_whole_epochs_rotate_their_extra_rows(rows: int, num_lanes: int, epoch: int) -> None:
    deal = StreamDeal(first=0, num_lanes=num_lanes, batch_size=1, rows=rows, start=Rest(begun=(), next_epoch=0))
    assert deal.layout(epoch) == (num_lanes, epoch * (rows % num_lanes) % num_lanes)


def test_a_stream_far_out_is_a_closed_formula() -> None:
    rows, lanes, batch = 10**12 + 7, 96, 4096
    deal = StreamDeal(first=0, num_lanes=lanes, batch_size=batch, rows=rows, start=Rest(begun=(), next_epoch=0))
    number = 96 * 10**9 + 5  # about four hundred epochs on
    (span, *_) = deal.spans(number)
    assert sum(one.rows for one in deal.spans(number)) == batch and 380 < span.epoch < 420
    rest = deal.rest(number)
    consumed = rest.next_epoch * rows - sum(left.positions.size for left in rest.begun)
    assert consumed == number * batch


def test_epochs_that_are_over_have_no_layout() -> None:
    start = Rest(begun=(Left(epoch=3, positions=Intervals.whole(2), num_lanes=2, rotation=1),), next_epoch=5)
    deal = StreamDeal(first=0, num_lanes=1, batch_size=1, rows=4, start=start)
    assert deal.layout(3) == (2, 1)
    for epoch in (0, 4):
        with pytest.raises(ValueError, match=f"epoch {epoch} is over"):
            deal.layout(epoch)
    with pytest.raises(ValueError, match="at least one row"):
        StreamDeal(first=0, num_lanes=1, batch_size=1, rows=0, start=start)
