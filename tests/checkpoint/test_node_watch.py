"""The looks of many nodes are joined through the run, and a node that says nothing is named by its ranks."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lakeckpt.checkpoint.faults import joining, node_watch, tracing
from lakeckpt.checkpoint.faults.notes import page_path
from lakeckpt.checkpoint.faults.records import habits_of, looks_of, put_habits, put_looks, put_stall, slow_of, stalls_of
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.watch.beat import Beat
from lakeckpt.watch.limits import Habits
from lakeckpt.watch.slow import SlowRank
from lakeckpt.watch.stalls import NodeLooks, Stall
from lakeckpt.watch.system.kernel import READY, KernelEvent
from lakeckpt.watch.verdict import StallVerdict, judge
from tests.patience import PATIENCE_S
from tests.watch.made import looked


def looks_at(node: int, *, step: int = 12) -> NodeLooks:
    looks = tuple(looked(rank, node=f"node-{node}", step=step) for rank in (2 * node, 2 * node + 1))
    return NodeLooks(here=(2 * node, 2 * node + 1), step=step, first=looks, second=looks)


def node(storage: LocalStorage, folder: Path, world: int) -> node_watch._Node:
    watched = node_watch.Watched(
        storage=storage, attempt=3, world=world, here=(0, 1), page=page_path(str(folder), bytes(16), 3, 0), acts=False
    )
    return node_watch._Node(watched, select.poll(), lambda text: None)


def test_of_256_nodes_the_one_that_says_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOIN_S", 0.2)
    storage = LocalStorage(tmp_path / "run")
    for number in range(1, 256):
        if number != 77:
            put_looks(storage, 3, looks_at(number))
    put_looks(storage, 2, looks_at(77))  # of another attempt
    found = node(storage, tmp_path, 512).joined(looks_at(0))
    assert len(found) == 255
    verdict = judge(
        {look.rank: look for one in found for look in one.first},
        {look.rank: look for one in found for look in one.second},
        world=512,
        here={rank for one in found for rank in one.here},
    )
    assert verdict is not None and (verdict.ranks, verdict.kind) == ((154, 155), "network")


def test_looks_of_an_earlier_stall_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOIN_S", 0.2)
    storage = LocalStorage(tmp_path / "run")
    put_looks(storage, 3, looks_at(1, step=5))
    put_looks(storage, 3, looks_at(2, step=11))
    assert sorted(one.here for one in node(storage, tmp_path, 6).joined(looks_at(0))) == [(0, 1), (4, 5)]


def test_stalls_and_habits_come_back_from_the_run(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    assert habits_of(storage) is None and stalls_of(storage) == []
    put_habits(storage, Habits(longest_s={"data": 7.0}, step_s=0.5))
    assert habits_of(storage) == Habits(longest_s={"data": 7.0}, step_s=0.5)
    verdict = StallVerdict(ranks=(1,), kind="socket", reason="it waits", certainty="still")
    stall = Stall(attempt=3, verdict=verdict, step=12, began_s=50.0, perceived_s=54.0)
    path = put_stall(storage, stall)
    assert stalls_of(storage) == [(path, stall)]


def test_events_of_the_kernel_are_added_to_a_stall_that_was_written_without_waiting_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, traces = threading.Event(), []

    def trace(scripts: Sequence[str], seconds: float, *, blocked_ms: int) -> Iterator[KernelEvent]:
        traces.append(scripts)
        yield KernelEvent(kind=READY)
        assert goes_on.wait(PATIENCE_S)
        mine = os.getpid()
        yield KernelEvent(kind="signals", pid=7, process="bash", text="sent SIGSTOP to a rank", amount=mine)
        yield KernelEvent(kind="signals", pid=7, process="bash", text="sent SIGSTOP to another", amount=mine + 1)
        yield KernelEvent(kind="signals", pid=mine, process="me", text="sent SIGKILL to a rank", amount=mine)
        yield KernelEvent(kind="blocked", pid=9, process="dd", text="is blocked", amount=2000)

    monkeypatch.setattr(tracing, "trace", trace)
    monkeypatch.setattr(tracing, "missing", lambda: "")
    storage = LocalStorage(tmp_path / "run")
    ground = node(storage, tmp_path, 2)
    Beat(page_path(str(tmp_path), bytes(16), 3, 0), rank=0, world=2)
    verdict = StallVerdict(ranks=(0,), kind="stopped", reason="it is stopped", certainty="certain")
    stall = Stall(attempt=3, verdict=verdict, step=12, began_s=50.0, perceived_s=54.0)
    ground.report(stall)
    ground.report(stall)
    ground.keep_events()
    assert [one.events for _, one in stalls_of(storage)] == [()] and traces == [("signals", "blocked")]
    goes_on.set()
    assert ground._trace._thread is not None
    ground._trace._thread.join(PATIENCE_S)
    ground.keep_events()
    [(_, kept)] = stalls_of(storage)
    assert [one.partition("UTC: ")[2] for one in kept.events] == [
        "process 7 (bash) sent SIGSTOP to a rank",
        "process 9 (dd) is blocked",
    ]
    ground.report(replace(stall, ended_s=60.0))
    assert stalls_of(storage)[0][1] == replace(kept, ended_s=60.0) and len(traces) == 1


def test_slow_ranks_are_written_by_attempt_and_replaced(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    slow = SlowRank(attempt=3, rank=1, node="a", step=9, phase="data", own_s=0.6, peers_s=0.4, trend="grows", at_s=50.0)
    for one in (replace(slow, attempt=2), slow, replace(slow, is_over=True)):
        node(storage, tmp_path, 4).slow(one)
    assert slow_of(storage, 3) == [replace(slow, is_over=True)]


def test_one_agent_of_a_node_watches_and_the_next_one_follows_it(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.touch()
    first = node_watch._locked(str(page))
    assert first is not None and node_watch._locked(str(page)) is None
    os.close(first)
    second = node_watch._locked(str(page))
    assert second is not None
    os.close(second)
    assert node_watch._locked(str(tmp_path / "none")) is None


def test_other_nodes_get_of_a_first_look_what_a_verdict_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "JOIN_S", 0.0)
    storage = LocalStorage(tmp_path / "run")
    given = looks_at(0)
    assert list(node(storage, tmp_path, 4).joined(given)) == [given]
    [put] = looks_of(storage, 3)
    assert put.second == given.second
    assert [(one.threads, one.process, one.beats) for one in put.first] == [
        ((), one.process, one.beats) for one in given.first
    ]
