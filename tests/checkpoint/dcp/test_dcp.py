"""torch.distributed.checkpoint over our storage: what was saved is loaded, anywhere, whole, or refused by name."""

from __future__ import annotations

import io
import os
import pickle
import random
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from lakeckpt import LakeLoadPlanner, LakeSavePlanner, LakeStorageReader, LakeStorageWriter, PerRank, read_state
from lakeckpt.checkpoint.dcp.metadata import CHECKPOINT, metadata_from_bytes
from lakeckpt.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    ConfigError,
    LakeckptError,
    SaveFailed,
    StorageError,
    UnsupportedValue,
)
from lakeckpt.wire.codec import dumps, loads
from tests.tracking.processes import run_processes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=LakeStorageWriter(folder, **options), planner=LakeSavePlanner(), no_dist=alone())


def load(state: dict[str, Any], folder: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=LakeStorageReader(folder), planner=LakeLoadPlanner(**options), no_dist=alone())


def alone() -> bool:
    return not dist.is_initialized()


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.99))
    for _ in range(3):
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(seed: int) -> dict[str, Any]:
    model, optimizer = trained(seed)
    odd = {
        "bf16": torch.randn(3).bfloat16(),
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(seed),
        "strided": torch.randn(6, 4).t(),
        "one": torch.randn(6, 4)[:1, 0],
        "bool": torch.tensor([True, False]),
    }
    values = {"step": seed, "name": "run", "none": None, "pair": (1, 2.5), "big": 2**80, "list": [1, {"a": b"x"}]}
    rng = {"torch": torch.get_rng_state(), "python": random.Random(seed).getstate()}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "odd": odd, "values": values, "rng": rng}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_everything_that_was_saved_is_loaded(tmp_path: Path) -> None:
    saved, live = state_of(1), state_of(2)
    save(saved, tmp_path)
    assert not same(saved, live)
    load(live, tmp_path)
    assert same(saved, live)


def test_tensors_are_files_that_every_safetensors_reader_opens(tmp_path: Path) -> None:
    saved = state_of(1)
    save(saved, tmp_path)
    (file,) = (tmp_path / "data").iterdir()
    found = load_file(file)
    assert torch.equal(found["model.0.weight@0,0"], saved["model"]["0.weight"])


