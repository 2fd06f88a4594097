"""Parts of tensors of which several ranks hold replicas (HSDP, tensor parallelism beside data parallelism) are written
once, by one of them, and restored on as many ranks, on others, or on one."""

from __future__ import annotations

from collections import Counter as Counts
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.format.parts import PartRecord
from lakeckpt.checkpoint.format.sharing import is_part_key
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.restore.from_storage import load_own
from lakeckpt.convert import read_state
from lakeckpt.errors import TrackingError, UnsupportedValue
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.checkpoint.seams import manager_with
from tests.checkpoint.test_sharded import built, captured, fsdp, second, states, trained, with_optimizer
from tests.tracking.processes import run_processes


def hybrid(seed: int, world_size: int) -> dict[str, Any]:
    """HSDP: divided over two ranks, as often as there are such pairs."""
    objects = built(seed)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("copies", "parts"))
    for layer in objects["model"]:
        fully_shard(layer, mesh=mesh)
    fully_shard(objects["model"], mesh=mesh)
    return with_optimizer(objects)


def equal_groups(seed: int, world_size: int) -> dict[str, Any]:
    """Each pair of ranks divides its weights, and is a replica of the other pairs: its mesh knows of itself alone."""
    objects = built(seed)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("copies", "parts"))["parts"]
    for layer in objects["model"]:
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    return with_optimizer(objects)


def saved(rank: int, world_size: int, folder: str, sharding: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    objects = sharding(1, world_size)
    with CheckpointManager(f"{folder}/run", objects, persist_every=10**9) as saver:
        saver.restore()
        trained(objects)
        saver.step()
    said = states(objects)
    Path(folder, f"saved.{rank}").write_text(said)
    storage = LocalStorage(f"{folder}/run")
    tip = read_history(storage).tip
    assert tip is not None
    own = load_own(storage, tip, rank=rank)
    assert own is not None and own.of_all is not None
    fresh = sharding(2, world_size)
    trained(fresh, 1)
    assert CheckpointManager(f"{folder}/run", fresh).restore() == 1
    assert states(fresh) == said
    dist.barrier()
    dist.destroy_process_group()


def parts_in(folder: Path) -> list[PartRecord]:
    return [PartRecord.from_bytes(path.read_bytes()) for path in sorted((folder / "run" / "parts").rglob("0*.lkc"))]


@pytest.mark.parametrize("sharding", [hybrid, equal_groups])
def test_replicas_of_parts_are_written_once_and_restored_anywhere(sharding: Any, tmp_path: Path) -> None:
    run_processes(4, saved, 4, str(tmp_path), sharding)
    parts = parts_in(tmp_path)
    records = [one for part in parts for one in part.tensors if is_part_key(one.spec.key)]
    assert max(Counts(one.spec.key for one in records).values()) == 1
    assert {one.ranks for one in records} == {((0, 1), (2, 3)), ((1, 2), (3, 4))}
    shares = [sum(one.spec.size_bytes for one in part.tensors) for part in parts]
    assert min(shares) > 0.4 * max(shares)  # ranks that have the same share the work
    assert verify(LocalStorage(tmp_path / "run")).every_damage == ()
    alone = with_optimizer(built(5))
    if sharding is hybrid:
        assert CheckpointManager(tmp_path / "run", alone).restore() == 1
        assert states(alone) == (tmp_path / "saved.0").read_text()
        run_processes(3, second, 3, str(tmp_path), fsdp)
    assert read_state(tmp_path / "run")["model"].keys() == alone["model"].state_dict().keys()


@pytest.mark.parametrize("sharding", [hybrid, equal_groups])
def test_replicas_of_parts_are_captured_beside_training_and_restored_from_memory(sharding: Any, tmp_path: Path) -> None:
    run_processes(4, captured, 4, str(tmp_path), sharding)


def test_parts_without_elements_are_written_once_whoever_has_more_of_them(tmp_path: Path) -> None:
    """Of five rows, the last of four ranks has none, and of one row, three of them have none."""
    run_processes(4, saved, 4, str(tmp_path), fsdp)
    records = [one for part in parts_in(tmp_path) for one in part.tensors if is_part_key(one.spec.key)]
    assert max(Counts(one.spec.key for one in records).values()) == 1
    assert {one.ranks for one in records if not one.spec.size_bytes} == {((1, 4),), ((3, 4),)}


class Named:
    """An object that holds tensors."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = dict(state)


def outside(rank: int, world_size: int, folder: str) -> None:
    """The mesh is of the first two ranks: the others hold the same DTensors, and nothing of them."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    mesh = DeviceMesh("cpu", [0, 1])

    def held(value: float, *, number: bool) -> Named:
        tensors = {"matrix": torch.arange(8.0).view(4, 2) + value, "row": torch.arange(1.0) + value}
        divided: dict[str, Any] = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in tensors.items()}
        if number:
            divided["number"] = distribute_tensor(torch.tensor(value), mesh, [Replicate()])
        return Named(divided)

    def same(some: Named, others: Named) -> bool:
        mine, theirs = ([one.to_local() for one in each.tensors.values()] for each in (some, others))
        return all(one.numel() == 0 or torch.equal(one, other) for one, other in zip(theirs, mine, strict=True))

    with CheckpointManager(f"{folder}/run", {"held": held(1.0, number=False)}, persist_every=10**9) as saver:
        saver.restore()
        saver.step()
        saver.save()
        saver._objects["held"].tensors |= held(1.0, number=True).tensors
        saver.step()
        with pytest.raises(UnsupportedValue, match=r"held/number: this rank is not in the mesh|rank 2"):
            saver.save()
        del saver._objects["held"].tensors["number"]
        saver.step()
    found = held(5.0, number=False)
    assert CheckpointManager(f"{folder}/run", {"held": found}).restore() == 3
    assert same(found, held(1.0, number=False))
    options = {"persist_every": 10**9, "capture_every": 1, "arenas": f"{folder}/mem"}
    objects = with_optimizer(built(1)) | {"held": held(2.0, number=False)}
    first = manager_with(f"{folder}/captured", objects, **options)
    first.restore()
    for _ in range(3):
        trained(objects, 1)
        first.step()
        made = first._saves._engine.wait()
    assert made == 3, made
    found = held(5.0, number=False)
    second = manager_with(f"{folder}/captured", with_optimizer(built(2)) | {"held": found}, **options)
    assert second.restore() == 3 and second.restore_report.captured == 3
    assert same(found, held(2.0, number=False))
    second.close()
    first.close()
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_outside_of_the_mesh_of_a_tensor_saves_and_restores_that_it_has_nothing_of_it(tmp_path: Path) -> None:
    run_processes(3, outside, 3, str(tmp_path))
    assert verify(LocalStorage(tmp_path / "run")).every_damage == ()


