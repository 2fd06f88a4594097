"""A slow rank is named with its phase after five windows in virtual time; noise and one slow window name nobody."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from lakeckpt.watch.beat import Page, Phase
from lakeckpt.watch.slow import WINDOW_S, WINDOWS, SlowRank, SlowRanks
from tests.watch.test_watcher import page

STEP_S = 1.0
USUAL: Mapping[Phase, float] = {"data": 0.1, "forward": 0.2, "optimizer": 0.1, "between": 0.02}
Own = Callable[[int, int], Mapping[Phase, float]]
"""Rank and window → what its own phases take."""


def found(own: Own, *, ranks: int = 4, windows: int = 12) -> list[tuple[int, SlowRank]]:
    """What is written of a job, each with the number of its window; ranks wait for the slowest one in backward."""
    slow = SlowRanks(attempt=3)
    pages: dict[int, Page] = {rank: page(rank, step=0) for rank in range(ranks)}
    written = list(slow.window(pages, at_s=0.0))
    assert not written
    result: list[tuple[int, SlowRank]] = []
    for window in range(1, windows + 1):
        parts = {rank: dict(own(rank, window)) for rank in pages}
        longest_s = max(sum(one.values()) for one in parts.values()) + STEP_S
        for rank, its in parts.items():
            its["backward"] = longest_s - sum(its.values())
            steps = int(WINDOW_S / longest_s)
            spent = {phase: pages[rank].spent_s.get(phase, 0.0) + steps * seconds for phase, seconds in its.items()}
            pages[rank] = replace(pages[rank], step=pages[rank].step + steps, spent_s=spent)
        result += [(window, one) for one in slow.window(pages, at_s=window * WINDOW_S)]
    return result


@pytest.mark.parametrize("phase", ["data", "forward", "optimizer", "between"])
def test_a_rank_that_is_slow_is_named_with_its_phase_after_five_windows_and_then_every_five(phase: Phase) -> None:
    written = found(lambda rank, window: {**USUAL, phase: USUAL[phase] + 0.2 * (rank == 2)})
    assert [(window, one.rank, one.phase, one.trend) for window, one in written] == [
        (5, 2, phase, "steady"),
        (10, 2, phase, "steady"),
    ]
    one = written[0][1]
    assert (round(one.own_s, 3), round(one.peers_s, 3)) == (0.62, 0.42)
    assert f"rank 2 on {one.node} is slow, most in {phase}: 0.620 s of its own in a step, its peers 0.420 s" in str(one)
    assert SlowRank.from_bytes(one.to_bytes()) == one


def test_the_trend_and_the_end_are_written() -> None:
    def own(rank: int, window: int) -> Mapping[Phase, float]:
        return {**USUAL, "data": 0.1 + (0.05 * window + 0.1 if rank == 1 and window < 8 else 0)}

    assert [(window, one.rank, one.trend, one.is_over) for window, one in found(own)] == [
        (5, 1, "grows", False),
        (8, 1, "steady", True),
    ]


def test_noise_one_slow_window_and_ranks_that_are_slow_together_name_nobody() -> None:
    noise = random.Random(7)

    def noisy(rank: int, window: int) -> Mapping[Phase, float]:
        return {phase: seconds * noise.uniform(0.7, 1.5) for phase, seconds in USUAL.items()}

    def once(rank: int, window: int) -> Mapping[Phase, float]:
        return {**USUAL, "data": 0.1 + (2.0 if rank == 1 and window % WINDOWS == 0 else 0)}

    def together(rank: int, window: int) -> Mapping[Phase, float]:
        return {**USUAL, "data": 0.1 * window}

    def little(rank: int, window: int) -> Mapping[Phase, float]:
        return {"data": 0.001 * (1 + rank)}

    for own in (noisy, once, together, little):
        assert found(own, windows=60) == []


def test_two_ranks_alone_name_nobody_and_three_do() -> None:
    own: Own = lambda rank, window: {**USUAL, "data": 0.1 + 0.3 * (rank == 0)}  # noqa: E731
    assert found(own, ranks=2) == []
    assert {one.rank for _, one in found(own, ranks=3)} == {0}


def test_a_window_lasts_until_each_rank_has_finished_a_step() -> None:
    slow = SlowRanks(attempt=3)
    pages = {rank: page(rank, step=0) for rank in range(4)}
    slow.window(pages, at_s=0.0)
    for window in range(1, 2 * WINDOWS + 1):
        steps = window // 2  # a step takes two windows
        written = slow.window(
            {
                rank: replace(one, step=steps, spent_s={"data": steps * (30.0 if rank == 3 else 10.0)})
                for rank, one in pages.items()
            },
            at_s=window * WINDOW_S,
        )
        assert [one.rank for one in written] == ([3] if window == 2 * WINDOWS else [])
