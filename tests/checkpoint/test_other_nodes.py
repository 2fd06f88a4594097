"""Ranks that come up on other nodes, or in another number, go on from memory if their nodes hold what they need."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.async_save import Background
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.restore.report import RestoreReport
from lakeckpt.errors import DamageWarning
from tests.checkpoint.agent.rig import take_checksums
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, Reader, good, manager, run_ranks
from tests.checkpoint.test_remembered import rows_recorded
from tests.patience import PATIENCE_S

ROWS = 10
"""How many rows a rank reads at a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """What a rank went on from, and what it came to."""

    step: int
    restored: str
    report: RestoreReport | None
    reached: str


def state_of(objects: dict[str, Any]) -> str:
    return str({name: one.state_dict() for name, one in objects.items() if name != "reader"})


def objects_of(seed: int, rank: int, world_size: int, own: bool) -> dict[str, Any]:
    weight = torch.full((3, 3), float(seed))
    buffer = torch.full((2,), float(rank if own else 0))
    module = torch.nn.Linear(3, 3, bias=False)
    module.weight.data.copy_(weight)
    module.register_buffer("seen", buffer)
    return {"model": module, "n": Counter(0), "reader": Reader(rank=rank, world_size=world_size)}


def job(
    storage: MemoryStorage,
    folders: list[Path],
    *,
    steps: int,
    seed: int,
    saves_at: int = 0,
    own: bool = False,
    skips: int = -1,
    peers: Literal[False] | None = None,
    in_step: bool = False,
) -> list[Came]:
    """Run a rank for each of ``folders``, its node's memory; it dies after so many ``steps``, all captured but
    the first one after an arena was made. ``own``: ranks have buffers of their own. ``skips``: the rank that skips a
    batch at its second step. ``in_step``: no rank is a step ahead of another, as after a collective."""
    waiter, savers = EventWaiter(storage), []
    barrier = threading.Barrier(len(folders) if in_step else 1)

    def body(rank: int, exchange: HubExchange) -> Came:
        objects = objects_of(seed, rank, len(folders), own)
        options: dict[str, Any] = {"capture_every": 1, "arenas": folders[rank], "timeout_s": PATIENCE_S, "peers": peers}
        saver = manager(storage, objects, exchange=exchange, waiter=waiter, **options)
        savers.append(saver)
        step, restored, batches = saver.restore(), state_of(objects), iter(objects["reader"])
        for number in range(1, steps + 1):
            batch = next(batches)
            if rank == skips and number == 2:
                saver.skip(batch)
            objects["model"].weight.data += 1
            objects["n"].value += 1
            saver.step()
            assert isinstance(saver._saves, Background)
            saver._saves._engine.wait()
            barrier.wait(PATIENCE_S)
            if number == saves_at:
                saver.save()
        return Came(step=step, restored=restored, report=saver.restore_report, reached=state_of(objects))

    found: list[Came] = good(run_ranks(len(folders), body, waiters=[waiter]))
    for saver in savers:
        saver._saves._engine.close()  # as the kernel does for a process that ends
    for folder in set(folders):
        take_checksums(folder)
    return found


def test_ranks_that_changed_their_nodes_go_on_from_the_replicas_there(tmp_path: Path) -> None:
    storage, nodes = MemoryStorage(), [tmp_path / "a", tmp_path / "b"]
    before = job(storage, nodes, steps=5, seed=0, saves_at=2)
    after = job(storage, nodes[::-1], steps=2, seed=9, saves_at=2)
    assert [one.step for one in after] == [5, 5]
    assert {one.restored for one in after} == {one.reached for one in before}
    assert all(one.report is not None and one.report.captured == 5 and one.report.checked for one in after)
    assert all(one.report is not None and not one.report.derived_random for one in after)  # these lie on the other node
    assert all(one.report is not None and one.report.read.keys() == {"own node"} for one in after)
    assert rows_recorded(storage) == [2 * 2 * ROWS, 5 * 2 * ROWS] and verify(storage).every_damage == ()


def test_a_rank_does_not_take_what_another_rank_has_of_its_own(tmp_path: Path) -> None:
    """It reads its own from the node that it was on before."""
    storage, nodes = MemoryStorage(), [tmp_path / "a", tmp_path / "b"]
    before = job(storage, nodes, steps=5, seed=0, saves_at=2, own=True)
    after = job(storage, nodes[::-1], steps=1, seed=9, own=True)
    assert [one.restored for one in after] == [one.reached for one in before]
    for one in after:
        assert one.step == 5 and one.report is not None and one.report.captured == 5 and one.report.checked
        assert one.report.read.keys() == {"other nodes"} and one.report.read["other nodes"] > 0


