"""Stages of a pipeline get their own back, and never each other's: sharded or not, whatever their names and shapes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.ledger.verify import verify
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.convert import read_state
from lakeckpt.errors import CheckpointMismatch, SaveFailed
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import EventWaiter, HubExchange, MemoryStorage, good, manager, run_ranks
from tests.checkpoint.staged_runs import save_both, stages
from tests.tracking.processes import run_processes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs ``alike`` and ``unlike``."""
    folder = tmp_path_factory.mktemp("stages")
    save_both(folder)
    return folder


def begin(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world_size}", rank=rank, world_size=world_size)


def assert_alike(one: Any, other: Any) -> None:
    """Within the precision of a step of Adam, which may differ from one torch to another."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape
        part, whole = (one.to_local(), other.to_local()) if isinstance(one, DTensor) else (one, other)
        torch.testing.assert_close(part, whole)
    elif isinstance(one, (dict, list)):
        assert len(one) == len(other)
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_alike(one[key], other[key])


def assert_own(objects: dict[str, Any], rank: int, *, alike: bool) -> None:
    expected = stages(rank, 4, alike=alike, value=1.0)
    assert_alike(
        {name: dict(one.state_dict()) for name, one in objects.items()},
        {name: dict(one.state_dict()) for name, one in expected.items()},
    )


def wholes(state: Any) -> Any:
    """With every DTensor put together: collective."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: wholes(one) for key, one in state.items()}
    return state


def restored(rank: int, folder: str, alike: bool) -> None:
    begin(rank, 4, folder)
    expected = stages(rank, 4, alike=alike, value=1.0)
    every = {name: wholes(dict(one.state_dict())) for name, one in expected.items()}
    assert_alike({name: dict(one) for name, one in read_state(f"{folder}/run", rank=rank).items()}, every)
    dist.barrier()
    objects = stages(rank, 4, alike=alike, value=7.0)
    with CheckpointManager(f"{folder}/run", objects, persist_every=1) as saver:
        assert saver.restore() == 1 and saver.restore_report.damaged == ()
        assert not any("lakeckpt" in name for name in saver.restore_report.per_rank)
        assert_own(objects, rank, alike=alike)
        saver.step()
    again = stages(rank, 4, alike=alike, value=8.0)
    loader = CheckpointManager(f"{folder}/run", again)
    assert loader.restore() == 2
    assert not any("lakeckpt" in name for name in loader.restore_report.per_rank)
    assert_own(again, rank, alike=alike)
    dist.destroy_process_group()


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "unlike"])
def test_sharded_stages_each_get_their_own_back(alike: bool, saved: Path, tmp_path: Path) -> None:
    """States of optimizers have the same names in all stages, also where nothing else has."""
    shutil.copytree(saved / ("alike" if alike else "unlike"), tmp_path / "run")
    report = verify(LocalStorage(tmp_path / "run"))
    assert report.every_damage == () and ("different" in report.checkpoints[0].bound) == alike
    run_processes(4, restored, str(tmp_path), alike)


def refused(rank: int, world_size: int, sizes: tuple[int, int], match: str, folder: str) -> None:
    begin(rank, world_size, folder)
    objects = stages(rank, world_size, alike=True, value=7.0, sizes=sizes)
    before = str(objects["model"].state_dict()), str(objects["optimizer"].state_dict())
    with pytest.raises(CheckpointMismatch, match=match):
        CheckpointManager(f"{folder}/run", objects).restore()
    assert (str(objects["model"].state_dict()), str(objects["optimizer"].state_dict())) == before
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "sizes", "match"),
    [
        (2, (2, 1), "on the 4 ranks that saved it, the tensor .* 2 different contents, on ranks 0-1 and on ranks 2-3"),
        (4, (4, 1), "the tensor of this rank was shared by ranks|other ranks"),
        (4, (1, 4), "the tensor of this rank was shared by ranks (0-1|2-3), and is shared by ranks 0-3"),
    ],
    ids=["fewer", "more-stages", "one-stage"],
)
def test_stages_divided_otherwise_are_refused_with_nothing_changed(
    world_size: int, sizes: tuple[int, int], match: str, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "alike", tmp_path / "run")
    run_processes(world_size, refused, world_size, sizes, match, str(tmp_path))