def test_an_async_save_is_the_same(tmp_path: Path) -> None:
    saved, live = state_of(1), state_of(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        writer = LakeStorageWriter(tmp_path)
        future = dcp.async_save(saved, storage_writer=writer, planner=LakeSavePlanner())
        future.result()  # type: ignore[union-attr]
        load(live, tmp_path)
    finally:
        dist.destroy_process_group()
    assert same(saved, live)


def test_planners_of_torch_are_refused_with_the_one_to_pass(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"planner=lakeckpt.LakeSavePlanner\(\)"):
        dcp.save({"a": 1}, storage_writer=LakeStorageWriter(tmp_path), planner=DefaultSavePlanner(), no_dist=True)
    assert not (tmp_path / CHECKPOINT).exists()
    save({"a": 1}, tmp_path)
    with pytest.raises(CheckpointException, match=r"planner=lakeckpt.LakeLoadPlanner\(\)"):
        dcp.load({"a": 1}, storage_reader=LakeStorageReader(tmp_path), planner=DefaultLoadPlanner(), no_dist=True)
    tensors = {"t": torch.ones(2)}  # of tensors alone torch's planners pickle nothing
    dcp.save(tensors, storage_writer=LakeStorageWriter(tmp_path / "t"), no_dist=True)
    dcp.load(tensors, storage_reader=LakeStorageReader(tmp_path / "t"), no_dist=True)


def test_what_only_a_pickle_could_hold_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"values\.odd") as caught:
        save({"values": {"odd": object(), "fine": 1}}, tmp_path)
    assert isinstance(next(iter(caught.value.failures.values()))[0], UnsupportedValue)
    assert not (tmp_path / CHECKPOINT).exists()


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.ones(2).to_sparse(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning", "ignore::DeprecationWarning")
def test_a_tensor_that_has_no_plain_bytes_is_refused_by_its_name(made: Any, tmp_path: Path) -> None:
    for state in ({"odd": made()}, {"odd": (1, made())}):
        with pytest.raises(CheckpointException) as caught:
            save(state, tmp_path)
        ((error, _),) = caught.value.failures.values()
        assert isinstance(error, UnsupportedValue) and "odd" in str(error) and "plain dense tensor" in str(error)


def test_names_that_the_checkpoint_lacks_are_listed(tmp_path: Path) -> None:
    save({"a": torch.ones(1), "v": 1}, tmp_path)
    live = {"a": torch.zeros(1), "b": torch.zeros(1), "w": 2}
    with pytest.raises(CheckpointException, match=r"does not hold 'b', 'w'") as caught:
        load(live, tmp_path)
    assert isinstance(next(iter(caught.value.failures.values()))[0], CheckpointMismatch)
    load(live, tmp_path, allow_partial_load=True)
    assert live["a"] == 1


def test_a_checkpoint_is_replaced_only_when_asked_and_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"a": torch.zeros(3)}, tmp_path)
    with pytest.raises(CheckpointException, match="overwrite=True"):
        save({"a": torch.ones(3)}, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(LakeStorageWriter, "finish", fail)
        with pytest.raises(CheckpointException, match="power cut"):
            save({"a": torch.ones(3)}, tmp_path, overwrite=True)
    live = {"a": torch.full((3,), 9.0)}
    load(live, tmp_path)
    assert torch.equal(live["a"], torch.zeros(3))
    before = set(os.listdir(tmp_path / "data"))
    save({"a": torch.ones(3)}, tmp_path, overwrite=True)
    load(live, tmp_path)
    assert torch.equal(live["a"], torch.ones(3))
    assert len(set(os.listdir(tmp_path / "data")) - before) == 1
    assert len(set(os.listdir(tmp_path / "data")) & before) == 1  # that of the save which was cut off: nobody's


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("power cut")


def test_of_two_that_save_into_one_folder_one_wins(tmp_path: Path) -> None:
    def while_another_saves(self: LakeStorageWriter, metadata: Any, results: Any) -> None:
        patch.undo()
        save({"a": torch.ones(3)}, tmp_path)
        self.finish(metadata, results)

    patch = pytest.MonkeyPatch()
    patch.setattr(LakeStorageWriter, "finish", while_another_saves)
    with pytest.raises(CheckpointException, match="another job saved") as caught:
        save({"a": torch.zeros(3)}, tmp_path)
    assert isinstance(next(iter(caught.value.failures.values()))[0], SaveFailed)
    live = {"a": torch.full((3,), 9.0)}
    load(live, tmp_path)
    assert torch.equal(live["a"], torch.ones(3))


def test_a_file_that_is_not_there_as_it_was_written_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LakeStorageWriter.finish

    def cut(self: LakeStorageWriter, metadata: Any, results: Any) -> None:
        (file,) = (tmp_path / "data").iterdir()
        os.truncate(file, file.stat().st_size - 1)
        real(self, metadata, results)

    monkeypatch.setattr(LakeStorageWriter, "finish", cut)
    with pytest.raises(CheckpointException, match="were written: nothing was saved"):
        save({"a": torch.ones(3)}, tmp_path)
    assert not (tmp_path / CHECKPOINT).exists()


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path) -> None:
    saved = {"a": torch.arange(50.0), "b": torch.arange(9), "v": [1, "two"]}
    save(saved, tmp_path)
    rng = random.Random(7)
    for path in (tmp_path / CHECKPOINT, *(tmp_path / "data").iterdir()):
        whole = path.read_bytes()
        damages: list[bytes] = [whole[:-1], whole + b"\0", whole[: len(whole) // 2], b""]
        for at in rng.sample(range(len(whole)), 40):
            damages.append(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        for damage in damages:
            path.write_bytes(damage)
            with pytest.raises(LakeckptError):
                read_all({"a": torch.zeros(50), "b": torch.zeros(9, dtype=torch.int64), "v": None}, tmp_path)
        path.write_bytes(whole)
    read_all(saved, tmp_path)


def read_all(state: dict[str, Any], folder: Path) -> None:
    """As `load`, but with our own errors: DCP wraps what readers raise."""
    reader, planner = LakeStorageReader(folder), LakeLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    reader.read_data(planner.finish_plan(plan), planner).wait()


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.mkdir, ("evil-was-here",))


@pytest.mark.parametrize(
    "change",
    [
        {"stored": [["a", [0], "../../etc/passwd", 0, 4, b"d" * 16]]},
        {"stored": [["a", [0], "/etc/passwd", 0, 4, b"d" * 16]]},
        {"stored": [["a", [0], "data/x", -1, 4, b"d" * 16]]},
        {"tensors": {"a": ["float32", [2**61, 2**61], []]}},
        {"tensors": {"a": ["Generator", [1], []]}},
        {"tensors": {"a": ["float32", [3], [[[0], [4]]]]}},
        {"tensors": {"a": pickle.dumps(Evil())}},
        {"files": {"data/x": [1, 2, b"d" * 16]}},
        {"files": {"data/../x": [2, 1, b"d" * 16]}},
        {"values": 7},
        {"planner": pickle.dumps(Evil())},
    ],
)
def test_a_document_made_to_attack_is_refused(
    tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = {"tensors": {"a": ["float32", [1], [[[0], [1]]]]}, "values": [], "stored": [], "files": {}, "planner": {}}
    Path(CHECKPOINT).write_bytes(dumps({**value, **change}, kind="dcp-checkpoint", version=(1, 0)))
    with pytest.raises(LakeckptError):
        read_all({"a": torch.zeros(1)}, tmp_path)
    assert not Path("evil-was-here").exists()


def test_a_chunk_is_held_once_while_it_is_read(tmp_path: Path) -> None:
    state = {"w": torch.arange(4 * 2**20, dtype=torch.float32)}
    save(state, tmp_path)
    found = {"w": torch.zeros_like(state["w"])}
    read_all(found, tmp_path)  # once for what is imported
    found["w"].zero_()
    tracemalloc.start()  # which knows of bytes, and not of torch's memory: that of the one copy
    try:
        read_all(found, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < state["w"].nbytes / 4
    finally:
        tracemalloc.stop()
    assert torch.equal(found["w"], state["w"])


def test_a_chunk_said_to_be_larger_than_its_file_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    save({"w": torch.zeros(4)}, tmp_path)
    value = loads((tmp_path / CHECKPOINT).read_bytes(), kind="dcp-checkpoint", supported=(1, 0)).value
    value["tensors"] = {"w": ["float32", [2**50], [[[0], [2**50]]]]}
    (row,) = (row for row in value["stored"] if row[0] == "w")
    row[4] = 2**52
    (tmp_path / CHECKPOINT).write_bytes(dumps(value, kind="dcp-checkpoint", version=(1, 0)))
    with pytest.raises(CheckpointDamaged, match="behind the end of data/"):
        read_all({"w": torch.zeros(1).expand(2**50)}, tmp_path)


def test_a_folder_without_a_checkpoint_says_what_is_there_instead(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"checkpoint\.lkc is not there"):
        LakeStorageReader(tmp_path).read_metadata()
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointNotFound, match="torch's own reader"):
        LakeStorageReader(tmp_path).read_metadata()
    with pytest.raises(ConfigError, match="needs a place"):
        LakeStorageReader().read_metadata()
    assert issubclass(CheckpointDamaged, CheckpointError)


def _save_sharded(rank: int, folder: Path, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{world}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(35.0).reshape(7, 5)
    state = {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "replica": torch.full((4,), 3.0),
        "reader": PerRank({"rank": rank, "state": torch.tensor([rank])}),
    }
    save(state, folder / "checkpoint")
    dist.destroy_process_group()


def _load_sharded(rank: int, folder: Path, world: int, dim: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{folder}/again-{world}-{dim}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    state = {
        "sharded": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(dim)]),
        "replica": torch.zeros(4),
        "reader": PerRank({"rank": -1, "state": torch.tensor([-1])}),
    }
    if rank < 2:
        load(state, folder / "checkpoint")
    else:
        with pytest.warns(RuntimeWarning, match="rank 2 is new: the checkpoint holds no reader of its own"):
            load(state, folder / "checkpoint")
    assert torch.equal(state["sharded"].full_tensor(), torch.arange(35.0).reshape(7, 5))  # type: ignore[union-attr]
    assert torch.equal(state["replica"], torch.full((4,), 3.0))  # type: ignore[arg-type]
    told = rank if rank < 2 else -1
    assert state["reader"].value["rank"] == told  # type: ignore[union-attr]
    assert state["reader"].value["state"].tolist() == [told]  # type: ignore[union-attr]
    dist.destroy_process_group()


def test_shards_go_to_other_ranks_and_every_rank_keeps_its_own_values(tmp_path: Path) -> None:
    run_processes(2, _save_sharded, tmp_path, 2)
    stored = metadata_from_bytes((tmp_path / "checkpoint" / CHECKPOINT).read_bytes()).storage_data.stored
    assert sum(index.fqn == "replica" for index in stored) == 1  # written once
    run_processes(2, _load_sharded, tmp_path, 2, 1)
    run_processes(3, _load_sharded, tmp_path, 3, 0)
    run_processes(1, _load_sharded, tmp_path, 1, 0)


def test_planners_show_no_bytes_of_values_but_documents() -> None:
    planner = LakeSavePlanner()
    planner.set_up_planner({"v": {"x": 1}}, None, True)
    (item,) = planner.create_local_plan().items
    found = planner.resolve_data(item)
    assert isinstance(found, io.BytesIO)
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(found.getvalue())


def test_numbers_as_keys_are_found_again(tmp_path: Path) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())  # its steps are ints, below an int
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    save({"optimizer": optimizer.state_dict()}, tmp_path / "c")
    state = {"optimizer": optimizer.state_dict()}
    state["optimizer"]["state"][0]["step"] = 9
    load(state, tmp_path / "c")
    assert state["optimizer"]["state"].keys() == {0} and state["optimizer"]["state"][0]["step"] == 1


def _save_per_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    state = {"w": torch.ones(2), "reader": PerRank({"rank": rank}), "in": {"rng": PerRank(rank)}}
    dcp.save(state, storage_writer=LakeStorageWriter(folder / "c"), planner=LakeSavePlanner())
    with pytest.raises(ConfigError, match="use_collectives"):
        dcp.save(
            state,
            storage_writer=LakeStorageWriter(folder / "alone"),
            planner=LakeSavePlanner(),
            use_collectives=False,
        )
    dist.destroy_process_group()


def test_values_of_ranks_are_read_by_the_names_that_they_have_and_ranks_do_not_save_past_each_other(
    tmp_path: Path,
) -> None:
    run_processes(2, _save_per_rank, tmp_path)
    found = read_state(tmp_path / "c")
    assert found.pop("w").tolist() == [1.0, 1.0]
    assert found == {
        "reader::rank:0": {"rank": 0},
        "reader::rank:1": {"rank": 1},
        "in": {"rng::rank:0": 0, "rng::rank:1": 1},
    }


class _FailsOnce(LakeStorageReader):
    """A store that does not answer one rank, once."""

    fails = True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails:
            self.fails = False
            raise StorageError("the store does not answer")
        return super().read_metadata(*args, **kwargs)


def _load_past_an_error(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    reader = _FailsOnce(folder / "c") if rank else LakeStorageReader(folder / "c")
    with pytest.raises(CheckpointException, match="the store does not answer"):
        dcp.load({"w": torch.zeros(2)}, storage_reader=reader, planner=LakeLoadPlanner())
    dist.destroy_process_group()


def test_a_rank_that_could_not_read_what_there_is_goes_nowhere_without_the_others(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "c")
    run_processes(2, _load_past_an_error, tmp_path)