def test_nodes_that_open_no_socket_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    storage, nodes = MemoryStorage(), [tmp_path / "a", tmp_path / "b"]
    job(storage, nodes, steps=5, seed=0, saves_at=2, own=True)
    after = job(storage, nodes[::-1], steps=1, seed=9, own=True, peers=False)
    for one in after:
        assert one.step == 2 and one.report is not None and one.report.captured is None
        assert len(one.report.passed_over) == 3 and "step 5 of attempt 0: rank 0 on " in one.report.passed_over[0]
        assert "cannot read what rank 0 captured: only nodes without an address hold it" in one.report.passed_over[0]
        assert one.report.read.keys() == {"storage"}


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 1), (1, 2)])
@pytest.mark.parametrize("saves_at", [0, 1])
def test_another_number_of_ranks_on_a_node_goes_on_from_its_memory(
    tmp_path: Path, before: int, after: int, saves_at: int
) -> None:
    storage = MemoryStorage()
    first = job(storage, [tmp_path] * before, steps=3, seed=0, saves_at=saves_at, own=True)
    second = job(storage, [tmp_path] * after, steps=2, seed=9, own=True)
    assert [one.step for one in second] == [3] * after
    assert [one.restored for one in second] == [first[rank % before].reached for rank in range(after)]
    third = job(storage, [tmp_path] * after, steps=4, seed=9, saves_at=4, own=True)
    assert [one.step for one in third] == [5] * after
    assert [one.restored for one in third] == [one.reached for one in second]
    rows = [saves_at * before * ROWS, (3 - saves_at) * before * ROWS + 6 * after * ROWS]
    assert rows_recorded(storage) == rows[not saves_at :] and verify(storage).every_damage == ()
    worlds = {one.identity.world for one in ArenaFolder(tmp_path).found() if one.identity is not None}
    assert worlds == {after}, "two newer cuts are complete"


def test_what_ranks_excluded_is_on_record_after_another_number_of_ranks_went_on(tmp_path: Path) -> None:
    storage = MemoryStorage()
    job(storage, [tmp_path] * 2, steps=3, seed=0, skips=1)
    assert [one.step for one in job(storage, [tmp_path] * 3, steps=2, seed=9, saves_at=2)] == [3] * 3
    (commit,) = read_history(storage).chain
    excluded = commit.readers["reader"].excluded
    assert [(one.rank, one.step, sum(rows.size for rows in one.positions.values())) for one in excluded] == [
        (1, 2, ROWS)
    ]


def test_memory_of_other_ranks_stays_until_this_job_has_cuts_of_its_own(tmp_path: Path) -> None:
    storage = MemoryStorage()
    job(storage, [tmp_path] * 2, steps=3, seed=0)
    assert job(storage, [tmp_path], steps=0, seed=9)[0].step == 3
    (again,) = job(storage, [tmp_path], steps=2, seed=9)
    assert again.step == 3 and len(ArenaFolder(tmp_path).found()) == 3
    assert job(storage, [tmp_path] * 2, steps=0, seed=9)[0].step == 5


def test_fewer_nodes_go_on_where_all_ranks_were_alike_and_each_share_is_there(tmp_path: Path) -> None:
    storage, nodes = MemoryStorage(), [tmp_path / "a", tmp_path / "b"]
    before = job(storage, [nodes[0], nodes[0], nodes[1], nodes[1]], steps=3, seed=0)
    after = job(storage, nodes, steps=0, seed=9)
    assert [one.step for one in after] == [3, 3] and {one.restored for one in after} == {before[0].reached}


def test_a_share_that_is_damaged_is_not_read_by_another_number_of_ranks(tmp_path: Path) -> None:
    storage = MemoryStorage()
    job(storage, [tmp_path] * 2, steps=3, seed=0)
    weight = torch.full((3, 3), 3.0).numpy().tobytes()
    for path in tmp_path.glob("*.1-of-2.arena"):
        whole = path.read_bytes()
        path.write_bytes(whole.replace(weight, b"\xff" + weight[1:]))
    with pytest.warns(DamageWarning, match=r"memory/0:3: this cut is not restored from memory"):
        (after,) = job(storage, [tmp_path], steps=0, seed=9)
    assert after.step == 2 and after.report is not None
    assert after.report.passed_over[0].startswith("step 3 of attempt 0: ")
