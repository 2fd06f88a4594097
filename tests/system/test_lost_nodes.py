"""A node of two is lost with its memory: no step is lost, and no data are read from storage.

The nodes are network namespaces with folders of arenas of their own. `report` prints what each case came to:
``python -m pytest -m system tests/system/test_lost_nodes.py -s``.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakeckpt.checkpoint.faults.records import faults_of
from lakeckpt.checkpoint.persist.history import History, read_history
from lakeckpt.lake.storage.local import LocalStorage
from tests.system.cluster_job import ClusterJob, wait
from tests.system.namespaces import Node, several_nodes, two_nodes
from tests.system.test_several_nodes import start


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with two_nodes() as pair:
        yield pair


def own(job: ClusterJob, memory: str, peers: str = "copy") -> dict[str, str]:
    """The environment of a node whose memory is the folder of this name. ``peers``: what nodes keep under FSDP."""
    given: dict[str, object] = {"capture_every": 1, "persist_every": 5, "arenas": str(job.folder / memory)}
    if "FSDP" in job.environment:
        given |= {"peers": peers, "peers_every_s": 0.0, "persist_every": 1000}
    return {"MANAGER": json.dumps(given)}


CASES = [
    "a fresh node comes",
    "a fresh node comes and ranks swap",
    "the other goes on alone",
    "HSDP, a fresh node comes",
    "HSDP, a fresh node comes and ranks swap",
    "FSDP with copies, a fresh node comes",
    "FSDP with copies, a fresh node comes and ranks swap",
    "FSDP with copies, the other goes on alone",
]


@pytest.mark.parametrize("case", CASES)
def test_a_lost_node_costs_at_most_one_step_and_nothing_is_read_from_storage(
    nodes: tuple[Node, Node], tmp_path: Path, case: str
) -> None:
    job, is_swapped, count = ClusterJob(tmp_path / "job"), "swap" in case, "1:2" if "alone" in case else "2"
    ranks = 1
    if "HSDP" in case:
        job.environment["HSDP"], ranks = "1", 2
    if "FSDP" in case:
        job.environment["FSDP"] = "1"
    host = int(is_swapped)  # it stays; of two nodes, the one with the lower address has rank 0
    lost = nodes[1 - host]
    for number, node in enumerate(nodes):
        start(node, nodes, job, count=count, host=host, ranks=ranks, own=own(job, f"memory-{number}"))
    job.wait_for_steps(28 if "FSDP" in case else 13)
    lost.kill()
    shutil.rmtree(job.folder / f"memory-{1 - host}")
    job.hurry()
    if "alone" not in case:
        if is_swapped:
            lost.move("10.254.0.3")
        start(lost, nodes, job, count=count, host=host, ranks=ranks, own=own(job, "memory-fresh"))
    wait(lambda: nodes[host].statuses()[-1] is not None and lost.statuses()[-1] is not None, job.text)
    assert nodes[host].statuses()[-1] == 0, job.text()
    job.check_every_row_counted_once(attempts=2)
    report(case, job)


def test_a_node_that_is_cut_off_is_perceived_by_the_agent_of_another_node_which_goes_on(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    job = ClusterJob(tmp_path / "job")
    for number, node in enumerate(nodes):
        start(node, nodes, job, count="1:2", own=own(job, f"memory-{number}"))
    job.wait_for_steps(13)
    nodes[1].cut_off()
    at_s = time.time()
    job.hurry()
    wait(lambda: nodes[0].statuses()[-1] is not None, job.text)
    assert nodes[0].statuses()[-1] == 0, job.text()
    nodes[1].kill()
    (fault,), _ = faults_of(*run_of(job))
    print(f"\n{fault.first.name} noted by rank {fault.first.rank}, {fault.first.at_s - at_s:.1f} s after the cut")
    assert fault.first.cause == "lost node" and "could not be reached" in fault.first.text
    job.check_every_row_counted_once(attempts=2)


@pytest.mark.soak
@pytest.mark.parametrize(("peers", "lost"), [("copy", (3,)), ("copy", (1, 3)), ("3+1", (3,)), ("3+1", (2, 3))])
def test_of_four_nodes_one_is_restored_from_the_others_and_two_of_a_group_from_storage(
    tmp_path: Path, peers: str, lost: tuple[int, ...]
) -> None:
    job = ClusterJob(tmp_path / "job", rows=160 if peers == "copy" else 960)
    job.environment["FSDP"] = "1"
    with several_nodes(4) as nodes:
        for number, node in enumerate(nodes):
            start(node, nodes, job, count="4", own=own(job, f"memory-{number}", peers))
        job.wait_for_steps(20 if peers == "copy" else 60)
        for number in lost:
            nodes[number].kill()
            shutil.rmtree(job.folder / f"memory-{number}")
        job.hurry()
        for number in lost:
            start(nodes[number], nodes, job, count="4", own=own(job, f"fresh-{number}", peers))
        wait(lambda: all(node.statuses()[-1] is not None for node in nodes), job.text)
        assert [node.statuses()[-1] for node in nodes] == [0] * 4, job.text()
    job.check_every_row_counted_once(attempts=2)
    if len(lost) == 1:
        report(f"one of four nodes, {peers}", job, most_again=1 if peers == "copy" else 20)
        return
    after = [one for one in map(json.loads, (job.folder / "restored.jsonl").read_text().splitlines()) if one["attempt"]]
    assert [one["captured"] for one in after] == [None] * 4
    assert all("no node holds what rank" in one["passed_over"][0] for one in after if one["rank"] == 0), after


def run_of(job: ClusterJob) -> tuple[LocalStorage, History]:
    """The storage of the job's run, and its history."""
    storage = LocalStorage(job.folder / "run")
    return storage, read_history(storage)


def report(case: str, job: ClusterJob, most_again: int = 1) -> None:
    """Print how many steps were done again, and what was read from where. Parity is made about once in a second."""
    restored, finished = (
        list(map(json.loads, (job.folder / f"{name}.jsonl").read_text().splitlines()))
        for name in ("restored", "finished")
    )
    first, second = sorted({one["attempt"] for one in finished})
    after = [one for one in restored if one["attempt"] == second]
    again = max(one["step"] for one in finished if one["attempt"] == first) - after[0]["step"]
    read = {one["rank"]: one["read"] for one in after}
    print(f"\n{case}: steps done again: {again}; bytes that each rank read: {read}")
    assert again <= most_again and all(one["captured"] == one["step"] for one in after), after
    assert all(one["read"] and "storage" not in one["read"] for one in after), after
