"""This module watches the ranks of a node: it notices that none moves, asks for a verdict, and says what is to be done.

`Watcher.poll` is called twice a second. As long as some rank's page moves, it learns the habits of the job
(`lakeckpt.watch.limits`). If none has moved for longer than the limit, it takes two looks at the ranks, a second apart,
joins them with those of the other nodes, and judges. A stall is reported once, and again when it ends or changes. It is
acted on, where that is wanted:

* at the second look, if it cannot heal: ranks are out of step, their collectives do not match, or a rank is stopped;
* if the culprits do nothing, after five minutes, or twice the longest gap that the phase had before;
* never, if the culprits work, if it is a pause, or before the job has done eight steps.

While the job goes on, ranks that are slow are written down (`lakeckpt.watch.slow`).

If `poll` itself comes late, as after the suspension of the machine, all times begin anew. The world lies behind
`Ground`. The module starts no threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from lakeckpt.watch.beat import Page, Phase
from lakeckpt.watch.limits import StallLimits
from lakeckpt.watch.looks import RankLook
from lakeckpt.watch.rank_looks import look_at_page
from lakeckpt.watch.slow import WINDOW_S, SlowRank, SlowRanks
from lakeckpt.watch.stalls import NodeLooks, Stall
from lakeckpt.watch.verdict import StallVerdict, judge, out_of_step

__all__ = ["POLL_S", "Ground", "Watcher"]

POLL_S = 0.5
_LATE_S = 2.0
_AGAIN_S = 2.0
_STOPPED_S = 10.0
_GAP_S = 1.0
_CHECK_S = 2.0
_MOST_STEPS = 63
_WHOLE = 16
"""Of so many culprits and so many others the stacks are kept."""
_SPARED: frozenset[Phase] = frozenset(("start", "restore", "ended"))
"""Nobody is to blame yet, or any more: ranks wait for each other by turns that have timeouts of their own."""


class Ground(Protocol):
    """What a watcher stands on. Called by the thread that calls `Watcher.poll`; nothing raises."""

    def pages(self, *, histories: bool = False) -> Mapping[int, Page]:
        """Return the pages of the ranks of this node that train: rank → page."""

    def looks(self) -> NodeLooks:
        """Look at the ranks of this node twice, a second apart, with their stacks."""

    def joined(self, looks: NodeLooks) -> Collection[NodeLooks]:
        """Give the looks of this node to the other nodes. Return those of all nodes that gave theirs in time."""

    def report(self, stall: Stall) -> None:
        """Write down a stall. A later report of a stall that began at the same time replaces the first one."""

    def slow(self, rank: SlowRank) -> None:
        """Write down that a rank is slow, or not any more."""

    def act(self, stall: Stall) -> None:
        """Kill the ranks of this node, so that the launcher starts the job again. The stall was reported."""


class Watcher:
    """Watches the ranks of one node, of an ``attempt`` of ``world`` ranks. ``acts``: stalls that do not heal are acted
    on; ``why_not``: if they would be, but cannot, why. ``wall``: seconds since 1970."""

    def __init__(
        self,
        ground: Ground,
        limits: StallLimits,
        *,
        attempt: int,
        world: int,
        acts: bool,
        why_not: str = "",
        wall: Callable[[], float],
    ) -> None:
        self._ground, self._limits, self._wall = ground, limits, wall
        self._attempt, self._world, self._acts, self._why_not = attempt, world, acts, why_not
        self._pages: dict[int, Page] = {}
        self._moved: dict[int, float] = {}
        """Rank → when its page moved, as seen here."""
        self._polled_s: float | None = None
        self._look_s = 0.0
        """When the next look is due; 0: once the limit is over."""
        self._step, self._stepped_s, self._checked_s = 0, 0.0, 0.0
        self._stall: Stall | None = None
        self._doubted = ""
        """The kind of a verdict that blamed nobody, which one look gave."""
        self._apart: StallVerdict | None = None
        self._slow = SlowRanks(attempt=attempt)
        self._window_s = -math.inf
        """When the newest window for slow ranks began."""

    def poll(self, now_s: float) -> None:
        """Look at the pages; if they stand still, look closer. ``now_s``: by a monotonic clock."""
        late = self._polled_s is not None and now_s - self._polled_s > POLL_S + _LATE_S
        self._polled_s = now_s
        pages = dict(self._ground.pages())
        if not self._pages and pages:
            page = min(pages.values(), key=lambda one: one.step)
            self._limits.stepped([page.step_s] * min(page.step - page.begun - 1, _MOST_STEPS))  # before this watcher
        if late or pages.keys() != self._pages.keys():
            self._pages, self._moved, self._look_s = pages, dict.fromkeys(pages, now_s), 0.0
            self._slow.begin({})
            return
        moved = [rank for rank, page in pages.items() if page.beats != self._pages[rank].beats]
        for rank in moved:
            self._learn(self._pages[rank], now_s - self._moved[rank])
            self._moved[rank] = now_s
        self._pages = pages
        if moved:
            self._goes_on(now_s)
        elif pages and not all(page.phase in _SPARED for page in pages.values()):
            self._stands(now_s)

    def _learn(self, page: Page, gap_s: float) -> None:
        if gap_s > _GAP_S:
            self._limits.gap(page.doing, gap_s)

    def _goes_on(self, now_s: float) -> None:
        """Some rank moves: a stall is over."""
        self._look_s = 0.0
        if self._stall is not None:
            if not self._stall.acted:  # else it ended when the ranks were killed
                self._ground.report(replace(self._stall, ended_s=self._wall()))
            self._stall = None
        step = min(page.step for page in self._pages.values())
        if step > self._step:
            since_s, steps = now_s - self._stepped_s, step - self._step
            if self._stepped_s:
                self._limits.stepped([since_s / steps] * min(steps, _MOST_STEPS))
            self._step, self._stepped_s = step, now_s
        if self._apart is None and now_s > self._checked_s + _CHECK_S:
            self._checked_s = now_s
            self._check_steps()
        if now_s >= self._window_s + WINDOW_S:
            self._window_s = now_s
            for one in self._slow.window(self._ground.pages(histories=True), at_s=self._wall()):
                self._ground.slow(one)

    def _check_steps(self) -> None:
        """Notice ranks that are out of step while the job goes on."""
        looks = {rank: look_at_page(page) for rank, page in self._ground.pages(histories=True).items()}
        self._apart = out_of_step(looks)
        if self._apart is not None:
            self._say(self._apart, self._wall(), tuple(looks.values()), acts=not self._limits.is_new)
            self._stall = None

    def _stands(self, now_s: float) -> None:
        """No rank moves."""
        since_s = max(self._moved.values())
        phases = {page.doing for page in self._pages.values()}
        limit_s = max(self._limits.look_after_s(phase) for phase in phases)
        if now_s < (self._look_s or since_s + limit_s):
            return
        began_s = self._wall() - (now_s - since_s)  # before the looks, which take seconds
        nodes = self._ground.joined(self._ground.looks())
        first = {one.rank: one for node in nodes for one in node.first}
        second = {one.rank: one for node in nodes for one in node.second}
        here = {rank for node in nodes for rank in node.here}
        verdict = judge(first, second, world=self._world, here=here)
        self._polled_s = None  # looks take longer than a poll
        self._look_s = now_s + (now_s - since_s)
        if verdict is None:
            return
        act_s = self._act_after_s(verdict, phases)
        if self._stall is not None and self._stall.acted:
            return  # once
        acts = not self._limits.is_new and act_s is not None and now_s - since_s >= act_s
        self._say(verdict, began_s, tuple(second.values()), acts=acts)
        if act_s is not None and self._acts:
            self._look_s = min(self._look_s, max(now_s + _AGAIN_S, since_s + act_s))

    def _act_after_s(self, verdict: StallVerdict, phases: Collection[str]) -> float | None:
        """Return after how long a standstill of this kind is acted on; None: never."""
        if verdict.certainty in ("paused", "works"):
            return None
        if verdict.certainty == "still":
            return max(self._limits.act_after_s(phase) for phase in phases)
        if verdict.kind == "stopped":
            return _STOPPED_S
        return 0.0 if self._stall is not None else math.inf  # at the second look

    def _say(self, verdict: StallVerdict, began_s: float, looks: tuple[RankLook, ...], *, acts: bool) -> None:
        """Report a stall that began then, once, and again if it is acted on or the verdict is another one.

        A verdict that blames nobody replaces another one at its second look: a rank that was stopped and goes on is
        back in its collective before its page moves.
        """
        wall_s, known = self._wall(), self._stall
        is_new = known is not None and not verdict.ranks and verdict.kind not in (known.verdict.kind, self._doubted)
        self._doubted = verdict.kind if is_new else ""
        if is_new and verdict.certainty != "paused" and not acts:
            return
        stall = Stall(
            attempt=self._attempt,
            verdict=verdict,
            step=max((look.step for look in looks), default=0),
            began_s=known.began_s if known else began_s,
            perceived_s=known.perceived_s if known else wall_s,
            ended_s=wall_s if acts and self._acts else 0.0,
            acted=acts and self._acts,
            remark=self._why_not if acts and not self._acts else "",
            looks=_kept(looks, verdict.ranks),
        )
        if known is None or (known.verdict.ranks, known.verdict.kind) != (verdict.ranks, verdict.kind) or stall.acted:
            self._ground.report(stall)
        self._stall = stall
        if stall.acted:
            self._ground.act(stall)


def _kept(looks: Sequence[RankLook], culprits: Collection[int]) -> tuple[RankLook, ...]:
    """Return the evidence of a stall: all that is seen of the culprits and of some others, and of all others little."""
    whole = {*sorted(culprits)[:_WHOLE], *sorted(look.rank for look in looks)[:_WHOLE]}
    return tuple(look if look.rank in whole else replace(look, threads=(), taken=(), children=()) for look in looks)
