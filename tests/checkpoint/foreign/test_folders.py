"""What lies in a folder is a checkpoint only where somebody said so: leftovers and neighbours are told, never read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from lakeckpt import CheckpointManager, LakeSavePlanner, LakeStorageWriter, convert_checkpoint, read_state
from lakeckpt.errors import CheckpointNotFound
from tests.checkpoint.rig import training

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class CutOff(LakeStorageWriter):
    def finish(self, *_: Any, **__: Any) -> None:
        raise KeyError("cut off here")


def test_a_save_that_was_cut_off_is_no_checkpoint_of_its_files(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(2, 2).state_dict(), "step": 7}
    with pytest.raises(CheckpointException, match="cut off here"):
        dcp.save(state, storage_writer=CutOff(tmp_path / "run"), planner=LakeSavePlanner(), no_dist=True)
    assert list((tmp_path / "run" / "data").glob("*.safetensors"))
    with pytest.raises(CheckpointNotFound, match="in a save that was cut off: nothing was saved"):
        read_state(tmp_path / "run")
    with pytest.raises(CheckpointNotFound, match="name the folder above"):
        read_state(tmp_path / "run" / "data")
    with pytest.raises(CheckpointNotFound, match="cut off"):
        convert_checkpoint(tmp_path / "run", tmp_path / "out", to="safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["lakeckpt", "dcp", "run", "safetensors"])
def test_the_folder_above_a_checkpoint_is_none_and_the_one_to_name_is_told(form: Any, tmp_path: Path) -> None:
    where = tmp_path / "above" / "step-7"
    if form == "run":
        with CheckpointManager(where, training(), persist_every=1) as saver:
            saver.restore()
            saver.step()
    else:
        torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
        convert_checkpoint(tmp_path / "a.pt", where, to=form)
    named = "step-7/model.safetensors: name that file" if form == "safetensors" else "one in step-7: name that folder"
    with pytest.raises(CheckpointNotFound, match=named):
        read_state(tmp_path / "above")
    assert read_state(where)


def test_safetensors_of_two_models_below_one_folder_are_not_mixed(tmp_path: Path) -> None:
    for name in ("unet", "vae"):
        (tmp_path / name).mkdir()
        save_file({name: torch.ones(1)}, tmp_path / name / "model.safetensors")
    with pytest.raises(CheckpointNotFound, match=r"unet/model\.safetensors: name that file"):
        read_state(tmp_path)
    save_file({"own": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "vae" / "model.safetensors.index.json").write_text('{"weight_map": {"gone": "x"}}')
    assert list(read_state(tmp_path)) == ["own"]
