"""A state that is divided over ranks is saved in parts, and restored whole, on as many ranks, on others, or on one."""

from __future__ import annotations

import itertools
import os
import random
import signal
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import lakeckpt.checkpoint.state.loaded as loaded_module
from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.sharing import Sharing, Tiling, are_tiled, is_part_key, part_key, tilings_of, untiled
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.state.tensors import empty_for
from lakeckpt.checkpoint.state.tree import flatten
from lakeckpt.checkpoint.state.wholes import SavedPart, Whole, wholes_of
from lakeckpt.convert import read_state
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, UnsupportedValue
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import MemoryStorage, manager
from tests.tracking.processes import run_processes


def begin(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world_size}", rank=rank, world_size=world_size)


def built(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1))
    return {"model": model}


def with_optimizer(objects: dict[str, Any]) -> dict[str, Any]:
    return objects | {"optimizer": torch.optim.AdamW(objects["model"].parameters(), lr=0.1, foreach=False)}


def fsdp(seed: int, world_size: int) -> dict[str, Any]:
    objects = built(seed)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in objects["model"]:
        fully_shard(layer, mesh=mesh)
    fully_shard(objects["model"], mesh=mesh)
    return with_optimizer(objects)


def by_columns(seed: int, world_size: int) -> dict[str, Any]:
    """Weights divided by columns, the rest whole on every rank."""
    objects, mesh = built(seed), init_device_mesh("cpu", (world_size,))
    for layer in objects["model"]:
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    return with_optimizer(objects)


def trained(objects: dict[str, Any], steps: int = 2) -> None:
    for _ in range(steps):
        for parameter in objects["model"].parameters():
            parameter.grad = torch.ones_like(parameter) + parameter.detach()
        objects["optimizer"].step()


