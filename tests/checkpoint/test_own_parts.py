"""On as many ranks as saved it, a rank reads the parts of a checkpoint that hold what it had, and those of all only
where it wants more."""

from __future__ import annotations

import warnings
from collections import Counter as Counts
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lakeckpt.checkpoint.restore.from_storage as load_module
from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.format.fields import holds
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import PartRecord
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.checkpoint.persist.log import put_entry
from lakeckpt.checkpoint.restore.from_storage import fetch_parts, load, load_from, load_own
from lakeckpt.errors import CheckpointDamaged, DamageWarning
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import (
    Counter,
    EventWaiter,
    HubExchange,
    MemoryStorage,
    changed,
    good,
    manager,
    run_ranks,
    with_parts,
)
from tests.checkpoint.test_ranks import parts_of
from tests.tracking.processes import run_processes


class Watched(MemoryStorage):
    """Counts the parts that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_parts: Counts[str] = Counts()

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        self.read_parts[path] += path.startswith("parts/") and not path.endswith("register.lkc")
        return super().read(path, start, stop, etag=etag)


def objects_of(rank: int, value: float) -> dict[str, Any]:
    """A weight that all ranks have alike, one that every second rank has, and one of each rank's own."""
    return {
        "all": Counter(torch.full((300,), value)),
        "half": Counter(torch.full((20,), value + rank % 2)),
        "own": Counter(torch.full((9,), value + rank)),
    }


def saved(world_size: int) -> Watched:
    storage = Watched()
    waiter = EventWaiter(storage)

    def save(rank: int, exchange: HubExchange) -> None:
        for step in (1, 2):
            objects = objects_of(rank, 0.0)
            saver = manager(storage, objects, exchange=exchange, waiter=waiter)
            saver.restore()
            for name, one in objects_of(rank, float(step)).items():
                objects[name].value = one.value
            saver.step()
            saver.save()

    good(run_ranks(world_size, save, waiters=[waiter]))
    return storage


def restored(storage: Watched, world_size: int) -> list[Any]:
    waiter = EventWaiter(storage)

    def restore(rank: int, exchange: HubExchange) -> Any:
        objects = objects_of(rank, -9.0)
        loader = manager(storage, objects, exchange=exchange, waiter=waiter)
        loader.restore()
        return [float(one.value[0]) - value for one, value in zip(objects.values(), (0, rank % 2, rank), strict=True)]

    return good(run_ranks(world_size, restore, waiters=[waiter]))


def manifest_of(storage: MemoryStorage | LocalStorage) -> Manifest:
    tip = read_history(storage).tip
    assert tip is not None
    return tip


def rewritten(storage: MemoryStorage, rank: int, **changes: Any) -> None:
    """Another record in the place of the newest part of ``rank``, and a manifest that says so."""
    manifest = manifest_of(storage)
    part = replace(PartRecord.from_bytes(storage.objects[manifest.save.part_path(rank)]), **changes)
    manifest = with_parts(storage, manifest, {rank: part.to_bytes()})
    put_entry(storage, replace(manifest, slot=manifest.slot + 1))


def test_a_rank_reads_the_parts_that_hold_its_state_and_no_others() -> None:
    storage = saved(12)
    parts = parts_of(storage)[-12:]
    for part in parts:
        units = [(one.rank, unit.ranks) for one in parts for unit in (*one.tensors, *one.trees)]
        held = {owner for owner, ranks in units if holds(ranks, part.rank)}
        assert part.outline is not None
        assert {rank for rank in range(12) if holds(part.outline.elsewhere, rank)} == held - {part.rank}
        assert part.outline.different == ("tensor:half/value", "tensor:own/value")
    storage.read_parts.clear()
    assert restored(storage, 12) == [[2.0, 2.0, 2.0]] * 12
    elsewhere = [part.outline.elsewhere for part in parts if part.outline is not None]
    assert storage.read_parts.total() == 12 + sum(stop - start for ranks in elsewhere for start, stop in ranks) < 12 * 7


@pytest.mark.filterwarnings("ignore::lakeckpt.errors.DamageWarning")
@pytest.mark.parametrize("rank", [0, 3])
def test_a_part_that_is_damaged_is_noticed_by_the_rank_that_it_is_of(rank: int) -> None:
    storage = saved(4)
    path = manifest_of(storage).save.part_path(rank)
    storage.objects[path] = changed(storage.objects[path])
    assert restored(storage, 4) == [[1.0, 1.0, 1.0]] * 4


@pytest.mark.filterwarnings("ignore::lakeckpt.errors.DamageWarning")
def test_every_file_is_read_by_some_rank() -> None:
    storage = saved(4)
    for path in [one for one in storage.objects if one.startswith("objects/")][-4:]:
        whole = storage.objects[path]
        storage.objects[path] = whole[:-1] + bytes([whole[-1] ^ 1])
        assert restored(storage, 4) == [[1.0, 1.0, 1.0]] * 4, path
        storage.objects[path] = whole
        for slot in [one for one in storage.objects if one.startswith("log/")][5:]:  # those of the restore
            del storage.objects[slot]
    assert restored(storage, 4) == [[2.0, 2.0, 2.0]] * 4


