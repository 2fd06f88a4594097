"""The command of docs/how-to/several-nodes.md on two nodes, which are network namespaces: all of one node dies."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.system.cluster_job import ClusterJob, block_of, wait
from tests.system.namespaces import Node, two_nodes


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with two_nodes() as pair:
        yield pair


def start(
    node: Node,
    nodes: Sequence[Node],
    job: ClusterJob,
    *,
    count: str,
    host: int = 0,
    ranks: int = 1,
    own: Mapping[str, str] | None = None,
) -> None:
    """Run the page's command on ``node``; the node of number ``host`` has the rendezvous. The nodes have no names, but
    addresses. ``own``: more of its environment; ``ranks``: how many processes it runs."""
    command = block_of("several-nodes.md", "bash").replace("\\\n", " ").replace("node1:", f"{nodes[host].address}:")
    setting, *words = shlex.split(command)
    name, value = setting.split("=")
    is_host = str(node is nodes[host]).lower()
    given = {
        "--nnodes": count,
        "--nproc-per-node": str(ranks),
        "--local-addr": node.address,
        "--rdzv-conf": f"is_host={is_host},last_call_timeout=5,keep_alive_interval=1",
    }
    options = [*words[:-1], *(f"{name}={value}" for name, value in given.items())]
    node.start([*options, words[-1]], folder=job.folder, environment={**job.environment, name: value, **(own or {})})


def test_a_node_dies_and_comes_back_and_every_row_counts_once(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    job = ClusterJob(tmp_path / "job")
    for node in nodes:
        start(node, nodes, job, count="2")
    job.wait_for_steps(9)
    nodes[1].kill()
    job.hurry()
    start(nodes[1], nodes, job, count="2")
    wait(lambda: all(node.statuses()[-1] is not None for node in nodes), job.text)
    assert [node.statuses()[-1] for node in nodes] == [0, 0], job.text()
    job.check_every_row_counted_once(attempts=2)


def test_a_node_does_not_come_back_and_the_other_one_goes_on_alone(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    job = ClusterJob(tmp_path / "job")
    for node in nodes:
        start(node, nodes, job, count="1:2")
    job.wait_for_steps(9)
    nodes[1].kill()
    job.hurry()
    wait(lambda: nodes[0].statuses()[-1] is not None, job.text)
    assert nodes[0].statuses() == [0], job.text()
    job.check_every_row_counted_once(attempts=2)
