"""Replicas on one node capture a share of their state each: what is restored, from memory or storage, is the whole."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.arena import dividing
from lakeckpt.checkpoint.async_save import Background
from lakeckpt.checkpoint.capture import plan
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.restore.restorer import RestoreReport
from lakeckpt.checkpoint.state import tensors
from lakeckpt.errors import CaptureWarning, ReplicasDiffer
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.agent.rig import take_checksums
from tests.checkpoint.capturing.reading import bytes_of
from tests.checkpoint.rig import EventWaiter, HubExchange, MemoryStorage, Reader, good, manager, run_ranks
from tests.patience import PATIENCE_S
from tests.tracking.processes import run_processes


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "_LARGE_BYTES", 2000)
    monkeypatch.setattr(plan, "kept_alike", lambda _: True)  # ranks that are threads have no DDP


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    step: int
    restored: dict[str, bytes]
    report: RestoreReport | None
    reached: dict[str, bytes]
    arena_bytes: int
    copied: int
    failed: str


class Net(torch.nn.Module):
    def __init__(self, seed: int, rank: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(64, 63)
        self.second = torch.nn.Linear(63, 5)
        self.register_buffer("seen", torch.full((3,), float(rank)))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.relu(self.first(data)))
        return found


def tensors_of(objects: dict[str, Any]) -> dict[str, bytes]:
    found = {key: bytes_of(one) for key, one in objects["model"].state_dict().items()}
    for number, state in objects["optimizer"].state_dict()["state"].items():
        found |= {f"{number} {key}": bytes_of(one) for key, one in state.items()}
    return found


def job(
    storage: MemoryStorage,
    folders: list[Path],
    *,
    steps: int,
    seed: int = 0,
    saves_at: tuple[int, ...] = (),
    drifts_at: int = 0,
    seeds: list[int] | None = None,
) -> list[Came]:
    """Train replicas for so many steps, all captured; then they die. Rank 1 drifts before step ``drifts_at``."""
    waiter, savers = EventWaiter(storage), []
    barrier = threading.Barrier(len(folders))

    def body(rank: int, exchange: HubExchange) -> Came:
        exchange.neighbours = tuple(other for other, folder in enumerate(folders) if folder == folders[rank])
        with made:
            model = Net(seed if seeds is None else seeds[rank], rank)
        optimizer = torch.optim.Adam(model.parameters())
        objects = {"model": model, "optimizer": optimizer, "reader": Reader(rank=rank, world_size=len(folders))}
        options: dict[str, Any] = {"capture_every": 1, "arenas": folders[rank], "timeout_s": PATIENCE_S}
        saver = manager(storage, objects, exchange=exchange, waiter=waiter, **options)
        savers.append(saver)
        step, restored, batches = saver.restore(), tensors_of(objects), iter(objects["reader"])
        for number in range(1, steps + 1):
            next(batches)
            for at, one in enumerate(model.parameters()):
                one.grad = torch.full_like(one, float(number + at))
            if number == drifts_at and rank == 1:
                model.second.weight.data += 1
            optimizer.step()
            saver.step()
            assert isinstance(saver._saves, Background)
            saver._saves._engine.wait()
            barrier.wait(PATIENCE_S)
            if number in saves_at:
                try:
                    saver.save()
                except ReplicasDiffer as error:
                    failed.append(str(error))
        arena = saver._saves._engine._store.arena
        return Came(
            step=step,
            restored=restored,
            report=saver.restore_report,
            reached=tensors_of(objects),
            arena_bytes=0 if arena is None else arena.layout.data_bytes,
            copied=saver._counters.beside_bytes + saver._counters.fence_bytes,
            failed=failed[-1] if failed else "",
        )

    made, failed = threading.Lock(), list[str]()
    found: list[Came] = good(run_ranks(len(folders), body, waiters=[waiter]))
    for saver in savers:
        saver._saves._engine.close()
    for folder in set(folders):
        take_checksums(folder)
    return found


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
@pytest.mark.parametrize("start", [0, 3])
def test_a_device_sums_all_bytes_of_a_tensor(size: int, start: int) -> None:
    data = torch.randint(0, 256, (size + start,), dtype=torch.uint8)[start:]
    whole = data.numpy().tobytes() + bytes(-size % 8)
    right = sum(int.from_bytes(whole[at : at + 8], "little") for at in range(0, len(whole), 8)) % 2**64
    assert tensors._sums_on_devices([data]) == [right]


def test_only_what_ddp_keeps_alike_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alike(torch.nn.Module):
        """DDP needs a process group."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    monkeypatch.undo()
    monkeypatch.setattr(plan, "DDP", Alike)
    inner, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model, average = Alike(inner), torch.optim.swa_utils.AveragedModel(inner)
    trains = torch.optim.SGD(inner.parameters(), lr=0.1)
    assert plan.kept_alike({"model": model, "optimizer": trains, "average": average})
    assert plan.kept_alike({"model": model})
    assert not plan.kept_alike({"model": inner, "optimizer": trains})
    assert not plan.kept_alike({"model": model, "other": other, "both": torch.optim.SGD(other.parameters(), lr=0.1)})
    assert not plan.kept_alike({"optimizer": trains})


