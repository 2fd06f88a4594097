"""Checkpoints of others are read as their own readers read them, and others read what we write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.interop.safetensors_files import write_safetensors
from lakeckpt.cli.main import main
from lakeckpt.convert import convert_checkpoint, read_state
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, UnsupportedValue
from lakeckpt.lake.storage.open import open_storage
from tests.checkpoint.interop.test_run_reader import Odd, same, trained
from tests.checkpoint.rig import Counter, Reader, training

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def saved_run(folder: Path) -> dict[str, Any]:
    objects = trained() | {"reader": Reader(), "odd": Odd(2.5)}
    with CheckpointManager(folder, objects) as manager:
        manager.restore()
        next(iter(objects["reader"]))
        manager.step()
    return objects


def state_of(objects: dict[str, Any]) -> dict[str, Any]:
    return {name: objects[name].state_dict() for name in ("model", "optimizer", "scheduler", "odd")}


def test_the_state_of_a_run_is_read_as_it_was_saved(tmp_path: Path) -> None:
    objects = saved_run(tmp_path)
    found = read_state(tmp_path)
    assert found.pop("reader")["step"] == 1
    assert same(found, state_of(objects))
    assert found["scheduler"]["milestones"] == {3: 1, 6: 1}
    assert same(read_state(tmp_path, item="optimizer.state.0"), objects["optimizer"].state_dict()["state"][0])


def test_a_part_of_a_run_is_read_where_another_part_is_damaged(tmp_path: Path) -> None:
    objects = saved_run(tmp_path)
    weight = objects["model"].state_dict()["0.weight"].numpy().tobytes()
    damaged = 0
    for path in (tmp_path / "objects").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        at = data.find(weight)
        if at >= 0:
            damaged += 1
            data[at] ^= 1
            path.write_bytes(data)
    assert damaged == 1
    assert same(read_state(tmp_path, item="optimizer"), objects["optimizer"].state_dict())
    with pytest.raises(CheckpointDamaged, match=r"model/0.weight"), pytest.warns(UserWarning, match="not whole"):
        read_state(tmp_path, item="model")


def test_a_run_becomes_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = dict(saved_run(tmp_path / "run")["model"].state_dict())
    assert (
        main(["convert", f"{tmp_path}/run", f"{tmp_path}/st", "--to", "safetensors", "--item", "model", "--json"]) == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert (said["source"], said["target"], said["tensors"]) == ("run", "safetensors", len(weights))
    assert same(weights, load_file(tmp_path / "st" / "model.safetensors"))
    assert same(weights, read_state(tmp_path / "st"))
    with pytest.raises(UnsupportedValue, match=r"safetensors hold tensors alone, .*\.lr \(float\)"):
        convert_checkpoint(tmp_path / "run", tmp_path / "st2", to="safetensors", item="optimizer")
    with pytest.raises(ConfigError, match="not empty"):
        convert_checkpoint(tmp_path / "run", tmp_path / "st", to="safetensors", item="model")
    with pytest.raises(ConfigError, match=r"no 'weights' in this checkpoint: it holds .*model"):
        convert_checkpoint(tmp_path / "run", tmp_path / "st2", to="safetensors", item="weights")
    assert not (tmp_path / "st2").exists()


def test_a_run_becomes_a_file_that_torch_loads_without_running_code(tmp_path: Path) -> None:
    objects = saved_run(tmp_path / "run")
    assert main(["convert", f"{tmp_path}/run", f"{tmp_path}/new/all.pt", "--to", "torch"]) == 0
    found = torch.load(tmp_path / "new" / "all.pt", weights_only=True)
    assert same(found, read_state(tmp_path / "run")) and same(found, read_state(tmp_path / "new" / "all.pt"))
    fresh = training(seed=5)
    fresh["optimizer"].load_state_dict(found["optimizer"])
    assert same(fresh["optimizer"].state_dict(), objects["optimizer"].state_dict())
    done = convert_checkpoint(tmp_path / "run", tmp_path / "model.ckpt", to="torch", item="model")
    assert (done.target, done.tensors, done.values) == ("torch", len(objects["model"].state_dict()), 0)
    before = (tmp_path / "model.ckpt").read_bytes()
    with pytest.raises(ConfigError, match=r"model\.ckpt' exists already"):
        convert_checkpoint(tmp_path / "run", tmp_path / "model.ckpt", to="torch")
    with pytest.raises(ConfigError, match=r"is called \*\.pt, "):
        convert_checkpoint(tmp_path / "run", tmp_path / "model.weights", to="torch")
    assert (tmp_path / "model.ckpt").read_bytes() == before


def test_a_folder_of_dcp_is_refused_with_the_tool_of_torch_that_makes_a_file_of_it(tmp_path: Path) -> None:
    state = {"model": dict(training()["model"].state_dict()), "epoch": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ConfigError, match=r"is a folder of DCP.*format_utils dcp_to_torch FOLDER"):
        read_state(tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "state.pt")
    assert same(read_state(tmp_path / "state.pt"), state)


def test_a_run_becomes_a_folder_of_dcp_by_the_tool_of_torch(tmp_path: Path) -> None:
    objects = saved_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="format_utils torch_to_dcp"):
        convert_checkpoint(tmp_path / "run", tmp_path / "dcp", to="dcp")  # type: ignore[arg-type]
    convert_checkpoint(tmp_path / "run", tmp_path / "run.pt", to="torch", step=1, rank=0)
    torch_save_to_dcp(tmp_path / "run.pt", tmp_path / "dcp")
    fresh = {"model": training(seed=5)["model"].state_dict()}
    dcp.load(fresh, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(dict(fresh["model"]), dict(objects["model"].state_dict()))


def test_a_file_of_torch_is_written_to_a_local_disk(tmp_path: Path) -> None:
    saved_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="torch writes local files"):
        convert_checkpoint(tmp_path / "run", "s3://bucket/out.pt", to="torch", item="model")


def test_what_torch_would_not_load_is_not_left_behind(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", {"n": Counter({"array": np.array(["a", "b"])})}) as manager:
        manager.restore()
        manager.step()
    with pytest.raises(UnsupportedValue, match=r"would not load this state: .*numpy.*: choose a part"):
        convert_checkpoint(tmp_path / "run", tmp_path / "out" / "a.pt", to="torch")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_of_torch_save_is_read_without_running_code(tmp_path: Path) -> None:
    state = state_of(trained() | {"odd": Odd(1.5)}) | {"epoch": 3}
    for name in ("a.pt", "a.pth", "pytorch_model.bin", "epoch=3.ckpt"):
        torch.save(state, tmp_path / name)
        assert same(read_state(tmp_path / name), state)
    done = convert_checkpoint(tmp_path / "a.pt", tmp_path / "weights", to="safetensors", item="model")
    assert done.source == "torch" and same(read_state(tmp_path / "weights"), dict(state["model"]))
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(UnsupportedValue, match=r"list\.pt: it holds a list, not a state"):
        read_state(tmp_path / "list.pt")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    with pytest.raises(UnsupportedValue, match=r"module\.pt: torch.load.* refuses it: .*Linear"):
        read_state(tmp_path / "module.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-100])
    with pytest.raises(CheckpointDamaged, match=r"a\.pt: torch\.load cannot read it"):
        read_state(tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="is not a run"):
        read_state(tmp_path / "a.pth", rank=0)


def test_safetensors_are_written_in_several_files_with_an_index(tmp_path: Path) -> None:
    shared = torch.arange(8.0)
    tensors = {"a": shared, "b": torch.ones(3, 4).bfloat16(), "tied": shared, "turned": torch.ones(2, 3).T, "c": shared}
    paths = write_safetensors(open_storage(tmp_path), tensors, file_bytes=70)
    assert paths[-1] == "model.safetensors.index.json" and len(paths) == 4
    assert same(read_state(tmp_path), tensors)
    index = json.loads((tmp_path / paths[-1]).read_text())
    assert set(index["weight_map"]) == set(tensors) and index["metadata"]["total_size"] == 3 * 32 + 2 * 24
    (tmp_path / paths[1]).unlink()
    with pytest.raises(CheckpointDamaged, match="which no file holds"):
        read_state(tmp_path)
    with pytest.raises(UnsupportedValue, match="safetensors cannot hold this state"):
        write_safetensors(open_storage(tmp_path / "x"), {"a": torch.ones(2, dtype=torch.complex128)})


def test_safetensors_and_files_of_torch_are_read(tmp_path: Path) -> None:
    place = str(tmp_path / "place")
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2)}
    save_file(tensors, tmp_path / "x.safetensors")
    torch.save(tensors, tmp_path / "x.pt")
    for name in ("x.safetensors", "x.pt"):
        open_storage(place).put(name, [(tmp_path / name).read_bytes()])
        assert same(read_state(f"{place}/{name}"), tensors)
    assert same(read_state(place), tensors)


def test_safetensors_that_hold_parts_of_tensors_or_are_damaged_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "x.safetensors", metadata={"DCP_SHARDING_INFO": "{}"})
    with pytest.raises(UnsupportedValue, match="holds parts of tensors"):
        read_state(tmp_path)
    save_file({"a": torch.ones(4)}, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match=r"x\.safetensors: safetensors cannot read it"):
        read_state(tmp_path / "x.safetensors")


def test_a_folder_without_a_checkpoint_is_refused_with_what_lies_in_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="but 0 other files"):
        read_state(tmp_path)
    saved_run(tmp_path / "jobs" / "run")
    with pytest.raises(CheckpointNotFound, match="a run in run: name that folder"):
        read_state(tmp_path / "jobs")
    (tmp_path / "hub").mkdir()
    torch.save({}, tmp_path / "hub" / "a.bin")
    with pytest.raises(CheckpointNotFound, match=r"but a\.bin: name that file"):
        read_state(tmp_path / "hub")


PARTS: dict[Any, Any] = {
    "a": {"b": {"c.d": {"is": 1}}, "b.c": {"is": 2}},
    "a.x": {"is": 3},
    "o": {"state": {0: {"is": 5}}, "groups": [{}, {"is": 7}], "lr": 0.1},
    "twice.x": {},
    "twice": {"x": {}},
}


@pytest.mark.parametrize(
    ("item", "number"), [("a.b.c.d", 1), ("a.b.c", 2), ("a.x", 3), ("o.state.0", 5), ("o.groups.1", 7)]
)
def test_a_part_is_named_by_its_path_though_names_have_dots_or_are_numbers(
    item: str, number: int, tmp_path: Path
) -> None:
    torch.save(PARTS, tmp_path / "a.pt")
    assert read_state(tmp_path / "a.pt", item=item) == {"is": number}


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ("twice.x", "names 2 parts"),
        ("a.y", r"there is no 'a\.y' in this checkpoint: it holds b, b\.c"),
        ("o.groups.2", "it holds 0, 1"),
        ("o.lr.x", "it holds no names"),
        ("o.groups", "is a list, not a state"),
        ("o.lr", "is a float, not a state"),
    ],
)
def test_a_part_that_is_not_there_or_is_there_twice_is_refused(item: str, why: str, tmp_path: Path) -> None:
    torch.save(PARTS, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=why):
        read_state(tmp_path / "a.pt", item=item)