def whole(value: Any) -> Any:
    """With every DTensor put together: collective."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    return [whole(one) for one in value] if isinstance(value, list) else value


def states(objects: dict[str, Any]) -> str:
    return str({name: dict(whole(one.state_dict())) for name, one in objects.items()})


def first(rank: int, world_size: int, folder: str) -> None:
    begin(rank, world_size, folder)
    objects = fsdp(1, world_size)
    with CheckpointManager(f"{folder}/run", objects, persist_every=10**9) as saver:
        saver.restore()
        trained(objects)
        saver.step()
    Path(folder, f"saved.{rank}").write_text(states(objects))
    made: list[int] = []

    def counting(spec: TensorSpec) -> Any:
        made.append(spec.size_bytes)
        return empty_for(spec)

    assert loaded_module.empty_for is empty_for
    loaded_module.empty_for = counting
    fresh = fsdp(2, world_size)
    trained(fresh, 1)
    assert CheckpointManager(f"{folder}/run", fresh).restore() == 1
    assert states(fresh) == Path(folder, f"saved.{rank}").read_text()
    assert sum(made) == 0  # the parts that a rank has now are those that it saved: they were read in place
    dist.destroy_process_group()


def second(rank: int, world_size: int, folder: str, sharding: Any) -> None:
    begin(rank, world_size, folder)
    objects = sharding(4, world_size)
    with CheckpointManager(f"{folder}/run", objects, persist_every=10**9) as saver:
        done = saver.restore()
        assert states(objects) == Path(folder, "saved.0").read_text()
        trained(objects, 1)
        saver.step()
    if rank == 0:
        Path(folder, "saved.0").write_text(said := states(objects))
        Path(folder, "steps").write_text(str(done + 1))
        assert said
    else:
        states(objects)
    dist.destroy_process_group()


def test_parts_are_restored_on_as_many_ranks_on_others_otherwise_divided_and_on_one(tmp_path: Path) -> None:
    run_processes(2, first, 2, str(tmp_path))
    run_processes(3, second, 3, str(tmp_path), by_columns)
    objects = with_optimizer(built(5))
    assert CheckpointManager(tmp_path / "run", objects).restore() == 2
    assert states(objects) == (tmp_path / "saved.0").read_text()
    assert verify(LocalStorage(tmp_path / "run")).every_damage == ()
    assert str(dict(read_state(tmp_path / "run")["model"])) == str(dict(objects["model"].state_dict()))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1))
    other = CheckpointManager(tmp_path / "run", with_optimizer({"model": model}))
    with pytest.raises(
        CheckpointMismatch, match=r"0\.weight is float32 \[5, 7\] in the checkpoint and float32 \[7, 5\]"
    ):
        other.restore()


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_a_run_of_fsdp_goes_on_on_any_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    run_processes(2, first, 2, str(tmp_path))
    run_processes(world_size, second, world_size, str(tmp_path), fsdp)
    run_processes(5, second, 5, str(tmp_path), by_columns)


def captured(rank: int, world_size: int, folder: str, sharding: Any) -> None:
    begin(rank, world_size, folder)
    storage, options = (
        LocalStorage(f"{folder}/run"),
        {"persist_every": 10**9, "capture_every": 1, "arenas": f"{folder}/mem"},
    )
    objects, made = sharding(1, world_size), {}
    saver = CheckpointManager(storage, objects, **options)
    saver.restore()
    for step in range(1, 5):
        trained(objects, 1)
        made[step] = states(objects)
        saver.step()
        if step == 3:
            saver._saves._engine.wait()
    trained(objects, 1)  # while the last cut may still be under way
    assert saver._saves._engine.wait() == 4
    filled = sum(getattr(one, "to_local", lambda one=one: one)().numel() > 0 for one in objects["model"].parameters())
    # Parameters, moments and counts of steps hold nothing up. Parts without elements have no memory to wait for.
    late = saver._saves._engine.planner.late
    assert sum(one.numel() > 0 for one in late.values()) == 3 * filled + 6
    again = sharding(2, world_size)
    second = CheckpointManager(storage, again, **options)
    assert second.restore() == 4 and second.restore_report.captured == 4
    assert states(again) == made[4]
    second.close()
    saver.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(("world_size", "sharding"), [(1, fsdp), (3, fsdp), (2, by_columns)])
def test_parts_are_captured_beside_training_and_restored_from_memory(
    world_size: int, sharding: Any, tmp_path: Path
) -> None:
    """The last layer has one row, so that of three ranks two have none of it."""
    run_processes(world_size, captured, world_size, str(tmp_path), sharding)


def killed(rank: int, world_size: int, folder: str) -> None:
    """Capture four steps, commit nothing, and die with the agent."""
    begin(rank, world_size, folder)
    objects = fsdp(1, world_size)
    saver = CheckpointManager(
        LocalStorage(f"{folder}/run"), objects, persist_every=10**9, capture_every=1, arenas=f"{folder}/mem"
    )
    saver.restore()
    for _ in range(4):
        trained(objects, 1)
        said = states(objects)
        saver.step()
        saver._saves._engine.wait()
    Path(folder, f"said.{rank}").write_text(said)
    dist.barrier()
    os.kill(saver._saves._agent.pid, signal.SIGKILL)
    os._exit(0)


def goes_on(rank: int, world_size: int, folder: str, sharding: Any) -> None:
    begin(rank, world_size, folder)
    objects = sharding(2, world_size)
    with CheckpointManager(
        LocalStorage(f"{folder}/run"), objects, persist_every=10**9, capture_every=1, arenas=f"{folder}/mem"
    ) as saver:
        assert saver.restore() == 4 and saver.restore_report.captured == 4 and saver.restore_report.restored is None
        assert states(objects) == Path(folder, "said.0").read_text()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "sharding"), [(3, by_columns), pytest.param(4, fsdp, marks=pytest.mark.soak), (1, fsdp)]
)
def test_parts_in_memory_are_restored_on_another_number_of_ranks_of_the_node(
    world_size: int, sharding: Any, tmp_path: Path
) -> None:
    run_processes(2, killed, 2, str(tmp_path))
    run_processes(world_size, goes_on, world_size, str(tmp_path), sharding)


def tilings(shape: tuple[int, ...], seed: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shape cut by a random grid."""
    rng = random.Random(seed)
    cuts = []
    for size in shape:
        borders = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 3)))})
        cuts.append([(start, stop - start) for start, stop in itertools.pairwise(borders)] or [(0, 0)])
    return [(tuple(at for at, _ in box), tuple(size for _, size in box)) for box in itertools.product(*cuts)]