def test_a_part_that_names_too_few_or_none_has_all_read() -> None:
    storage = saved(4)
    manifest = manifest_of(storage)
    full = load_from(storage, manifest, fetch_parts(storage, manifest), rank=2, world_size=4)
    own = load_own(storage, manifest, rank=2)
    assert own is not None and own.specs == full.specs and own.trees == full.trees
    outline = parts_of(storage)[-2].outline
    assert outline is not None and outline.units == len(own.specs) + 3
    others = [replace(outline, elsewhere=()), replace(outline, elsewhere=((9, 10),)), replace(outline, units=1)]
    for wrong in (None, *others):
        rewritten(storage, 2, outline=wrong)
        assert load_own(storage, manifest_of(storage), rank=2) is None
        assert load(storage, manifest_of(storage), rank=2, world_size=4).specs == full.specs
    storage.objects[manifest_of(storage).save.part_path(2)] = b"none"
    assert load_own(storage, manifest_of(storage), rank=2) is None
    with pytest.raises(CheckpointDamaged):
        load(storage, manifest_of(storage), rank=2, world_size=4)


def placed(rank: int, world_size: int, folder: str) -> None:
    """Weights come back in any placement; those of all ranks are asked for only where it is another."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    weight = torch.arange(54.0).reshape(9, 6)

    class Held:
        def __init__(self, placement: Any, values: torch.Tensor) -> None:
            self.it = distribute_tensor(values, mesh, [placement])

        def state_dict(self) -> dict[str, Any]:
            return {"it": self.it}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.it = state["it"]

    def objects(placement: Any, values: torch.Tensor) -> dict[str, Any]:
        module = torch.nn.Module()
        module.it = torch.nn.Parameter(distribute_tensor(values, mesh, [placement]))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.5)
        return {"module": module, "optimizer": optimizer, "held": Held(placement, values)}

    first = objects(Shard(0), weight)
    first["module"].it.grad = first["module"].it.detach() + 1
    first["optimizer"].step()
    with CheckpointManager(f"{folder}/run", first) as saver:
        saver.restore()
        saver.step()
    of_all = []
    whole_load = load_module.load_from
    load_module.load_from = lambda *args, **options: of_all.append(1) or whole_load(*args, **options)
    for placement in (Shard(0), Shard(1), Replicate()):
        of_all.clear()
        again = objects(placement, torch.zeros(9, 6))
        CheckpointManager(LocalStorage(f"{folder}/run"), again).restore()
        (state,) = again["optimizer"].state.values()
        for one, values in (
            (again["module"].it, weight),
            (state["momentum_buffer"], weight + 1),
            (again["held"].it, weight),
        ):
            assert isinstance(one, DTensor) and one.placements == (placement,)
            assert torch.equal(one.full_tensor(), values)
        assert len(of_all) == (placement != Shard(0))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_divided_otherwise_is_taken_from_the_parts_of_all(world_size: int, tmp_path: Path) -> None:
    run_processes(world_size, placed, world_size, str(tmp_path))


def damaged_and_placed_otherwise(rank: int, world_size: int, folder: str) -> None:
    """Damage to the part of one rank, which the others read only because they divide weights otherwise now."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    storage = LocalStorage(f"{folder}/run")

    def module(placement: Any, value: float) -> torch.nn.Module:
        made = torch.nn.Module()
        made.it = torch.nn.Parameter(distribute_tensor(torch.full((6, 6), value), mesh, [placement]))
        return made

    first = module(Shard(0), 0.0)
    saver = CheckpointManager(storage, {"module": first})
    saver.restore()
    for value in (1.0, 2.0):
        torch.nn.init.constant_(first.it, value)
        saver.step()
        saver.save()
    saver.close()
    dist.barrier()
    if rank == 0:
        path = manifest_of(storage).save.part_path(2)  # not where the tree is, which all read
        storage.put(path, [changed(storage.read(path))])
    dist.barrier()
    again = module(Shard(1), 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        loader = CheckpointManager(storage, {"module": again})
        assert loader.restore() == 1
        loader.close()
    assert torch.equal(again.it.full_tensor(), torch.full((6, 6), 1.0))
    dist.barrier()
    dist.destroy_process_group()


def test_damage_that_ranks_find_as_they_compare_has_them_take_the_checkpoint_before(tmp_path: Path) -> None:
    run_processes(3, damaged_and_placed_otherwise, 3, str(tmp_path))


def without_elements(rank: int, world_size: int, folder: str, done: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{done}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    module = torch.nn.Module()
    for name, shape in (("none", (0, 5)), ("some", (4, 6))):
        values = torch.full(shape, 1.0 - done)
        module.register_parameter(name, torch.nn.Parameter(distribute_tensor(values, mesh, [Shard(0)])))
    with CheckpointManager(f"{folder}/run", {"module": module}) as saver:
        assert saver.restore() == done
        saver.step()
    assert torch.equal(module.some.full_tensor(), torch.ones(4, 6))
    dist.barrier()
    dist.destroy_process_group()


def test_a_weight_without_elements_that_ranks_share_is_restored_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    for done, world_size in enumerate((3, 2)):
        run_processes(world_size, without_elements, world_size, str(tmp_path), done)
