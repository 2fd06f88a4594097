"""How busy the GPUs of a node are, as ``nvidia-smi`` says it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lakeckpt.watch.system import gpus
from lakeckpt.watch.system.gpus import gpu_of, look_at_gpus, parsed
from tests.patience import PATIENCE_S

SAID = "0, GPU-1f, 100, 88.31\n1, GPU-2a, 0, [N/A]\n10, GPU-3b, [N/A], 70\n"


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_the_gpus_of_a_node_are_those_that_the_tool_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_PATIENCE_S", PATIENCE_S)
    tool(tmp_path, monkeypatch, f"printf '%s' '{SAID}'")
    found = look_at_gpus()
    assert found == parsed(SAID) and found["GPU-2a"] == found["1"]
    assert (str(found["0"]), str(found["1"])) == ("GPU 0 is used at 100 %, with 88 W", "GPU 1 is used at 0 %")


@pytest.mark.parametrize("script", ["exec sleep 1000", f"printf '%s' '{SAID}'; exit 9"])
def test_a_tool_that_hangs_or_fails_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(gpus, "_KILLED_S", PATIENCE_S)  # it is killed, however busy the machine is
    tool(tmp_path, monkeypatch, script)
    assert look_at_gpus() == {}


@pytest.mark.parametrize(
    ("environment", "index"),
    [
        ({"LOCAL_RANK": "1"}, 1),
        ({"LOCAL_RANK": "2"}, 10),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "10,0"}, 0),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-2a"}, 1),  # one for each rank
        ({"LOCAL_RANK": "3"}, None),
        ({"CUDA_VISIBLE_DEVICES": "7"}, None),
        ({}, None),
    ],
)
def test_a_trainer_has_the_gpu_of_its_local_rank(
    environment: dict[str, str], index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=clean | environment) as process:
        assert gpu_of(process.pid, parsed(SAID)) is None  # it has opened none
        monkeypatch.setattr(gpus, "_has_opened_one", lambda pid: True)
        while b"input()" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        found = gpu_of(process.pid, parsed(SAID))
        process.kill()
    assert (None if found is None else found.index) == index
    assert gpu_of(process.pid, parsed(SAID)) is None  # it has ended
