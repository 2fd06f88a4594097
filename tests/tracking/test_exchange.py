"""Messages between real processes over gloo, through node leaders; and what the others hear when a rank is gone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lakeckpt.errors import MissingRanksError, TrackingError
from lakeckpt.tracking.exchange import GlooExchange, Solo, this_node
from tests.patience import PATIENCE_S
from tests.tracking.processes import run_processes

TIMEOUT = timedelta(seconds=PATIENCE_S)


def union(messages: Sequence[bytes]) -> bytes:
    return np.sort(np.frombuffer(b"".join(messages), np.uint8)).tobytes()


def refuse_twins(messages: Sequence[bytes]) -> bytes:
    found = union(messages)
    if len(set(found)) != len(found):
        raise TrackingError("a number came twice")
    return found


def talk(rank: int, world_size: int, folder: str, nodes: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    exchange = GlooExchange(timeout_s=PATIENCE_S, node=nodes[rank].encode() * 16)
    found: list[Any] = [(exchange.rank, exchange.world_size), exchange.combine(bytes([10 + rank]), union)]
    large = exchange.combine(bytes([rank]) * 3_000_000, union)
    found.append(large == b"".join(bytes([one]) * 3_000_000 for one in range(world_size)))
    try:
        exchange.combine(bytes([min(rank, world_size - 2)]), refuse_twins)
    except TrackingError as error:
        found.append(f"{type(error).__name__}: {error}")
    if rank == 0:
        exchange.publish("note", b"\x00later")
    found.append(exchange.fetch("note"))
    assert exchange.peek("note") == found[-1] and exchange.peek("another note") is None
    exchange.close()
    exchange.close()
    Path(folder, f"{rank}.txt").write_text(repr(found))
    dist.destroy_process_group()


@pytest.mark.parametrize("nodes", ["aaa", "aba", "aabb", "abcd"])
def test_every_rank_hears_the_merge_the_refusal_and_the_note(nodes: str, tmp_path: Path) -> None:
    world_size = len(nodes)
    run_processes(world_size, talk, world_size, str(tmp_path), nodes)
    every = bytes(range(10, 10 + world_size))
    for rank in range(world_size):
        told = [(rank, world_size), every, True, "TrackingError: a number came twice", b"\x00later"]
        assert (tmp_path / f"{rank}.txt").read_text() == repr(told)


def talk_with_a_dead_rank(rank: int, world_size: int, folder: str, nodes: str, dead: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    exchange = GlooExchange(timeout_s=PATIENCE_S, node=nodes[rank].encode() * 16)
    exchange.combine(b"x", union)
    if rank == dead:
        os._exit(0)
    try:
        exchange.combine(b"x", union)
    except MissingRanksError as error:
        Path(folder, f"{rank}.txt").write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize(
    ("nodes", "dead", "named"), [("aab", 1, "rank 1 "), ("abb", 1, "ranks 1-2 "), ("aab", 2, "rank 2 ")]
)
def test_a_dead_rank_is_named_to_all_others(nodes: str, dead: int, named: str, tmp_path: Path) -> None:
    """A leader that dies takes its node with it: its ranks cannot be heard."""
    run_processes(3, talk_with_a_dead_rank, 3, str(tmp_path), nodes, dead)
    for rank in {0, 1, 2} - {dead}:
        told = (tmp_path / f"{rank}.txt").read_text()
        its_leader_died = nodes[rank] == nodes[dead] and nodes.index(nodes[dead]) == dead
        assert ("rank 1 " if its_leader_died else named) in told


def talk_with_a_silent_rank(rank: int, folder: str, nodes: str, silent: int, waits: int, times: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3, timeout=TIMEOUT)
    exchange = GlooExchange(timeout_s=2.0, node=nodes[rank].encode() * 16)
    notes = dist.distributed_c10d.PrefixStore("test", dist.distributed_c10d._get_default_store())
    told = []
    for _ in range(times):
        if rank == silent:
            notes.wait(["waited"], TIMEOUT)
        try:
            exchange.combine(b"too late", union)
        except MissingRanksError as error:
            told.append(str(error))
        if rank == waits:
            notes.set("waited", "")
        dist.barrier()
        assert exchange.combine(bytes([10 + rank]), union) == bytes([10, 11, 12])
        dist.barrier()
        notes.delete_key("waited")
        dist.barrier()
    Path(folder, f"{rank}.txt").write_text("\n".join(told))
    exchange.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("nodes", "silent", "waits", "times", "named"),
    [
        ("aaa", 1, 0, 3, "rank 1"),
        ("abb", 2, 1, 1, "rank 2"),
        ("aba", 1, 0, 1, "rank 1"),
        ("aab", 0, 2, 1, "ranks 0-1"),
    ],
)
def test_a_rank_that_was_silent_for_too_long_is_named_to_all_and_heard_again(
    nodes: str, silent: int, waits: int, times: int, named: str, tmp_path: Path
) -> None:
    """For a leader that is silent, so are those of its node."""
    run_processes(3, talk_with_a_silent_rank, str(tmp_path), nodes, silent, waits, times)
    for rank in range(3):
        told = (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert [one[: one.index(" did not report")] for one in told] == [named] * times


def talk_after_a_death(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3, timeout=TIMEOUT)
    exchange = GlooExchange(timeout_s=2.0, node=b"a" * 16)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    for _ in range(3):
        with pytest.raises(MissingRanksError, match=r"^rank 1 did not report"):
            exchange.combine(b"x", union)
    os._exit(0)


def test_a_dead_rank_is_named_however_often_the_others_connect_again(tmp_path: Path) -> None:
    run_processes(3, talk_after_a_death, str(tmp_path))


def talk_again(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3, timeout=TIMEOUT)
    some = dist.new_group([0, 2])
    for number in range(3 if rank != 1 else 0):
        exchange = GlooExchange(some, timeout_s=PATIENCE_S)
        assert exchange.combine(bytes([10 * number + rank]), union) == bytes([10 * number, 10 * number + 2])
        exchange.close()
    dist.barrier()
    dist.destroy_process_group()


def test_some_ranks_talk_again_after_they_had_closed(tmp_path: Path) -> None:
    """torch names a group by its ranks, and by how many groups there are: the next one must not find the last one's."""
    run_processes(3, talk_again, str(tmp_path))


