"""What cannot be converted is refused with an error of ours that names it, before anything is written."""

from __future__ import annotations

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
        (torch.bfloat16, "v.*torch.dtype"),
        ({"a": torch.float16}, r"v\.a.*torch.dtype"),
        ({1, 2}, "v.*set"),
        (frozenset([1]), "v.*frozenset"),
        (bytearray(b"x"), "v.*bytearray"),
        ((1, {2}), "v.*1.*set"),
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