@given(
    shape=st.lists(st.integers(0, 6), max_size=3).map(tuple), seeds=st.tuples(st.integers(0, 99), st.integers(0, 99))
)
def test_any_parts_make_up_any_others(shape: tuple[int, ...], seeds: tuple[int, int]) -> None:
    full = torch.arange(prod(shape)).reshape(shape)
    saved, wanted = (tilings(shape, seed) for seed in seeds)
    assert untiled(shape, saved) is None

    def cut(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
            tensor = tensor.narrow(dim, at, size)
        return tensor

    specs = {}
    for offsets, sizes in saved:
        key = part_key("x", offsets, shape)
        specs[key] = TensorSpec(key=key, dtype="int64", shape=sizes)
    found = wholes_of(specs, {})["x"]
    parts = {one.key: cut(full, one.offsets, one.sizes) for one in found.parts}
    for offsets, sizes in wanted:
        into = torch.full(sizes, -1)
        for region in found.regions(offsets, sizes):
            cut(into, region.target, region.sizes).copy_(cut(parts[region.key], region.source, region.sizes))
        assert torch.equal(into, cut(full, offsets, sizes))


@given(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(0, 99), st.data())
def test_parts_make_up_a_whole_where_every_element_is_in_one_of_them_and_in_no_other(
    shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    corner = st.tuples(*(st.integers(0, 4) for _ in shape))
    parts = data.draw(st.permutations(tilings(shape, seed)))
    parts = parts[data.draw(st.integers(0, 2)) :] + data.draw(st.lists(st.tuples(corner, corner), max_size=2))
    times = torch.zeros([size + 8 for size in shape])
    for offsets, sizes in parts:
        times[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
    inside = times[tuple(slice(size) for size in shape)]
    once = bool((inside == 1).all()) and bool(times.sum() == inside.sum())
    assert (untiled(shape, parts) is None) == once
    specs = {part_key("x", offsets, shape): sizes for offsets, sizes in parts}
    if 0 < len(specs) == len(parts):  # no rank has two parts of one tensor at one place
        assert are_tiled(tilings_of_ranks(specs, shape)) == once


def tilings_of_ranks(
    parts: dict[str, tuple[int, ...]], shape: tuple[int, ...], *, name: str = "x", copies: int = 1
) -> list[Tiling]:
    """What ranks say that have one part each; one more has a part without elements."""
    dims = (0,) if copies == 1 else (-1, 0)
    shared = {name: Sharing(ranks=((0, len(parts) * copies),), dims=dims)}
    every = [TensorSpec(key=key, dtype="int8", shape=sizes) for key, sizes in parts.items()] * copies
    if shape:
        every.append(TensorSpec(key=part_key(name, shape, shape), dtype="int8", shape=(0,) * len(shape)))
    return [one for spec in every for one in tilings_of([spec], shared)]


def test_tensors_do_not_make_up_for_what_others_lack() -> None:
    shared = dict.fromkeys("xyz", Sharing(ranks=((0, 2),), dims=(0,)))

    def said(**places: int) -> list[Tiling]:
        keys = [part_key(name, (at,), (4,)) for name, at in places.items()]
        return list(tilings_of([TensorSpec(key=key, dtype="int8", shape=(2,)) for key in keys], shared))

    assert are_tiled(said(x=0, y=0) + said(x=2, y=2))
    assert not are_tiled(said(x=0, y=0) + said(x=2, y=0))
    assert not are_tiled(said(x=0, y=2) + said(x=0, y=2)), "as many of each place, of the other tensor"
    assert not are_tiled(said(x=0, y=0) + said(x=2, z=2))
    assert not are_tiled(said(x=0, y=0))


def test_replicas_within_a_mesh_are_all_whole_or_none_is() -> None:
    halves = {part_key("x", (at,), (4,)): (2,) for at in (0, 2)}
    twice = tilings_of_ranks(halves, (4,), copies=2)
    assert are_tiled(twice) and not are_tiled(twice[1:]) and not are_tiled([*twice, twice[0]])
    assert not are_tiled([*tilings_of_ranks(halves, (4,)), *tilings_of_ranks(halves, (4,))]), "no replicas here"


def test_parts_that_overlap_lie_outside_or_leave_something_out_are_told() -> None:
    assert untiled((4,), [((0,), (2,)), ((2,), (2,))]) is None
    assert untiled((), [((), ())]) is None and untiled((0, 3), []) is None
    assert untiled((2, 4), [((0, 0), (1, 2)), ((0, 2), (2, 2)), ((1, 0), (1, 2))]) is None, "no grid"
    assert untiled((4,), [((0,), (4,)), ((2,), (0,))]) is None, "an empty part within another"
    twice = [((0,), (2,)), ((4,), (2,)), ((0,), (2,))]  # and as many are left out, in whatever order they come
    assert [untiled((6,), parts) for parts in itertools.permutations(twice)] == [
        "its parts overlap, or lie outside of it"
    ] * 6
    for wrong in ([((0,), (3,)), ((2,), (1,))], [((0,), (5,))], [((0,), (3,))], [((0, 0), (2, 2))], []):
        assert untiled((4,), wrong) is not None  # type: ignore[arg-type]
    spec = TensorSpec(key="x", dtype="float32", shape=(4,))
    with pytest.raises(CheckpointDamaged, match="not all of"):
        Whole(spec=spec, parts=(SavedPart(key="p", offsets=(0,), sizes=(3,)),)).regions((0,), (4,))


@pytest.mark.parametrize(
    "keys",
    [["x::at 0 of 5", "x::at 2 of 6"], ["x::at 0,0 of 5"], ["x::at  of 5"], ["x::at 0 of ,,"]],
)
def test_keys_of_parts_that_do_not_fit_one_another_are_refused(keys: list[str]) -> None:
    with pytest.raises(CheckpointDamaged):
        wholes_of({key: TensorSpec(key=key, dtype="float32", shape=(2,)) for key in keys}, {})


def test_a_name_that_looks_like_a_part_is_none() -> None:
    storage = MemoryStorage()
    state = {"w::at 0 of 9": torch.ones(2), "w": torch.zeros(3)}
    flat = flatten("own", state)
    assert not any(map(is_part_key, flat.tensors)) and not flat.sharded

    class Own:
        def state_dict(self) -> dict[str, Any]:
            return state

        def load_state_dict(self, found: dict[str, Any]) -> None:
            self.found = found

    saver = manager(storage, {"own": Own()})
    saver.restore()
    saver.save()
    own = Own()
    manager(storage, {"own": own}).restore()
    assert str(own.found) == str(state)


def partial(rank: int, world_size: int, folder: str) -> None:
    begin(rank, world_size, folder)
    mesh = init_device_mesh("cpu", (world_size,))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(UnsupportedValue, match="x/a: a DTensor with a Partial placement"):
        flatten("x", {"a": tensor})
    dist.destroy_process_group()


def test_sums_that_are_not_added_up_are_refused(tmp_path: Path) -> None:
    run_processes(1, partial, 1, str(tmp_path))


class Tied(torch.nn.Module):
    """An embedding and a head with one weight, of fewer rows than there are ranks for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(value))


def _save_tied(rank: int, folder: str) -> None:
    begin(rank, 4, folder)
    for turn in range(2):
        torch.manual_seed(turn)
        model = Tied()
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with CheckpointManager(f"{folder}/run", {"model": model, "optimizer": optimizer}, persist_every=1) as saver:
            assert saver.restore() == turn
            model(torch.tensor([0, 1])).sum().backward()
            optimizer.step()
            saver.step()
    dist.destroy_process_group()


def test_tied_weights_of_which_a_rank_has_no_row_are_one_tensor_on_all(tmp_path: Path) -> None:
    run_processes(4, _save_tied, str(tmp_path))