def without_buffers(state: dict[str, bytes]) -> dict[str, bytes]:
    return {key: one for key, one in state.items() if key != "seen"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_replica_captures_a_share_and_memory_restores_the_whole(tmp_path: Path, ranks: int) -> None:
    storage = MemoryStorage()
    (alone,) = job(MemoryStorage(), [tmp_path / "alone"], steps=6)
    before = job(storage, [tmp_path / "node"] * ranks, steps=6)
    early = 2**16  # the zone of tensors that are copied at the cut
    assert sum(one.arena_bytes - early for one in before) < 1.2 * (alone.arena_bytes - early)
    after = job(storage, [tmp_path / "node"] * ranks, steps=3, seed=9)
    assert [one.step for one in after] == [6] * ranks
    assert [one.restored for one in after] == [one.reached for one in before]
    assert all(one.report is not None and one.report.captured == 6 for one in after)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 4), (4, 2), (2, 4), (2, 1)])
@pytest.mark.parametrize("tier", ["memory", "storage"])
def test_any_number_of_ranks_restores_it_from_memory_and_from_storage(
    tmp_path: Path, before: int, after: int, tier: str
) -> None:
    storage = MemoryStorage()
    saves_at = (5,) if tier == "storage" else ()
    first = job(storage, [tmp_path / "a"] * before, steps=5, saves_at=saves_at)
    assert [one.failed for one in first] == [""] * before
    second = job(storage, [tmp_path / ("a" if tier == "memory" else "b")] * after, steps=1, seed=9)
    assert [one.step for one in second] == [5] * after
    for rank, one in enumerate(second):
        assert without_buffers(one.restored) == without_buffers(first[rank % before].reached)
        assert one.report is not None and (one.report.captured == 5) == (tier == "memory")
    if tier == "storage":
        assert verify(storage).every_damage == ()


def test_ranks_that_begin_differently_are_captured_undivided(tmp_path: Path) -> None:
    storage = MemoryStorage()
    before = job(storage, [tmp_path] * 2, steps=4, seeds=[1, 2])
    assert before[0].reached != before[1].reached
    after = job(storage, [tmp_path] * 2, steps=1, seed=9)
    assert [one.restored for one in after] == [one.reached for one in before]


def test_two_nodes_hold_the_whole_each(tmp_path: Path) -> None:
    storage, nodes = MemoryStorage(), [tmp_path / "a"] * 2 + [tmp_path / "b"] * 2
    before = job(storage, nodes, steps=5, saves_at=(3,))
    after = job(storage, nodes, steps=1, seed=9)
    assert [one.restored for one in after] == [one.reached for one in before]
    assert verify(storage).every_damage == ()


