"""Memory that is read beside training stays where it is, and what is lost of helpers is told once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.capture.store import ArenaStore
from tests.checkpoint.capturing.reading import CUT, IDENTITY


def test_what_is_read_beside_training_cannot_be_resized_and_buffers_can(tmp_path: Path) -> None:
    model = torch.nn.Linear(256, 256)
    model.register_buffer("bank", torch.zeros(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = CaptureEngine({"model": model, "optimizer": optimizer}, IDENTITY, folder=ArenaFolder(tmp_path / "arenas"))
    assert engine.cut(1, attempt="a", cut=CUT, must=True)
    with pytest.raises(RuntimeError, match="not resizable"):
        model.weight.data.resize_(512, 512)
    model.bank.resize_(512, 512)
    assert engine.wait() == 1
    engine.close()


def test_of_two_captures_that_lose_one_checksummer_the_first_one_tells(tmp_path: Path) -> None:
    store = ArenaStore(ArenaFolder(tmp_path / "arenas"), IDENTITY, step=0)
    lost: Any = object()
    other: Any = object()
    store.checksummer = lost
    store.lose_checksummer(lost, "it died")
    told = store.warning()
    assert told is not None and told.startswith("it died: checksums are taken by threads")
    assert (store.checksummer, store.warning()) == (None, None)
    store.checksummer = other
    store.lose_checksummer(lost, "it died")
    assert (store.checksummer, store.warning()) == (other, None)
    store.close(remove=False)
    assert store.checksummer is None