def drifted(rank: int, world_size: int, folder: str) -> None:
    """Of two tensors in parts, the replicas of one are not the same any more: the first rank's part of it is another
    one than that of the third."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))

    class Held:
        def __init__(self, value: float) -> None:
            self.same, self.other = (
                DTensor.from_local(torch.full((3,), value + 10 * (rank % 2)), mesh, [Replicate(), Shard(0)])
                for _ in range(2)
            )

        def state_dict(self) -> dict[str, Any]:
            return {"same": self.same, "other": self.other}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.same, self.other = state["same"], state["other"]

    first = Held(1.0)
    if rank == 0:
        first.other.to_local().fill_(7.0)
    saver = CheckpointManager(f"{folder}/run", {"held": first}, persist_every=10**9)
    saver.restore()
    saver.step()
    with pytest.raises(TrackingError, match=r"rank 0 and rank 2 hold replicas of 'held/other::at 0 of 6', which must"):
        saver.save()
    first.other = first.same
    saver.step()
    assert saver.save().step == 2
    saver.close()
    dist.barrier()
    dist.destroy_process_group()


def test_replicas_inside_one_mesh_that_drifted_apart_are_refused_at_the_save_by_tensor_and_rank(tmp_path: Path) -> None:
    run_processes(4, drifted, 4, str(tmp_path))
    assert [one.step for one in read_history(LocalStorage(tmp_path / "run")).chain] == [2]
    assert verify(LocalStorage(tmp_path / "run")).every_damage == ()


def test_tensors_of_the_same_bytes_and_another_shape_or_dtype_are_each_ranks_own() -> None:
    """As zeros are, which the optimizers of two stages begin with under the same names."""
    storage = MemoryStorage()
    waiter = EventWaiter(storage)

    def objects_of(rank: int, value: int) -> dict[str, Any]:
        shapes, dtypes = ((4, 2), (2, 4))[rank], (torch.float32, torch.int32)[rank]
        return {
            "shape": Counter(torch.full(shapes, value)),
            "dtype": Counter(torch.full((4,), value, dtype=dtypes)),
            "both": Counter(torch.full((4,), value)),
        }

    def save(rank: int, exchange: HubExchange) -> None:
        saver = manager(storage, objects_of(rank, 0), exchange=exchange, waiter=waiter)
        saver.restore()
        saver.step()
        saver.save()

    def restore(rank: int, exchange: HubExchange) -> tuple[str, ...]:
        objects = objects_of(rank, 5)
        loader = manager(storage, objects, exchange=exchange, waiter=waiter)
        loader.restore()
        for name, expected in objects_of(rank, 0).items():
            found = objects[name].value
            assert torch.equal(found, expected.value) and found.dtype == expected.value.dtype
        return loader.restore_report.per_rank

    good(run_ranks(2, save, waiters=[waiter]))
    assert good(run_ranks(2, restore, waiters=[waiter])) == [("tensor:dtype/value", "tensor:shape/value")] * 2