@pytest.mark.filterwarnings("ignore::lakeckpt.errors.CaptureWarning")
def test_a_replica_that_drifts_is_named_and_nothing_is_divided_from_then_on(tmp_path: Path) -> None:
    storage = MemoryStorage()
    before = job(storage, [tmp_path] * 2, steps=9, saves_at=(4, 6), drifts_at=3)
    for one in before:
        assert "model/second.weight" in one.failed and "rank 1" in one.failed
        assert "From now on each rank captures all of its state" in one.failed
    assert before[0].reached != before[1].reached and verify(storage).every_damage == ()
    after = job(storage, [tmp_path] * 2, steps=1, seed=9)
    assert [one.step for one in after] == [9, 9]
    assert [one.restored for one in after] == [one.reached for one in before]


@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_that_drift_apart_between_saves_are_named_and_captured_undivided(tmp_path: Path, ranks: int) -> None:
    storage = MemoryStorage()
    with pytest.warns(CaptureWarning) as caught:
        before = job(storage, [tmp_path] * ranks, steps=14, drifts_at=3)
    texts = {str(one.message) for one in caught}
    assert len(caught) == ranks
    assert any("'model/second.weight' of the ranks 0 and 1" in one and "at step 3" in one for one in texts)
    after = job(storage, [tmp_path] * ranks, steps=1, seed=9)
    assert [one.step for one in after] == [14] * ranks
    assert [one.restored for one in after] == [one.reached for one in before]
    assert before[0].reached != before[1].reached


@pytest.mark.filterwarnings("ignore::lakeckpt.errors.CaptureWarning")
def test_memory_of_replicas_that_drifted_apart_is_passed_over(tmp_path: Path) -> None:
    storage = MemoryStorage()
    job(storage, [tmp_path] * 2, steps=6, drifts_at=5)
    after = job(storage, [tmp_path] * 2, steps=1, seed=9)
    right = job(MemoryStorage(), [tmp_path / "right"] * 2, steps=4)
    assert [one.step for one in after] == [4, 4]
    assert [one.restored for one in after] == [one.reached for one in right]
    for one in after:
        assert one.report is not None
        assert [text.partition(": ")[2] for text in one.report.passed_over] == [
            "the ranks had replicas that had drifted apart: rank 0, others than rank 1"
        ] * 2


def state_text(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    whole = tensors_of({"model": model, "optimizer": optimizer})
    return repr(sorted((key, short_digest(one).hex()) for key, one in whole.items()))


def train(rank: int, world_size: int, folder: str, attempt: int, kill: bool) -> None:
    """Train with DDP over gloo; each rank is killed after its sixth step, if ``kill``."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet{attempt}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size)
    net = Net(attempt, 0)
    model, optimizer = DistributedDataParallel(net), torch.optim.AdamW(net.parameters())
    objects = {"model": model, "optimizer": optimizer}
    options: dict[str, Any] = {"persist_every": 4, "capture_every": 1, "arenas": f"{folder}/arenas"}
    with CheckpointManager(f"{folder}/run", objects, timeout_s=PATIENCE_S, **options) as saver:
        step = saver.restore()
        Path(folder, f"restored.{rank}").write_text(f"{step} {state_text(net, optimizer)}")
        while step < (6 if kill else 8):
            torch.manual_seed(100 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            saver.step()
            step += 1
            assert isinstance(saver._saves, Background) and saver._saves._engine.planner.divided
            Path(folder, f"reached.{step}.{rank}").write_text(f"{step} {state_text(net, optimizer)}")
            saver._saves._engine.wait()
        dist.barrier()
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_job_of_ddp_that_is_killed_goes_on_bitwise(tmp_path: Path, ranks: int) -> None:
    run_processes(ranks, train, ranks, str(tmp_path), 1, True, ends=[-signal.SIGKILL] * ranks)
    run_processes(ranks, train, ranks, str(tmp_path), 2, False)
    for rank in range(ranks):
        restored = (tmp_path / f"restored.{rank}").read_text()
        assert restored.startswith("6 ")
        assert restored == (tmp_path / f"reached.6.{rank}").read_text()
    assert verify(LocalStorage(tmp_path / "run")).every_damage == ()
