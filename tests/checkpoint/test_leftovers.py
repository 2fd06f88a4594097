"""What killed savers leave behind is cleared when the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from lakeckpt import CheckpointManager

DYING = """
import os, signal, sys
from lakeckpt.lake.storage.open import open_storage

def chunks():
    yield b"half of it"
    os.kill(os.getpid(), signal.SIGKILL)

open_storage(sys.argv[1]).put("objects/0000000000/x", chunks())
"""


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_restore_clears_what_a_killed_writer_left(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, {"model": torch.nn.Linear(1, 1)}, persist_every=1) as manager:
        manager.restore()
        manager.step()
    whole = files_below(tmp_path)
    died = subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], env={**os.environ})
    assert died.returncode == -signal.SIGKILL
    assert files_below(tmp_path) > whole
    with CheckpointManager(tmp_path, {"model": torch.nn.Linear(1, 1)}, persist_every=1) as manager:
        assert manager.restore() == 1
    assert files_below(tmp_path) - whole == {"log/0000000002.lkc", "log/0000000003.lkc"}
