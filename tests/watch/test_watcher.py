"""The watcher in virtual time: it reports a standstill once, acts on what cannot heal, and learns what is usual."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from lakeckpt.watch.beat import Page
from lakeckpt.watch.limits import Habits, StallLimits
from lakeckpt.watch.looks import ProcessLook, RankLook
from lakeckpt.watch.slow import SlowRank
from lakeckpt.watch.stalls import NodeLooks, Stall
from lakeckpt.watch.watcher import POLL_S, Watcher
from tests.watch.made import in_script, looked


def page(rank: int, **changes: Any) -> Page:
    found = Page(
        pid=100 + rank, started=1, rank=rank, world=4, phase="compute", since_s=0.0, begun=0, step=20, batches=20,
        used=20, reader="train", epoch=0, next_step=21, dealt=rank, of_ranks=4, rows=80, first_step_s=1.0,
        last_step_s=2.9,
        stalled_s=0.0, killed=0, beats=1,
    )  # fmt: skip
    return replace(found, **changes)


class Node:
    """A ground whose ranks do what a test says."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.now_pages = {rank: page(rank) for rank in range(4)}
        self.odd: dict[str, Any] = {"threads": in_script(), "process": ProcessLook(pid=102, state="S", waits="pipe")}
        self.reports: list[Stall] = []
        self.acts: list[Stall] = []
        self.slow_ranks: list[SlowRank] = []
        self.looked = 0
        self.slow_rank: int | None = None
        self.others: list[NodeLooks] = []

    def watcher(self, *, acts: bool = True, habits: Habits | None = None, why_not: str = "") -> Watcher:
        wall = lambda: self.now_s  # noqa: E731
        return Watcher(self, StallLimits(habits), attempt=3, world=4, acts=acts, why_not=why_not, wall=wall)

    def step(self) -> None:
        """All ranks do a step."""
        self.now_pages = {
            rank: replace(
                one,
                beats=one.beats + 4,
                step=one.step + 1,
                spent_s={"data": one.spent_s.get("data", 0.0) + (0.4 if rank == self.slow_rank else 0.1)},
            )
            for rank, one in self.now_pages.items()
        }

    def pages(self, *, histories: bool = False) -> Mapping[int, Page]:
        return dict(self.now_pages)

    def looks(self) -> NodeLooks:
        self.looked += 1
        looks = tuple(self._look(rank) for rank in self.now_pages)
        self.now_s += 1
        return NodeLooks(here=tuple(self.now_pages), step=20, first=looks, second=looks)

    def _look(self, rank: int) -> RankLook:
        look = looked(rank, beats=self.now_pages[rank].beats, taken=self.now_pages[rank].taken)
        return replace(look, **self.odd) if rank == 2 else look

    def joined(self, looks: NodeLooks) -> Collection[NodeLooks]:
        return (looks, *self.others)

    def report(self, stall: Stall) -> None:
        assert Stall.from_bytes(stall.to_bytes()) == stall
        self.reports.append(stall)

    def slow(self, rank: SlowRank) -> None:
        self.slow_ranks.append(rank)

    def act(self, stall: Stall) -> None:
        assert self.reports[-1] is stall, "written down before anything is killed"
        self.acts.append(stall)

    def let(self, watcher: Watcher, seconds: float, *, train: bool = False) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            if train:
                self.step()
            watcher.poll(self.now_s)
            self.now_s += POLL_S


def test_a_standstill_is_reported_once_and_acted_on_after_five_minutes() -> None:
    node = Node()
    watcher = node.watcher()
    node.let(watcher, 10, train=True)
    node.let(watcher, 290)
    [stall] = node.reports
    assert (stall.verdict.ranks, stall.verdict.kind, stall.acted, node.acts) == ((2,), "pipe", False, [])
    assert stall.began_s == 1009.5, "when a page moved last, however long the looks took"
    assert stall.perceived_s - stall.began_s <= 5 and stall.attempt == 3 and len(stall.looks) == 4
    node.let(watcher, 30)
    [acted] = node.acts
    assert acted.acted and acted.began_s == stall.began_s and node.reports[-1] is acted


def test_what_cannot_heal_is_acted_on_at_the_second_look_and_a_stopped_rank_after_ten_seconds() -> None:
    for odd, most_s in (({"phase": "closing"}, 8), ({"process": ProcessLook(pid=102, state="T")}, 14)):
        node = Node()
        node.odd = odd
        watcher = node.watcher()
        node.let(watcher, 10, train=True)
        node.let(watcher, 4)
        assert len(node.reports) == 1 and not node.acts
        node.let(watcher, most_s)
        assert len(node.acts) == 1


def test_a_rank_that_still_moves_after_the_act_does_not_end_the_stall_again() -> None:
    node = Node()
    node.odd = {"phase": "closing"}
    watcher = node.watcher()
    node.let(watcher, 10, train=True)
    node.let(watcher, 12)
    assert len(node.acts) == 1
    node.let(watcher, 2, train=True)
    assert node.reports[-1] is node.acts[0]


