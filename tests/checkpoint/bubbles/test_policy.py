"""Slices into bubbles on a logical clock: what is admitted when, and what is carried into free time."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lakeckpt.checkpoint.bubbles.policy import BOLD, CAUTIOUS, MOST_OF_A_SITE, USUAL, BubblePolicy, IdleWindow, Kind
from lakeckpt.checkpoint.bubbles.record import IterationRecord, MovedSlice, waits_of
from tests.checkpoint.bubbles.moved import bubble_share, moved_bytes

Gap = tuple[float, float]
"""Computation before the bubble, and the bubble, in seconds."""


class Rank:
    """One rank on a clock of its own: gaps are gone through, slices of ``size`` are moved as the policy admits them.

    It copies at ``rate`` bytes a second. In ``gaps`` free time, if there is any, is
    the computation before each. A rank that is ``hindered`` comes back from its wait only when the slice under way is
    over.
    """

    def __init__(self, *, rate: float = 1.0, size: int = 1, free: bool = False, hindered: bool = False) -> None:
        self.policy = BubblePolicy()
        self.rate, self.size, self.free, self.hindered = rate, size, free, hindered
        self.now = 0.0
        self.left = 0
        self.slices: list[MovedSlice] = []
        self.windows: list[IdleWindow] = []
        self._busy_until = 0.0
        self._under_way: list[MovedSlice] = []
        for _ in range(4):  # a copy or two were measured
            self.policy.moved(size, 0.0, size / rate)

    def capture(self, size_bytes: int) -> None:
        self.left = size_bytes
        self.policy.begin_capture(size_bytes)

    def iteration(self, gaps: list[Gap], *, site: str = "gap", evaluates: Sequence[Gap] = ()) -> None:
        """``evaluates``: waits for data, as many as there are batches, behind the ``gaps`` of the iteration."""
        self.policy.begin_iteration()
        waits = [(f"{site} {number}", gap) for number, gap in enumerate(gaps)] + [("data", gap) for gap in evaluates]
        for name, (computes, idles) in waits:
            self._through("forward" if self.free else None, "free", computes)
            self._through(name, "bubble", idles)

    def _through(self, site: str | None, kind: Kind, length: float) -> None:
        end = self.now + length
        if site is not None:
            self.policy.open(site, kind, self.now)
            self._move(end)
        if self._under_way and self.hindered:
            end = max(end, self._busy_until)
            self._over()
        self.now = end
        if site is not None:
            window = self.policy.close(kind, end)
            assert window is not None
            self.windows.append(window)
        if self._under_way:
            self._over()

    def _over(self) -> None:
        """The slice that outlasts its window is over; nobody asks in between."""
        one = self._under_way.pop()
        self.policy.moved(one.size_bytes, one.begin_s, one.end_s)

    def _move(self, end: float) -> None:
        """Move what is admitted to begin before ``end``."""
        at = max(self.now, self._busy_until)
        while self.left > 0:
            admitted = self.policy.admits_at(self.size, at)
            if admitted is None or max(admitted, at) >= end:
                return
            at = max(admitted, at)
            done = at + self.size / self.rate
            self.policy.admitted(at)
            self.slices.append(MovedSlice(size_bytes=self.size, begin_s=at, end_s=done))
            self.left -= self.size
            at = self._busy_until = done
            if done > end:
                self._under_way.append(self.slices[-1])
                return
            self.policy.moved(self.size, self.slices[-1].begin_s, done)

    def record(self) -> IterationRecord:
        return IterationRecord(
            step=0,
            begin_s=0.0,
            end_s=max(self.now, self._busy_until),
            windows=tuple(self.windows),
            slices=tuple(self.slices),
        )


def learnt(gaps: list[Gap], **how: object) -> Rank:
    rank = Rank(**how)  # type: ignore[arg-type]
    for _ in range(3):
        rank.iteration(gaps)
    return rank


def test_slices_fill_a_bubble_up_to_the_last_that_fits() -> None:
    rank = learnt([(10.0, 3.5)])
    rank.capture(10)
    rank.iteration([(10.0, 3.5)])
    assert len(rank.slices) == 3
    assert bubble_share([rank.record()]) == 1.0


def test_what_one_bubble_does_not_hold_is_carried_to_the_next() -> None:
    gaps = [(10.0, 2.0), (10.0, 3.0)]
    rank = learnt(gaps)
    rank.capture(5)
    rank.iteration(gaps)
    assert rank.left == 0
    assert bubble_share([rank.record()]) == 1.0


def test_a_bubble_shorter_than_a_slice_is_left_alone() -> None:
    gaps = [(10.0, 0.5)]
    rank = learnt(gaps)
    rank.capture(5)
    rank.iteration(gaps)
    assert rank.slices == []


def test_a_bubble_may_hold_what_it_held_once_and_anything_where_nothing_is_known() -> None:
    policy = BubblePolicy()
    assert policy.may_hold(policy.open("gap", "bubble", 0.0), 10**9)
    policy.close("bubble", 0.5)
    policy.moved(1, 0.0, 1.0)
    for begin_s, length_s in ((10.0, 0.5), (20.0, 2.0), (30.0, 0.5)):
        policy.begin_iteration()
        name = policy.open("gap", "bubble", begin_s)
        assert policy.may_hold(name, 1) == (begin_s == 30.0)
        policy.close("bubble", begin_s + length_s)


def test_nothing_moves_while_the_rank_computes() -> None:
    rank = learnt([(10.0, 3.0)])
    rank.capture(5)
    assert rank.policy.admits_at(1, rank.now) is None


@given(
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=6),
    st.integers(0, 40),
    st.floats(0.2, 5),
)
def test_where_iterations_repeat_no_slice_outlasts_its_bubble(gaps: list[Gap], size: int, rate: float) -> None:
    rank = learnt(gaps, rate=rate)
    rank.capture(size)
    for _ in range(2):
        rank.iteration(gaps)
    assert all(
        any(w.begin_s <= one.begin_s and one.end_s <= w.end_s + 1e-6 for w in rank.windows) for one in rank.slices
    )


@given(st.data())
def test_a_bubble_that_ends_early_finds_one_slice_at_most_in_its_way(data: st.DataObject) -> None:
    numbers = data.draw(st.integers(1, 4))
    draw = st.lists(st.tuples(st.floats(1, 5), st.floats(0, 20)), min_size=numbers, max_size=numbers)
    rank = Rank()
    for _ in range(data.draw(st.integers(1, 4))):
        rank.capture(50)
        rank.iteration(data.draw(draw))
    for window in rank.windows:
        late = [one for one in rank.slices if window.begin_s <= one.begin_s < window.end_s < one.end_s - 1e-9]
        assert len(late) <= 1


def test_a_bubble_is_trusted_for_longer_where_those_ahead_do_not_hold_what_is_left() -> None:
    rank = Rank()
    for length in (1.5, 1.5, 2.5, 2.5):
        rank.iteration([(10.0, length), (10.0, 3.0)])
    rank.policy.begin_iteration()
    rank.policy.open("gap 0", "bubble", 100.0)
    rank.policy.begin_capture(2)
    assert rank.policy.admits_at(2, 100.0) == 104.5, "when it outlasts all that is known by as much"
    rank.policy.begin_capture(4)
    assert rank.policy.admits_at(2, 100.0) == 100.0


def test_where_there_is_room_slices_keep_away_from_ends_that_are_not_sure() -> None:
    rank = Rank()
    for length in (4.0, 4.0, 2.0, 4.0):
        rank.iteration([(10.0, length), (10.0, 24.0)])
    rank.policy.begin_iteration()
    rank.policy.open("gap 0", "bubble", 100.0)
    rank.policy.begin_capture(20)
    assert rank.policy.admits_at(1, 101.5) == 102.0, "one of four was over then"
    rank.policy.begin_capture(31)
    assert rank.policy.admits_at(1, 101.5) == 101.5


QUARTERS = st.integers(2, 160).map(lambda quarters: quarters / 4)
"""Seconds in which sums are exact, as are those of slices: a bubble of 40 s then holds 40 slices of one second."""


@given(gaps=st.lists(st.tuples(st.just(3.0), QUARTERS), min_size=1, max_size=8), fewer=st.integers(0, 320))
def test_whatever_bubbles_hold_moves_in_them_whichever_are_left_alone(gaps: list[Gap], fewer: int) -> None:
    rank = learnt(gaps)
    rank.capture(max(0, sum(int(idles) for _, idles in gaps) - fewer))
    rank.iteration(gaps)
    assert rank.left == 0


@given(gaps=st.lists(st.tuples(st.just(3.0), st.floats(0.5, 40.0)), min_size=1, max_size=8), fewer=st.integers(0, 320))
@example(gaps=[(3.0, 1.0), (3.0, 1.0), (3.0, 14.019306817792357), (3.0, 40.0)], fewer=0)
def test_where_the_clock_rounds_a_bubble_holds_all_slices_but_one_that_fits_exactly(
    gaps: list[Gap], fewer: int
) -> None:
    """The begin of the fortieth slice of 40 s is rounded up: it would be over after the bubble, by 3e-14 s."""
    rank = learnt(gaps)
    rank.capture(max(0, sum(int(idles - 1e-9) for _, idles in gaps) - fewer))
    rank.iteration(gaps)
    assert rank.left == 0


@given(st.lists(st.floats(0.2, 2.5), min_size=8, max_size=8), st.integers(1, 3))
def test_a_rank_that_slices_hold_up_does_not_take_that_for_longer_bubbles(lengths: list[float], size: int) -> None:
    rank = Rank(hindered=True, size=size)
    for length in lengths * 20:
        rank.capture(1000)
        rank.iteration([(1.0, length)])
    assert all(known <= max(lengths) + 1e-6 for known in rank.policy.history._lengths["gap 0 0"])


@pytest.mark.parametrize("size", [1, 5, 8])
def test_after_an_iteration_with_an_evaluation_all_that_bubbles_hold_moves_in_them(size: int) -> None:
    gaps = [(5.0, 4.5), (5.0, 4.5)]
    rank = learnt(gaps)
    for number in range(8):
        rank.capture(size)
        rank.iteration(gaps, evaluates=[(1.0, 7.0)] * 40 if number in (2, 5) else [])
        assert rank.left == 0, f"iteration {number}"
    assert bubble_share([rank.record()]) == 1.0


@pytest.mark.parametrize("size", [1, 5, 8])
def test_where_two_kinds_of_iterations_take_turns_all_that_bubbles_hold_moves_in_them(size: int) -> None:
    rank = Rank()
    for number in range(24):
        rank.capture(size if number >= 4 else 0)
        if number % 2:
            rank.iteration([(5.0, 4.5), (5.0, 4.5)])
        else:
            rank.iteration([(5.0, 40.0)], site="rollout")
        assert rank.left == 0, f"iteration {number}"
    assert bubble_share([rank.record()]) == 1.0


def test_a_slice_of_a_capture_that_was_given_up_does_not_shorten_the_windows_that_come() -> None:
    policy = BubblePolicy()
    policy.open("gap", "bubble", 0.0)
    policy.admitted(4.0)  # nobody tells that it moved
    policy.close("bubble", 10.0)
    for begin_s in (20.0, 40.0):
        policy.begin_iteration()
        policy.begin_capture(8)
        policy.open("gap", "bubble", begin_s)
        policy.close("bubble", begin_s + 10.0)
    assert list(policy.history._lengths["gap 0"]) == [4.0, 10.0, 10.0]


def test_what_was_admitted_and_did_not_move_says_nothing_of_rates_nor_of_later_windows() -> None:
    policy = BubblePolicy()
    policy.moved(1, 0.0, 1.0)
    policy.begin_capture(8)
    policy.open("gap", "bubble", 10.0)
    policy.admitted(12.0)
    policy.moved(0, 12.0, 13.0)
    policy.close("bubble", 20.0)
    assert (policy.rate.seconds(1), policy._left_bytes) == (1.0, 8)
    assert list(policy.history._lengths["gap 0"]) == [10.0]


_TURNS = st.lists(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["bubble", "bubble", "free"]), st.floats(0.1, 9)), max_size=7
    ),
    min_size=1,
    max_size=6,
)


def _ahead(policy: BubblePolicy, trust: float) -> list[float]:
    return list(policy._sites_ahead(trust).values())


def _check_lengths(policy: BubblePolicy, now: float) -> None:
    fresh = copy.deepcopy(policy)
    for question, *told in (
        *((BubblePolicy.capacity_bytes, 1, now, trust) for trust in (CAUTIOUS, USUAL, BOLD)),
        *((_ahead, trust) for trust in (CAUTIOUS, USUAL, BOLD)),
        (BubblePolicy.admits_at, 1, now),
    ):
        fresh._ahead.clear()
        assert question(policy, *told) == question(fresh, *told)


@given(_TURNS)
def test_the_lengths_ahead_are_what_they_would_be_if_nobody_had_asked_before(
    turns: list[list[tuple[str, Kind, float]]],
) -> None:
    policy, now = BubblePolicy(), 0.0
    policy.moved(1, 0.0, 1.0)
    for windows in turns:
        policy.begin_iteration()
        policy.begin_capture(8)
        _check_lengths(policy, now)
        for number, (site, kind, length) in enumerate(windows):
            policy.open(site, kind, now)
            _check_lengths(policy, now)
            now += length
            if number + 1 < len(windows):  # the last one is open across the cut
                policy.close(kind, now)


def test_the_bubbles_of_the_last_iteration_are_ahead_until_they_have_begun() -> None:
    policy = BubblePolicy()
    policy.begin_iteration()
    for at, site in enumerate("abc"):
        policy.open(site, "bubble", 10.0 * at)
        policy.close("bubble", 10.0 * at + at + 1)
    policy.begin_iteration()
    assert _ahead(policy, USUAL) == [1.0, 2.0, 3.0]
    policy.open("b", "bubble", 500.0)
    assert _ahead(policy, USUAL) == [1.0, 3.0]


def test_all_that_can_move_in_bubbles_does_even_where_there_is_free_time() -> None:
    gaps = [(10.0, 4.0), (10.0, 4.0)]
    rank = learnt(gaps, free=True)
    rank.capture(8)
    rank.iteration(gaps)
    assert rank.left == 0
    assert bubble_share([rank.record()]) == 1.0


def test_what_the_bubbles_ahead_do_not_hold_goes_into_free_time_and_no_more() -> None:
    gaps = [(10.0, 2.0), (10.0, 2.0)]
    rank = learnt(gaps, free=True)
    rank.capture(7)
    rank.iteration(gaps)
    waits, moved = waits_of([rank.record()]), moved_bytes([rank.record()])
    found = {kind: moved * sum(one.share for one in waits if one.kind == kind) for kind in ("bubble", "free")}
    assert rank.left == 0
    assert found == {"bubble": pytest.approx(4.0), "free": pytest.approx(3.0)}


def test_the_same_site_again_in_one_iteration_is_another_one() -> None:
    policy = BubblePolicy()
    assert policy.open("data", "bubble", 0.0) == "data 0"
    assert policy.open("data", "bubble", 2.0) == "data 1"
    assert policy.close("bubble", 9.0) == IdleWindow(site="data 1", kind="bubble", begin_s=2.0, end_s=9.0)
    assert policy.close("bubble", 9.0) is None
    assert (policy.history.expected_s("data 0"), policy.history.expected_s("data 1")) == (2.0, 7.0)


def test_an_iteration_with_any_number_of_waits_has_not_any_number_of_sites() -> None:
    policy = BubblePolicy()
    names = {policy.open("data", "bubble", float(n)) for n in range(3 * MOST_OF_A_SITE)}
    assert len(names) == MOST_OF_A_SITE


def test_the_rate_is_that_of_the_slower_slices() -> None:
    policy = BubblePolicy()
    for seconds in (1.0, 1.0, 1.0, 2.0):
        policy.moved(10, 0.0, seconds)
    assert policy.rate.seconds(10) == 2.0
