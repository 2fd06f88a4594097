"""What cannot be converted is refused with an error of ours that names it, before anything is written."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt import LakeStorageReader, convert_checkpoint, read_state
from lakeckpt.checkpoint.dcp.metadata import DATA
from lakeckpt.cli.main import main
from lakeckpt.errors import CheckpointDamaged, UnsupportedValue


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.bfloat16, r"^v: .*torch\.dtype"),
        ({"a": torch.float16}, r"^v\.a: .*torch\.dtype"),
        ({1, 2}, "^v: .*set"),
        (frozenset([1]), "^v: .*frozenset"),
        (bytearray(b"x"), "^v: .*bytearray"),
        ((1, {2}), r"^v\[1\]: .*set"),
    ],
)
def test_a_value_that_our_form_does_not_take_is_named_and_nothing_is_written(
    value: Any, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeckpt.checkpoint.dcp.writer.FILE_BYTES", 1)  # the tensor is a file by itself
    torch.save({"w": torch.ones(4), "v": value}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedValue, match=what):
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "out", to="lakeckpt")
    assert main(["convert", f"{tmp_path}/a.pt", f"{tmp_path}/out", "--to", "lakeckpt"]) != 0
    assert "cannot be written" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "a.pt"]


@pytest.mark.parametrize("to", ["lakeckpt", "dcp"])
def test_two_values_that_dcp_would_call_the_same_are_named(to: Any, tmp_path: Path) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedValue, match=r"several values of this state 'a\.b'"):
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "out", to=to)
    done = convert_checkpoint(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    assert done.tensors == 2 and set(read_state(tmp_path / "b.pt")) == {"a.b", "a"}


def test_damage_that_dcp_meets_is_told_as_damage(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "ours", to="lakeckpt")
    (file,) = (tmp_path / "ours" / DATA).iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointDamaged, match="are not what was written"):
        read_state(tmp_path / "ours")


def test_an_interrupt_while_dcp_works_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "ours", to="lakeckpt")
    monkeypatch.setattr(LakeStorageReader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read_state(tmp_path / "ours")


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.zeros(1).expand(5), r"model\.layers\.1\.w: .* repeats the 1 elements .*contiguous\(\)"),
        (torch.arange(6.0).as_strided((3, 3), (1, 1)).clone().as_strided((9, 9), (1, 0)), r"model\.layers\.1\.w: "),
        (Thing(), r"model\.layers\.1\.w: only running its pickle could make a .*Thing"),
        (torch.ones(1).to_sparse(), r"model\.layers\.1\.w: only running its pickle"),
    ],
)
def test_what_cannot_be_read_of_a_file_of_torch_save_is_named_by_its_path(
    value: Any, what: str, tmp_path: Path
) -> None:
    layers = [{"w": torch.ones(2)}, OrderedDict(v=1, w=value)]
    torch.save({"first": 1, "model": OrderedDict(layers=layers), "last": 2}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedValue, match=what):
        read_state(tmp_path / "a.pt")
