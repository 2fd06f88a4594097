"""A job of two nodes, with two ranks each, stands still: both nodes join their looks, and the rank or node is named.

The nodes are network namespaces with folders of arenas of their own. What each case took is printed with ``-s``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakeckpt.checkpoint.faults.records import looks_of, stalls_of
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.watch.stalls import Stall
from tests.system.cluster_job import ClusterJob, wait
from tests.system.namespaces import Node, two_nodes
from tests.system.test_several_nodes import start


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with two_nodes() as pair:
        yield pair


def begun(nodes: tuple[Node, Node], folder: Path, *, watch: str, hangs: int | None = None) -> ClusterJob:
    """A job whose rank ``hangs`` after its twelfth step."""
    job = ClusterJob(folder)
    job.environment["LAKECKPT_WATCH_ACT_S"] = "5"
    if hangs is not None:
        job.environment["HANGS"] = str(hangs)
    for number, node in enumerate(nodes):
        given = {"capture_every": 1, "watch": watch, "perceive": False, "arenas": str(folder / f"memory-{number}")}
        start(node, nodes, job, count="2", ranks=2, own={"MANAGER": json.dumps(given)})
    return job


def stall_of(job: ClusterJob) -> Stall:
    """Wait until a stall is written down."""
    storage = LocalStorage(job.folder / "run")
    wait(lambda: bool(stalls_of(storage)), job.text)
    return stalls_of(storage)[0][1]


def test_a_rank_that_hangs_on_another_node_is_named_and_the_job_goes_on_by_itself(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    job = begun(nodes, tmp_path / "job", watch="restart", hangs=3)
    stall = stall_of(job)
    assert (stall.verdict.ranks, stall.verdict.kind) == ((3,), "socket"), stall.verdict
    assert [look.rank for look in sorted(stall.looks, key=lambda one: one.rank)] == [0, 1, 2, 3]
    assert sorted(one.here for one in looks_of(LocalStorage(job.folder / "run"), 0)) == [(0, 1), (2, 3)]
    job.hurry()
    wait(lambda: all(node.statuses()[-1] is not None for node in nodes), job.text)
    assert [node.statuses()[-1] for node in nodes] == [0, 0], job.text()
    [(_, acted)] = stalls_of(LocalStorage(job.folder / "run"))
    assert acted.acted and acted.began_s == stall.began_s
    print(f"\nperceived after {acted.perceived_s - acted.began_s:.1f} s, ended after {acted.length_s:.1f} s")
    job.check_every_row_counted_once(attempts=2)


def test_a_node_that_is_stopped_as_a_whole_is_named_as_silent(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    job = begun(nodes, tmp_path / "job", watch="report")
    job.wait_for_steps(12)
    nodes[1].stop()
    at_s = time.time()
    stall = stall_of(job)
    assert (stall.verdict.ranks, stall.verdict.kind) == ((2, 3), "network"), stall.verdict
    assert "the node of rank 2, 3 says nothing" in stall.verdict.reason
    print(f"\nnamed {time.time() - at_s:.1f} s after the node was stopped")
