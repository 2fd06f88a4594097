"""Checkpoints of others are read as their own readers read them, ours are read by others, and no code runs."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import pickle
import zipfile
from collections import Counter as Counts
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lakeckpt import CheckpointManager, LakeLoadPlanner, LakeStorageReader, convert_checkpoint, read_state
from lakeckpt.checkpoint.dcp import planners
from lakeckpt.checkpoint.foreign.safetensors import write_safetensors
from lakeckpt.checkpoint.foreign.torch_writer import write_torch_file
from lakeckpt.cli.main import main
from lakeckpt.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    LakeckptError,
    SaveFailed,
    StorageError,
    UnsupportedValue,
)
from lakeckpt.lake.storage import open_storage
from tests.checkpoint.rig import Reader, train_step, training
from tests.tracking.processes import run_processes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def trained() -> dict[str, Any]:
    objects = training()
    for _ in range(3):
        train_step(objects)
    return objects


def rich_state() -> dict[str, Any]:
    bits = torch.arange(48, dtype=torch.uint8)
    objects = trained()
    return {
        "model": objects["model"].state_dict(),
        "optimizer": objects["optimizer"].state_dict(),
        "step": 7,
        "dtypes": {str(dtype): (bits > 20 if dtype == torch.bool else bits.clone().view(dtype)) for dtype in DTYPES},
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "view": torch.arange(100.0)[10:20:3],
        "one": torch.arange(6.0).reshape(2, 3)[1:, 1],
        "mixed": {
            "tuple": (1, torch.ones(2), None, "é", b"\x00\xff", 2**70, True, -1.5, 1 + 2j),
            "ordered": OrderedDict(b=1, a=[2, {3}]),
            "default": defaultdict(list, {"x": [1]}),
            "counts": Counts("aab"),
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "array": np.arange(6, dtype=">i4").reshape(2, 3),
            "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "number": np.float32(1.5),
            "texts": np.array(["a", "bc"]),
        },
    }


def in_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.new_empty(tensor.numel()).copy_(tensor.flatten()).view(torch.uint8).tolist()  # type: ignore[no-any-return]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and in_bytes(one) == in_bytes(other)
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return set(one) == set(other) and all(alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return repr(one) == repr(other)


def test_what_torch_saved_is_read_as_it_was(tmp_path: Path) -> None:
    state = rich_state()
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = read_state(tmp_path / "dcp")
    assert alike(state, found)
    objects = training(seed=9)
    objects["model"].load_state_dict(found["model"])
    objects["optimizer"].load_state_dict(found["optimizer"])
    assert alike(state["model"], objects["model"].state_dict())
    assert alike(state["optimizer"], objects["optimizer"].state_dict())


@pytest.mark.parametrize("via", ["lakeckpt", "dcp"])
def test_a_state_goes_through_either_form_and_back_to_torch(via: str, tmp_path: Path) -> None:
    state = {name: value for name, value in rich_state().items() if name != "mixed"}
    dcp.save(state, checkpoint_id=tmp_path / "first", no_dist=True)
    convert_checkpoint(tmp_path / "first", tmp_path / "second", to=via)  # type: ignore[arg-type]
    assert alike(state, read_state(tmp_path / "second"))
    convert_checkpoint(tmp_path / "second", tmp_path / "third", to="dcp")
    again = {"model": training(seed=3)["model"].state_dict(), "step": 0}
    dcp.load(again, checkpoint_id=tmp_path / "third", no_dist=True)
    assert alike(again, {"model": state["model"], "step": 7})


class Stepped:
    """A scheduler's dict of steps, an optimizer that has no state of its own, and containers that hold nothing."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3])

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "scheduler": dict(self.scheduler.state_dict())}

    def steps(self, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            self.optimizer.step()
            self.scheduler.step()
            rates.append(self.optimizer.param_groups[0]["lr"])
        return rates


def test_keys_that_are_numbers_and_what_holds_nothing_go_through_our_form(tmp_path: Path) -> None:
    """torch's DCP makes texts of such keys, and leaves such dicts out: our form says beside it what they were."""
    stepped = Stepped()
    others = {"empty": {}, "deep": [{}, {"a": {-3: "x", 5: torch.ones(2)}}], "odd": {"7": 1}}
    others |= {"a.b": {}, "a": {"b": {}, "c": torch.ones(2)}, "config": {"param_groups": [{"params": [1, 2]}]}}
    torch.save({**stepped.state(), **others}, tmp_path / "state.pt")
    convert_checkpoint(tmp_path / "state.pt", tmp_path / "ours", to="lakeckpt")
    convert_checkpoint(tmp_path / "ours", tmp_path / "again", to="lakeckpt")
    for place in ("ours", "again"):
        found = read_state(tmp_path / place)
        assert alike({name: found[name] for name in others}, others)
        assert found["scheduler"]["milestones"] == {1: 1, 3: 1} and found["optimizer"]["state"] == {}
        other = Stepped()
        other.optimizer.load_state_dict(found["optimizer"])
        other.scheduler.load_state_dict(found["scheduler"])
        assert other.steps(4) == pytest.approx([0.1, 0.1, 0.01, 0.01])
    live = {"scheduler": dict(Stepped().scheduler.state_dict()), "odd": {"7": 0}}
    dcp.load(live, storage_reader=LakeStorageReader(tmp_path / "ours"), planner=LakeLoadPlanner(), no_dist=True)
    assert live["odd"] == {"7": 1} and live["scheduler"]["milestones"] == {1: 1, 3: 1}


def test_an_optimizer_without_a_state_is_whole_when_it_comes_from_torch_s_own_form(tmp_path: Path) -> None:
    dcp.save({"optimizer": Stepped().state()["optimizer"]}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other = Stepped()
    other.optimizer.load_state_dict(read_state(tmp_path / "dcp")["optimizer"])
    assert other.optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize(
    "lie", [None, [["odd"]], [["odd", None], []], [["odd"], ["7"]], [["odd", "7"], []], [["deep", 5], []]]
)
def test_what_lies_about_keys_is_damage(lie: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planners, "_untold", lambda *_: [("::untold:x", lie)])
    torch.save({"odd": {"7": 1}, "deep": [{"a": 1}]}, tmp_path / "state.pt")
    convert_checkpoint(tmp_path / "state.pt", tmp_path / "ours", to="lakeckpt")
    with pytest.raises(CheckpointDamaged, match=r"checkpoint\.lkc"):
        read_state(tmp_path / "ours")


def sharded(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(70.0).reshape(7, 10)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "copies": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": torch.full((3,), 5.0),
    }
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    dist.destroy_process_group()


def test_what_was_divided_over_ranks_is_put_together(tmp_path: Path) -> None:
    run_processes(2, sharded, 2, str(tmp_path))
    whole = torch.arange(70.0).reshape(7, 10)
    expected = {"rows": whole, "columns": whole, "copies": whole, "plain": torch.full((3,), 5.0)}
    assert alike(expected, read_state(tmp_path / "dcp"))


def test_a_run_becomes_what_others_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objects = trained() | {"reader": Reader()}
    with CheckpointManager(tmp_path / "run", objects) as manager:
        manager.restore()
        next(iter(objects["reader"]))
        manager.step()
    weights = objects["model"].state_dict()
    assert main(["convert", f"{tmp_path}/run", f"{tmp_path}/st", "--to", "safetensors", "--item", "model"]) == 0
    assert alike(dict(weights), load_file(tmp_path / "st" / "model.safetensors"))
    assert main(["convert", f"{tmp_path}/run", f"{tmp_path}/dcp", "--to", "dcp", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert (said["source"], said["target"], said["tensors"]) == ("run", "dcp", len(weights) + 18)
    fresh = {"model": training(seed=5)["model"].state_dict()}
    dcp.load(fresh, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert alike(dict(weights), dict(fresh["model"]))
    convert_checkpoint(tmp_path / "run", tmp_path / "lake", to="lakeckpt")
    fresh = {"model": training(seed=6)["model"].state_dict()}
    reader = LakeStorageReader(tmp_path / "lake")
    dcp.load(fresh, storage_reader=reader, planner=LakeLoadPlanner(), no_dist=True)
    assert alike(dict(weights), dict(fresh["model"]))
    assert read_state(tmp_path / "run")["reader"]["step"] == 1
    with pytest.raises(UnsupportedValue, match=r"safetensors hold tensors alone, .*\.lr \(float\)"):
        convert_checkpoint(tmp_path / "run", tmp_path / "st2", to="safetensors", item="optimizer")
    with pytest.raises(ConfigError, match="not empty"):
        convert_checkpoint(tmp_path / "run", tmp_path / "st", to="safetensors", item="model")
    with pytest.raises(ConfigError, match=r"no 'weights' in this checkpoint: it holds .*model"):
        convert_checkpoint(tmp_path / "run", tmp_path / "st2", to="safetensors", item="weights")


NARROW = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]


def test_every_dtype_that_safetensors_and_torch_have_is_read_and_written(tmp_path: Path) -> None:
    raw = torch.arange(96, dtype=torch.uint8)
    names = [*NARROW, "uint16", "uint32", "uint64", "int8", "bfloat16", "float16", "complex64"]
    tensors = {name: raw.clone().view(getattr(torch, name)).reshape(2, -1) for name in names if hasattr(torch, name)}
    tensors |= {"none": torch.empty(0, 2, dtype=torch.complex64), "scalar": torch.tensor(1j, dtype=torch.complex64)}
    (tmp_path / "theirs").mkdir()
    save_file(tensors, tmp_path / "theirs" / "x.safetensors")
    assert plain_bytes(tensors) == plain_bytes(read_state(tmp_path / "theirs"))
    write_safetensors(open_storage(tmp_path / "ours"), tensors)
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        assert plain_bytes(tensors) == plain_bytes({key: file.get_tensor(key) for key in tensors})


def plain_bytes(tensors: Any) -> dict[str, Any]:
    """dtype, shape, bytes: the narrow ones cannot be compared."""
    return {
        key: (str(one.dtype), tuple(one.shape), one.reshape(-1).view(torch.uint8).tolist() if one.numel() else [])
        for key, one in tensors.items()
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
            r"'a' is F6_E2M3 \[4\]: torch .* has no such dtype",
        ),
        (
            {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]},
            r"'a' is F4 \[2, 3\]: torch has pairs of them alone",
        ),
        ({"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}, r"'a' has 2 bytes, not those of F4 \[3\]"),
        ({"dtype": "C128", "shape": [1], "data_offsets": [0, 16]}, r"'C128', which this lakeckpt does not know"),
    ],
)
def test_a_dtype_that_torch_does_not_have_is_refused_by_its_name(
    tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    head = json.dumps({"a": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(entry["data_offsets"][1]))
    with pytest.raises((UnsupportedValue, CheckpointDamaged), match=message):
        read_state(tmp_path / "x.safetensors")


def test_safetensors_of_others_are_read_in_one_file_or_several(tmp_path: Path) -> None:
    tensors = {key.replace("torch.", ""): one for key, one in rich_state()["dtypes"].items() if "complex" not in key}
    (tmp_path / "one").mkdir()
    save_file(tensors, tmp_path / "one" / "weights.safetensors")
    assert alike(tensors, read_state(tmp_path / "one" / "weights.safetensors"))
    assert alike(tensors, read_state(tmp_path / "one"))
    paths = write_safetensors(open_storage(tmp_path / "many"), tensors, file_bytes=150)
    assert len(paths) > 3 and paths[-1].endswith("index.json")
    assert alike(tensors, read_state(tmp_path / "many"))
    assert alike(tensors, {k: v for path in paths[:-1] for k, v in load_file(tmp_path / "many" / path).items()})
    os.unlink(tmp_path / "many" / paths[1])
    with pytest.raises(CheckpointDamaged, match="which no file holds"):
        read_state(tmp_path / "many")


def test_a_file_of_torch_save_is_read_as_it_was_saved_and_its_old_form_refused(tmp_path: Path) -> None:
    objects = trained()
    state = {name: one.state_dict() for name, one in objects.items()} | {"epoch": 3}
    for name in ("a.pt", "a.pth", "pytorch_model.bin", "epoch=3.ckpt"):
        torch.save(state, tmp_path / name)
        assert alike(read_state(tmp_path / name), state)
    done = convert_checkpoint(tmp_path / "a.pt", tmp_path / "weights", to="safetensors", item="model")
    assert done.source == "torch" and alike(read_state(tmp_path / "weights"), dict(state["model"]))
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedValue, match=r"old\.pt: it is in the form of before torch 1\.6"):
        read_state(tmp_path / "old.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(UnsupportedValue, match=r"list\.pt: it holds a list, not a state"):
        read_state(tmp_path / "list.pt")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    with pytest.raises(UnsupportedValue, match=r"could make a torch\.nn\.modules\.linear\.Linear"):
        read_state(tmp_path / "module.pt")
    (tmp_path / "hub").mkdir()
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "hub" / "pytorch_model.bin")
    with pytest.raises(CheckpointNotFound, match=r"no \*\.safetensors, but pytorch_model\.bin: name that file"):
        read_state(tmp_path / "hub")


def test_a_run_becomes_a_file_that_torch_loads_without_running_code(tmp_path: Path) -> None:
    objects = trained() | {"reader": Reader()}
    with CheckpointManager(tmp_path / "run", objects) as manager:
        manager.restore()
        next(iter(objects["reader"]))
        manager.step()
    assert main(["convert", f"{tmp_path}/run", f"{tmp_path}/new/all.pt", "--to", "torch"]) == 0
    found = torch.load(tmp_path / "new" / "all.pt", weights_only=True)
    assert alike(found, read_state(tmp_path / "run")) and alike(found, read_state(tmp_path / "new" / "all.pt"))
    fresh = training(seed=5)
    fresh["model"].load_state_dict(found["model"])
    fresh["optimizer"].load_state_dict(found["optimizer"])
    assert alike(fresh["optimizer"].state_dict(), objects["optimizer"].state_dict())
    done = convert_checkpoint(tmp_path / "run", tmp_path / "model.ckpt", to="torch", item="model")
    assert (done.target, done.tensors) == ("torch", len(objects["model"].state_dict()))
    with pytest.raises(ConfigError, match=r"model\.ckpt' is there already"):
        convert_checkpoint(tmp_path / "run", tmp_path / "model.ckpt", to="torch")
    assert alike(torch.load(tmp_path / "model.ckpt", weights_only=True), dict(objects["model"].state_dict()))
    with pytest.raises(ConfigError, match=r"is called \*\.pt, "):
        convert_checkpoint(tmp_path / "run", tmp_path / "model", to="torch")
    with pytest.raises(ConfigError, match=r"files of torch\.save are written into local folders"):
        convert_checkpoint(tmp_path / "run", "s3://there/model.pt", to="torch")
    assert sorted(os.listdir(tmp_path)) == ["model.ckpt", "new", "run"] and os.listdir(tmp_path / "new") == ["all.pt"]


def test_what_torch_would_refuse_is_named_and_what_is_shared_or_narrow_is_written_as_it_is(tmp_path: Path) -> None:
    path, state = tmp_path / "x.pt", rich_state()
    with pytest.raises(
        UnsupportedValue, match=r"holds mixed\.array \(numpy\.ndarray\), .*mixed\.number \(numpy\.float32\)"
    ):
        write_torch_file(str(path), state)
    for name in ("array", "fortran", "number", "texts"):
        del state["mixed"][name]
    state["tied"] = state["scalar"]
    write_torch_file(str(path), state)
    found = torch.load(path, weights_only=True)
    assert alike(found, state | {"mixed": state["mixed"] | {"default": {"x": [1]}}})
    assert found["tied"].data_ptr() == found["scalar"].data_ptr() and found["view"].untyped_storage().nbytes() == 16
    with pytest.raises(UnsupportedValue, match=r"holds here\.1 \(tests\..*\.Boom\), there\..* as a key \("):
        write_torch_file(str(tmp_path / "y.pt"), {"here": [1, Boom()], "there": {enum.Enum("Own", "a").a: 1}})
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("where", ["save", "load", "link"])
def test_a_file_that_could_not_be_written_whole_is_not_there(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise pickle.UnpicklingError("not this") if where == "load" else OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os if where == "link" else torch, where, refuse)
    with pytest.raises(UnsupportedValue if where == "load" else SaveFailed, match=r"not this|full"):
        write_torch_file(str(tmp_path / "x.pt"), {"a": torch.ones(3)})
    assert os.listdir(tmp_path) == []


def test_a_run_may_be_called_as_files_are(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run.ckpt", trained()) as saver:
        saver.restore()
        saver.save()
    assert set(read_state(tmp_path / "run.ckpt")) == set(trained())


def test_a_record_that_claims_more_than_its_file_has_makes_no_memory(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    entry = data.rindex(b"a/data/0") - 46  # of the central directory: both sizes stand 20 bytes behind its begin
    assert data[entry : entry + 4] == b"PK\x01\x02"
    data[entry + 20 : entry + 28] = (2**31).to_bytes(4, "little") * 2
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="has 2147483648 bytes, more than the whole file"):
        read_state(tmp_path / "a.pt")


def test_nothing_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        read_state(tmp_path)


class Boom:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["LAKECKPT_BOOM"],))


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is made where a pickle of a `Boom` is run."""
    monkeypatch.setenv("LAKECKPT_BOOM", str(tmp_path / "boom"))
    return tmp_path / "boom"


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("field", ["planner_data", "state_dict_metadata", "storage_data", "version", "key", "shape"])
def test_doctored_metadata_run_no_code(field: str, protocol: int, tmp_path: Path, mark: Path) -> None:
    folder = saved(tmp_path / "dcp")
    metadata = metadata_of(folder)
    if field == "key":
        metadata.state_dict_metadata[Boom()] = 5
    elif field == "shape":
        metadata.state_dict_metadata["a"].size = Boom()
    else:
        setattr(metadata, field, Boom())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
    with contextlib.suppress(LakeckptError):  # what is not needed is not looked at
        read_state(folder)
    assert not mark.exists()
    pickle.loads((folder / ".metadata").read_bytes()) if field != "key" else os.mkdir(mark)
    assert mark.exists()  # this is what it is for


def test_a_doctored_value_runs_no_code(tmp_path: Path, mark: Path) -> None:
    dcp.save({"a": torch.ones(3), "value": {"b": [Boom()]}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(
        UnsupportedValue, match=r"'value.b' in __0_0.distcp: 0: only running its pickle could make .*mkdir"
    ):
        read_state(tmp_path / "dcp")
    assert not mark.exists()


def saved(folder: Path) -> Path:
    dcp.save(
        {"a": torch.arange(40.0), "b": {"c": torch.arange(9)}, "value": (1, "x")}, checkpoint_id=folder, no_dist=True
    )
    return folder


def test_a_bit_that_is_flipped_in_the_bytes_of_a_tensor_is_noticed_where_torch_notices_none(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp")
    (file,) = folder.glob("*.distcp")
    whole = file.read_bytes()
    data = torch.arange(40.0).numpy().tobytes()
    start = whole.index(data)
    for at in range(start, start + len(data), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(CheckpointDamaged, match="not what was written"):
            read_state(folder)


def test_damage_anywhere_is_a_typed_error_or_changes_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp")
    expected = read_state(folder)
    (file,) = folder.glob("*.distcp")
    for path, step in ((folder / ".metadata", 3), (file, 41)):
        whole = path.read_bytes()
        for at in range(0, len(whole), step):
            for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]):
                path.write_bytes(data)
                try:
                    found = read_state(folder)
                except LakeckptError:
                    continue
                assert path.name == ".metadata" or alike(expected, found)  # torch's pickle has no checksum of its own
        path.write_bytes(whole)


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def lie(folder: Path, change: Any) -> None:
    metadata = metadata_of(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def of(metadata: Any, name: str) -> Any:
    return next(one for index, one in metadata.storage_data.items() if index.fqn == name)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(of(m, "a"), "relative_path", "../secret"),
        lambda m: setattr(of(m, "a"), "relative_path", "/etc/passwd"),
        lambda m: setattr(of(m, "a"), "offset", 2**50),
        lambda m: setattr(of(m, "a"), "length", 2**61),
        lambda m: setattr(of(m, "a"), "offset", -5),
        lambda m: setattr(of(m, "a"), "transform_descriptors", ["zstd"]),
        lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([2**40])),
        lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([39])),
        lambda m: m.state_dict_metadata["a"].chunks.append(m.state_dict_metadata["a"].chunks[0]),
        lambda m: setattr(m.state_dict_metadata["a"].chunks[0], "sizes", torch.Size([2**59])),
        lambda m: m.planner_data.update({"a": ("b", 10**9)}),
        lambda m: m.planner_data.update({"a": ("b", -1)}),
        lambda m: m.planner_data.update({"a": ("b", "c")}),
        lambda m: m.planner_data.update({"a": ("value", "x")}),
        lambda m: m.planner_data.update({"a": tuple("x" * 200)}),
        lambda m: setattr(m, "storage_data", {}),
        lambda m: setattr(m, "state_dict_metadata", [1]),
    ],
)
def test_metadata_that_lie_are_refused_and_nothing_outside_is_read(change: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp")
    (tmp_path / "secret").write_bytes(next(folder.glob("*.distcp")).read_bytes())
    lie(folder, change)
    with pytest.raises((CheckpointDamaged, UnsupportedValue)):
        read_state(folder)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp")
    (file,) = folder.glob("*.distcp")
    file.rename(tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(StorageError, match="symbolic link"):
        read_state(folder)


def test_an_archive_that_is_not_as_torch_writes_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    dcp.save({"value": "x" * 100}, checkpoint_id=folder, no_dist=True)
    (file,) = folder.glob("*.distcp")
    with zipfile.ZipFile(file) as found:
        members = {one.filename: found.read(one) for one in found.infolist()}
    for how in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        with zipfile.ZipFile(file, "w", how) as made:
            for name, data in members.items():
                made.writestr(name, data)
        lie(folder, lambda m: setattr(of(m, "value"), "length", file.stat().st_size))
        if how == zipfile.ZIP_STORED:
            assert read_state(folder) == {"value": "x" * 100}
        else:
            with pytest.raises(UnsupportedValue, match="compressed"):
                read_state(folder)