def crossed(rank: int, folder: str) -> None:
    begin(rank, 4, folder)
    with CheckpointManager(f"{folder}/run", stages(rank, 4, alike=True, value=1.0, order=(0, 2, 1, 3))) as saver:
        saver.restore()
        saver.step()
    objects = stages(rank, 4, alike=True, value=7.0, order=(0, 3, 1, 2))
    before = str(objects["model"].state_dict())
    with pytest.raises(CheckpointMismatch, match="the tensor of this rank was shared by ranks"):
        CheckpointManager(f"{folder}/run", objects).restore()
    assert str(objects["model"].state_dict()) == before
    dist.destroy_process_group()


def test_halves_of_two_stages_are_not_put_together_though_each_rank_has_what_it_had(tmp_path: Path) -> None:
    run_processes(4, crossed, str(tmp_path))


def odd(rank: int, folder: str) -> None:
    begin(rank, 2, folder)
    mesh = init_device_mesh("cpu", (2,))

    class Own:
        def state_dict(self) -> dict[str, Any]:
            return {"odd": DTensor.from_local(torch.ones(3 - 2 * rank), mesh, [Shard(0)])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    saver = CheckpointManager(f"{folder}/run", {"own": Own()}, persist_every=1, timeout_s=60)
    saver.restore()
    with pytest.raises(SaveFailed, match="could not be restored, and was not committed: tensor 'own/odd'"):
        saver.save()
    dist.destroy_process_group()


def test_parts_that_make_up_no_whole_are_not_committed(tmp_path: Path) -> None:
    """Each rank thinks that the other one holds as much as itself."""
    run_processes(2, odd, str(tmp_path))
    assert read_history(LocalStorage(tmp_path / "run")).tip is None


def half(rank: int, folder: str) -> None:
    begin(rank, 4, folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))
    model = torch.nn.Linear(2, 2)
    weight = distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0), Shard(1)])
    model.register_parameter("shared", torch.nn.Parameter(weight))
    saver = CheckpointManager(
        f"{folder}/{rank % 2}", {"model": model}, group=mesh["one"], persist_every=1, timeout_s=60
    )
    saver.restore()
    with pytest.raises(SaveFailed, match=r"its parts have 12 of 24 elements.*all ranks of its mesh save into one run"):
        saver.save()
    dist.destroy_process_group()


def test_ranks_that_save_half_of_a_tensor_are_refused_at_the_first_save(tmp_path: Path) -> None:
    run_processes(4, half, str(tmp_path))
    assert read_history(LocalStorage(tmp_path / "0")).tip is None


def plain_stage(stage: int, kind: str) -> dict[str, Any]:
    """A stage with the names of every other; ``kind`` says what of it is its own."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    own = float(stage)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(own if kind == "parameters" else 0.5)
    model[1].running_mean.fill_(own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, own if kind == "optimizer" else 0.5)
    return {"model": model, "optimizer": optimizer, "other": Other(own)}


class Other:
    """An object of the user's; every rank's own. Its state has the form of an optimizer's."""

    def __init__(self, own: float) -> None:
        self.own = torch.full((2,), own)

    def state_dict(self) -> dict[str, Any]:
        return {"state": {0: {"own": self.own}}, "param_groups": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state["state"][0]["own"]


def saved_by_stages(storage: MemoryStorage, kind: str) -> None:
    waiter = EventWaiter(storage)

    def save(rank: int, exchange: HubExchange) -> None:
        saver = manager(storage, plain_stage(rank, kind), exchange=exchange, waiter=waiter)
        saver.restore()
        saver.save()

    good(run_ranks(2, save, waiters=[waiter]))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["parameters", "optimizer", "buffers"])
def test_other_numbers_of_ranks_take_what_is_a_stages_own_only_where_it_is_no_weight(
    kind: str, world_size: int
) -> None:
    storage = MemoryStorage()
    saved_by_stages(storage, kind)

    def restore(rank: int, exchange: HubExchange) -> Any:
        objects = plain_stage(9, kind)
        before = str(objects["model"].state_dict()), str(objects["optimizer"].state_dict())
        saver = manager(storage, objects, exchange=exchange, waiter=EventWaiter(storage))
        if world_size != 2 and kind != "buffers":
            with pytest.raises(CheckpointMismatch, match=r"on rank 0 and on rank 1.*Restart with 2 ranks.*group="):
                saver.restore()
            return (str(objects["model"].state_dict()), str(objects["optimizer"].state_dict())) == before
        saver.restore()
        expected = plain_stage(rank % 2, kind)
        return all(str(objects[name].state_dict()) == str(expected[name].state_dict()) for name in objects)

    assert good(run_ranks(world_size, restore)) == [True] * world_size
