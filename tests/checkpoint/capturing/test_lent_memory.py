"""Memory that is read beside training stays where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.capturing.reading import CUT, IDENTITY


def test_what_is_read_beside_training_cannot_be_resized_and_buffers_can(tmp_path: Path) -> None:
    model = torch.nn.Linear(256, 256)
    model.register_buffer("bank", torch.zeros(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = CaptureEngine({"model": model, "optimizer": optimizer}, IDENTITY, folder=ArenaFolder(tmp_path / "arenas"))
    assert engine.cut(CutId(attempt=0, step=1), digest=CUT, must=True)
    with pytest.raises(RuntimeError, match="not resizable"):
        model.weight.data.resize_(512, 512)
    model.bank.resize_(512, 512)
    assert engine.wait() == 1
    engine.close()
