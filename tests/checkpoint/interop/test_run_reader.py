"""torch.distributed.checkpoint reads a run: on any number of ranks, whole and verified, or refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lakeckpt import CheckpointManager
from lakeckpt.convert import convert_checkpoint, read_state
from lakeckpt.dcp import RunReader
from lakeckpt.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, ConfigError, DamageWarning
from tests.checkpoint.rig import Counter, MemoryStorage, Reader, manager, train_step, training
from tests.tracking.processes import run_processes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def trained(steps: int = 3) -> dict[str, Any]:
    objects = training()
    for _ in range(steps):
        train_step(objects)
    return objects


def load(state: dict[str, Any], reader: RunReader, **options: Any) -> None:
    """As ``dcp.load``, alone, with the errors that DCP wraps."""
    try:
        dcp.load(state, storage_reader=reader, no_dist=True, **options)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        raise cause from None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Odd:
    """Values of all kinds, and tensors of odd shapes."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        shared = torch.full((3, 2), self.value)
        return {
            "tensors": {"empty": torch.empty(0, 3), "scalar": torch.tensor(self.value), "bf16": shared.bfloat16()},
            "tied": [shared, shared, {"turned": torch.arange(6.0).reshape(2, 3).T * self.value}],
            "pair": (1, torch.full((2,), self.value)),
            "values": {"number": self.value, "text": "é", "none": None, "numbers": [1, 2], "bytes": b"\x00"},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_run_is_loaded_by_plain_dcp(tmp_path: Path) -> None:
    objects = trained() | {"odd": Odd(2.5)}
    del objects["scheduler"]  # its milestones are a dict of numbers, and DCP makes texts of all keys
    with CheckpointManager(tmp_path, objects) as saver:
        saver.restore()
        saver.step()
    fresh = {name: one for name, one in trained(1).items() if name in objects}
    live = {name: one.state_dict() for name, one in fresh.items()} | {"odd": Odd(0.0).state_dict()}
    reader = RunReader(tmp_path)
    assert reader.step == 1
    load(live, reader)
    assert same(live, {name: one.state_dict() for name, one in objects.items()})


def test_a_run_of_an_application_state_is_loaded_into_one(tmp_path: Path) -> None:
    objects = {"app": Counter(torch.arange(5.0)), "reader": Reader()}
    with CheckpointManager(tmp_path, objects) as saver:
        saver.restore()
        next(iter(objects["reader"]))
        saver.step()
    live = {"app": Counter(torch.zeros(5))}
    load(live, RunReader(tmp_path))
    assert torch.equal(live["app"].value, torch.arange(5.0))
    flat = RunReader(tmp_path).read_metadata().state_dict_metadata
    assert "reader.step" in flat and not any("random" in name for name in flat)


def test_torchs_converters_work_on_a_run(tmp_path: Path) -> None:
    objects = trained()
    with CheckpointManager(tmp_path / "run", objects) as saver:
        saver.restore()
        saver.step()
    found: dict[str, Any] = {}  # as dcp_to_torch_save of torch does it
    _load_state_dict(found, RunReader(tmp_path / "run"), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert same(found["model"], dict(objects["model"].state_dict()))
    weights = {f"model.{name}": torch.empty_like(one) for name, one in objects["model"].state_dict().items()}
    load(weights, RunReader(tmp_path / "run"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(weights, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "hf")), no_dist=True)
        again = {name: torch.empty_like(one) for name, one in weights.items()}
        dcp.load(again, storage_reader=HuggingFaceStorageReader(str(tmp_path / "hf")), no_dist=True)
    assert same(again, weights)


def test_the_checkpoint_of_a_step_and_of_another_run_can_be_named(tmp_path: Path) -> None:
    for name, first in (("one", 10.0), ("two", 20.0)):
        counter = Counter(torch.tensor(0.0))
        with CheckpointManager(tmp_path / name, {"n": counter}, persist_every=1, keep=5) as saver:
            saver.restore()
            for at in range(3):
                counter.value = torch.tensor(first + at)
                saver.step()
    live = {"n": {"value": torch.tensor(0.0)}}
    for reader, value in ((RunReader(tmp_path / "one"), 12.0), (RunReader(tmp_path / "one", step=2), 11.0)):
        load(live, reader)
        assert live["n"]["value"] == value
    load(live, RunReader(tmp_path / "one", step=2), checkpoint_id=tmp_path / "two")
    assert live["n"]["value"] == 21.0
    with pytest.raises(
        CheckpointNotFound, match=r"no checkpoint of step 9 that .* The steps that can be loaded are 1, 2, 3"
    ):
        RunReader(tmp_path / "one", step=9)
    with pytest.raises(CheckpointNotFound, match="there is no run at"):
        RunReader(tmp_path / "none")
    with pytest.raises(ConfigError, match="has ranks 0 to 0, not 1"):
        RunReader(tmp_path / "one", rank=1)


def test_damage_is_refused_when_it_is_read_and_an_older_checkpoint_is_chosen_where_records_are_damaged() -> None:
    storage, counter = MemoryStorage(), Counter(torch.zeros(5000))
    saver = manager(storage, {"n": counter}, persist_every=1, keep=5)
    saver.restore()
    for value in (1.0, 2.0):
        counter.value = torch.full((5000,), value)
        saver.step()
    live = {"n": {"value": torch.zeros(5000)}}
    path = sorted(path for path in storage.objects if path.startswith("objects/"))[-1]
    good = storage.objects[path]
    storage.objects[path] = good[:-50] + bytes([good[-50] ^ 1]) + good[-49:]
    with pytest.raises(CheckpointDamaged, match="'n/value' are not what was written"):
        load(live, RunReader(storage))
    assert not live["n"]["value"].any()
    storage.objects[path] = good
    part = sorted(path for path in storage.objects if path.endswith("00000.lkc"))[-1]
    storage.objects[part] = storage.objects[part][:-1]
    with pytest.warns(DamageWarning):
        load(live, RunReader(storage))
    assert live["n"]["value"].unique().tolist() == [1.0]


def begin(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world_size}", rank=rank, world_size=world_size)


WHOLE = torch.arange(77.0).reshape(7, 11)


def save_sharded(rank: int, world_size: int, folder: str, dim: int) -> None:
    begin(rank, world_size, folder)
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"rows": distribute_tensor(WHOLE, mesh, [Shard(dim)]), "plain": torch.full((3,), 5.0)}
    with CheckpointManager(f"{folder}/run", {"app": Counter(state)}) as saver:
        saver.restore()
        saver.step()
    dist.destroy_process_group()


def load_sharded(rank: int, world_size: int, folder: str, dim: int) -> None:
    begin(rank, world_size, folder)
    mesh = init_device_mesh("cpu", (world_size,))
    live = {"value": {"rows": distribute_tensor(torch.zeros(7, 11), mesh, [Shard(dim)]), "plain": torch.zeros(3)}}
    dcp.load({"app": live}, storage_reader=RunReader(f"{folder}/run"))
    rows = live["value"]["rows"]
    assert isinstance(rows, DTensor)
    assert torch.equal(rows.full_tensor(), WHOLE) and live["value"]["plain"].tolist() == [5.0] * 3
    dist.destroy_process_group()


@pytest.mark.parametrize(("saved", "loaded"), [((2, 0), (3, 1)), ((3, 1), (2, 0)), ((2, 0), (2, 0))])
def test_what_ranks_shared_is_loaded_on_others_in_another_sharding(
    saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    run_processes(saved[0], save_sharded, saved[0], str(tmp_path / "a"), saved[1])
    (tmp_path / "a" / "meet-2").unlink(missing_ok=True)
    run_processes(loaded[0], load_sharded, loaded[0], str(tmp_path / "a"), loaded[1])
    live = {"app": {"value": {"rows": torch.zeros(7, 11)}}}
    load(live, RunReader(tmp_path / "a" / "run"))
    assert torch.equal(live["app"]["value"]["rows"], WHOLE)


def save_stages(rank: int, world_size: int, folder: str) -> None:
    begin(rank, world_size, folder)
    layer = torch.full((2,), float(rank))
    state = {f"layers.{rank}": layer, "shared": torch.ones(2), "statistics": layer + 7, "number": rank, "same": [1]}
    with CheckpointManager(f"{folder}/run", {"app": Counter(state)}) as saver:
        saver.restore()
        saver.step()
    dist.destroy_process_group()


def test_what_ranks_had_together_is_read_as_one_and_what_they_disagree_on_by_rank(tmp_path: Path) -> None:
    run_processes(2, save_stages, 2, str(tmp_path))
    run = tmp_path / "run"
    live: dict[str, Any] = {
        "layers.0": torch.zeros(2), "layers.1": torch.zeros(2), "shared": torch.zeros(2), "same": None
    }  # fmt: skip
    load({"app": {"value": live}}, RunReader(run))
    assert live["layers.1"].tolist() == [1.0, 1.0] and live["layers.0"].tolist() == [0.0, 0.0] and live["same"] == [1]
    for name in ("statistics", "number"):
        with pytest.raises(CheckpointMismatch, match=rf"different values of 'app/value/{name}': choose the rank"):
            load({"app": {"value": {name: torch.zeros(2) if name == "statistics" else 0}}}, RunReader(run))
        with pytest.raises(CheckpointMismatch, match="choose the rank"):
            read_state(run)
    for rank in range(2):
        live = {"statistics": torch.zeros(2), "number": None, f"layers.{rank}": torch.zeros(2)}
        load({"app": {"value": live}}, RunReader(run, rank=rank))
        assert live["number"] == rank and live["statistics"].tolist() == [7.0 + rank] * 2
        assert read_state(run, rank=rank)["app"]["value"].keys() == {
            f"layers.{rank}", "shared", "statistics", "number", "same"
        }  # fmt: skip
    with pytest.raises(CheckpointMismatch, match="choose the rank"):
        convert_checkpoint(run, tmp_path / "out.pt", to="torch")


def test_ranks_that_chose_different_checkpoints_are_refused(tmp_path: Path) -> None:
    counter = Counter(torch.tensor(0.0))
    with CheckpointManager(tmp_path, {"n": counter}, persist_every=1) as saver:
        saver.restore()
        for _ in range(2):
            saver.step()
    plans = []
    for reader in (RunReader(tmp_path, step=1), RunReader(tmp_path)):
        planner = dcp.DefaultLoadPlanner()
        planner.set_up_planner({"n": {"value": torch.tensor(0.0)}}, reader.read_metadata(), True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    assert reader.prepare_global_plan(plans[:1]) == plans[:1]
    with pytest.raises(CheckpointMismatch, match=r"ranks found those in slots \[\d, \d\]. Make the readers with step="):
        reader.prepare_global_plan(plans)