@pytest.mark.parametrize(
    "odd", [{"process": ProcessLook(pid=102, state="R")}, {"process": ProcessLook(pid=102, state="t", tracer=9)}]
)
def test_a_rank_that_works_and_a_debugged_one_are_never_acted_on(odd: dict[str, Any]) -> None:
    node = Node()
    node.odd = {"threads": in_script(), **odd}
    watcher = node.watcher()
    node.let(watcher, 10, train=True)
    node.let(watcher, 3600)
    assert len(node.reports) == 1 and not node.acts and node.looked < 15


def test_where_nobody_starts_the_job_again_the_report_says_why_nothing_is_done() -> None:
    node = Node()
    node.odd = {"phase": "closing"}
    watcher = node.watcher(acts=False, why_not="no launcher")
    node.let(watcher, 10, train=True)
    node.let(watcher, 60)
    assert not node.acts and not any(one.acted for one in node.reports)


def test_a_stall_that_heals_is_reported_with_its_end_and_the_same_gap_is_looked_at_later() -> None:
    node = Node()
    watcher = node.watcher()
    node.let(watcher, 10, train=True)
    node.let(watcher, 40)
    looked = node.looked
    node.let(watcher, 10, train=True)
    began, ended = node.reports
    assert began.ended_s == 0 and ended.ended_s > ended.began_s + 39 and ended.began_s == began.began_s
    node.let(watcher, 40)
    assert node.looked == looked and len(node.reports) == 2, "it has had such a gap before"


def test_a_rank_that_was_let_go_does_not_change_the_verdict_before_it_moves() -> None:
    node = Node()
    watcher, node.odd = node.watcher(), {"process": ProcessLook(pid=102, state="t", tracer=77)}
    node.let(watcher, 10, train=True)
    node.let(watcher, 5)
    node.odd = {}  # in the collective of all others
    node.let(watcher, 5)
    assert node.looked == 2 and len(node.reports) == 1
    node.let(watcher, 5, train=True)
    first, ended = node.reports
    assert first.verdict == ended.verdict and first.verdict.kind == "stopped" and ended.ended_s


def test_a_stall_of_which_nobody_is_to_blame_at_two_looks_is_told_as_that() -> None:
    node = Node()
    watcher = node.watcher()
    node.let(watcher, 10, train=True)
    node.let(watcher, 5)
    node.odd = {}
    node.let(watcher, 20)
    assert [(one.verdict.kind, one.verdict.ranks) for one in node.reports] == [("pipe", (2,)), ("network", ())]
    node.odd = {"process": ProcessLook(pid=102, state="t", tracer=77)}
    node.let(watcher, 100)
    assert [one.verdict.kind for one in node.reports[2:]] == ["stopped"], "a pause is told at once"


def test_a_job_whose_steps_are_not_known_is_not_acted_on_and_one_of_a_watcher_that_comes_late_is() -> None:
    for begun, acts in ((18, 0), (0, 1)):
        node = Node()
        node.odd = {"phase": "closing"}
        node.now_pages = {rank: page(rank, begun=begun) for rank in range(4)}
        node.let(node.watcher(), 300)
        assert len(node.acts) == acts


def test_a_watcher_that_was_stopped_itself_begins_anew() -> None:
    node = Node()
    watcher = node.watcher()
    node.let(watcher, 10, train=True)
    node.now_s += 3600
    node.let(watcher, 2)
    assert not node.looked
    node.let(watcher, 10)
    assert node.reports[0].began_s > 4600


def test_a_rank_out_of_step_is_told_while_the_job_goes_on() -> None:
    node = Node()
    watcher = node.watcher(acts=False)
    usual = tuple((step, step) for step in range(1, 9))
    more = tuple((step, step + (step > 4)) for step in range(1, 9))
    node.now_pages = {rank: page(rank, taken=more if rank == 1 else usual) for rank in range(4)}
    node.let(watcher, 30, train=True)
    [stall] = node.reports
    assert (stall.verdict.ranks, stall.verdict.kind) == ((1,), "out of step")


def test_habits_of_the_last_attempt_hold() -> None:
    node = Node()
    watcher = node.watcher(habits=Habits(longest_s={"compute": 100.0}, step_s=0.5))
    node.let(watcher, 10, train=True)
    node.let(watcher, 140)
    assert not node.looked
    node.let(watcher, 20)
    assert node.looked == 1


def test_a_slow_rank_is_written_as_slow_and_is_no_stall() -> None:
    node = Node()
    node.slow_rank = 1
    watcher = node.watcher()
    node.let(watcher, 90, train=True)
    assert not node.slow_ranks
    node.let(watcher, 30, train=True)
    assert [(one.rank, one.phase, one.attempt) for one in node.slow_ranks] == [(1, "data", 3)]
    assert not node.reports and not node.looked


def test_windows_of_slow_ranks_begin_anew_after_the_watcher_was_stopped() -> None:
    node = Node()
    node.slow_rank = 1
    watcher = node.watcher()
    node.let(watcher, 90, train=True)
    node.now_s += 3600
    node.let(watcher, 90, train=True)
    assert not node.slow_ranks