def start_again(rank: int, port: int, start: int) -> None:
    """Be a rank of a job that was started by what keeps the store; its first start leaves a note."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    exchange = GlooExchange(timeout_s=PATIENCE_S)
    if start == 0 and rank == 0:
        exchange.publish("note", b"of the first start")
    elif start == 0:
        assert exchange.fetch("note") == b"of the first start"
    else:
        assert not exchange._store.check(["note"])  # `fetch` would wait for one of this start
    dist.barrier()
    os._exit(0)


def test_ranks_that_are_started_again_on_one_store_read_no_note_of_those_that_died() -> None:
    """As under torchrun with ``--max-restarts``, whose store stays. Torch's own keys are removed here: its ranks may
    take the addresses of dead ones for those of the living."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    for start in range(2):
        run_processes(2, start_again, store.port, start)
        for key in [key for key in store.list_keys() if "lakeckpt/" not in key]:
            store.delete_key(key)


def test_ranks_that_cannot_connect_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr(dist, "new_group", refuse)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 3)
    with pytest.raises(TrackingError, match=r"rank 3 .*connectFullMesh failed.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        GlooExchange()


def test_a_job_of_one_talks_to_itself() -> None:
    solo = Solo()
    assert solo.combine(b"ab", union) == b"ab"
    solo.publish("k", b"v")
    assert solo.fetch("k") == b"v" == solo.peek("k") and solo.peek("another") is None
    solo.close()


def test_this_node_is_the_same_in_every_process_of_it() -> None:
    assert len(this_node()) == 16
    assert this_node() == this_node()
