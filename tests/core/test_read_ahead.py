"""Which loops are suspected to read ahead of their steps: four rules, and no ordinary loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lakeckpt.core.read_ahead import Given, ReadAhead
from lakeckpt.data.position.deliveries import Deliveries
from tests.examples import examples


class Loop:
    """A loader of epochs of so many batches, as `Deliveries` sees it, and a loop's bare steps."""

    def __init__(self, batches: int, *, at: int = 0) -> None:
        self.deliveries = Deliveries()
        self.deliveries.begin_run("reader")
        self.judge = ReadAhead()
        self.batches, self.at, self.iteration = batches, at, 0

    def __iter__(self) -> Iterator[int]:
        self.iteration += 1
        iteration = self.iteration
        while self.at < self.batches:
            self.at += 1
            self.deliveries.delivered(iteration)
            yield self.at - 1
        self.deliveries.end()
        self.at = 0

    def step(self) -> None:
        self.judge.stepped(self.deliveries.take())


def spans(*counts: int) -> ReadAhead:
    judge = ReadAhead()
    for count in counts:
        judge.stepped(Given(batches=count, recent=count))
    return judge


@pytest.mark.parametrize(
    ("counts", "is_suspected"),
    [
        ((1,), False),
        ((4, 1), False),
        ((1, 1, 1), False),
        ((4, 4, 4, 1), False),
        ((4, 2, 1), False),
        ((1, 2, 2), False),
        ((4, 1, 1), True),
        ((1, 0, 0), True),
        ((4, 1, 1, 4, 4), True),
    ],
)
def test_the_first_three_steps_decide(counts: tuple[int, ...], is_suspected: bool) -> None:
    assert bool(spans(*counts).reason) == is_suspected


def test_what_was_left_of_an_iteration_is_no_first_step() -> None:
    judge = ReadAhead()
    for span in (
        Given(batches=1, recent=1, fresh=True, over=True),  # one was left, and what fetches one ahead has seen the end
        Given(batches=2, recent=2, fresh=True),
        Given(batches=1, recent=1),
        Given(batches=1, recent=1),
    ):
        judge.stepped(span)
    assert judge.reason
    judge = ReadAhead()
    for _ in range(3):
        judge.stepped(Given(batches=5, recent=5, fresh=True, over=True))  # a step for an epoch
    assert not judge.reason


def test_a_step_counts_by_the_iteration_that_it_ended_in() -> None:
    judge = ReadAhead()
    judge.stepped(Given(batches=9, recent=4, fresh=True))  # five were left of an epoch
    for _ in range(2):
        judge.stepped(Given(batches=4, recent=4))
    assert not judge.reason
    judge = ReadAhead()
    judge.stepped(Given(batches=3, recent=2, fresh=True))  # iter() was called twice of what fetches one ahead
    for _ in range(2):
        judge.stepped(Given(batches=1, recent=1))
    assert judge.reason


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        (Given(batches=1, recent=1, elsewhere=True), "another thread"),
        (Given(batches=1, recent=1, primed=True), "before restore"),
        (Given(batches=0, over=True), "end of its rows"),
    ],
)
def test_three_rules_hold_at_any_step(span: Given, reason: str) -> None:
    for before in range(5):
        judge = spans(*[1] * before)
        judge.stepped(span)
        assert reason in judge.reason


@settings(max_examples=examples(300))
@example(batches=40, at=0, accumulate=4, carries=False, flushes=True, stop_at=[6, 2], epochs=3)
@given(
    batches=st.integers(1, 40),
    at=st.integers(0, 39),
    accumulate=st.integers(1, 9),
    carries=st.booleans(),
    flushes=st.booleans(),
    stop_at=st.lists(st.none() | st.integers(1, 45), min_size=1, max_size=6),
    epochs=st.integers(1, 6),
)
def test_an_ordinary_loop_is_never_suspected(
    batches: int, at: int, accumulate: int, carries: bool, flushes: bool, stop_at: list[int | None], epochs: int
) -> None:
    """Any fixed accumulation, that goes over the ends of epochs or begins anew there, drops what is left or steps with
    it; breaks in the middle; resumed anywhere."""
    loop = Loop(batches, at=min(at, batches - 1))
    held = 0
    for _, most in zip(range(epochs), itertools.cycle(stop_at), strict=False):
        held = held if carries else 0
        for number, _ in enumerate(loop, 1):
            held += 1
            if held == accumulate:
                loop.step()
                held = 0
            if number == most:
                break
        if flushes and held:
            loop.step()
            held = 0
    assert not loop.judge.reason


@given(batches=st.integers(4, 40), depth=st.integers(1, 6), epochs=st.integers(1, 3))
def test_a_loop_behind_a_queue_is_suspected_before_the_end_of_its_first_epoch(
    batches: int, depth: int, epochs: int
) -> None:
    loop = Loop(batches)
    for _ in range(epochs):
        held, source = 0, iter(loop)
        while True:
            for _ in itertools.islice(source, depth + 1 - held):
                held += 1
            if not held:
                break
            held -= 1
            loop.step()
        assert loop.judge.reason
