"""The checksums of a cut are those of its bytes, whichever arena lies under the name that the agent knows."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from lakeckpt.checkpoint.agent.generations import Generations
from lakeckpt.checkpoint.arena.contents import contents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.format.digests import LEAF_BYTES, leaf_digests
from lakeckpt.errors import CaptureWarning
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.capturing.device import Device, LinkedEngine, SimulatedLink
from tests.checkpoint.capturing.reading import CUT, IDENTITY, steps_in, tensor_bytes


@pytest.mark.parametrize("why", ["the state grows", "its documents grow", "it was removed"])
def test_captures_of_a_device_are_whole_after_their_arena_was_made_anew(
    tmp_path: Path, why: Literal["the state grows", "its documents grow", "it was removed"]
) -> None:
    folder = ArenaFolder(tmp_path / "arenas")
    model, links = nn.Linear(64, 64), {torch.device("cpu"): SimulatedLink(Device(0))}
    readers = {"reader": b"place"}
    with (
        contextlib.closing(Generations(folder, IDENTITY)) as agent,
        contextlib.closing(LinkedEngine({"model": model}, IDENTITY, folder=folder, links=links)) as engine,
    ):
        for step in range(1, 9):
            with torch.no_grad():
                model.weight.fill_(step)
            if step == 4 and why == "the state grows":
                model.register_parameter("grown", nn.Parameter(torch.ones(5000)))
            elif step == 4 and why == "its documents grow":
                readers = {"reader": bytes(2**20)}
            elif step == 4:
                (arena,) = folder.found()
                (tmp_path / "arenas" / arena.name).unlink()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CaptureWarning)  # "an arena was removed"
                engine.cut(CutId(attempt=0, step=step), digest=CUT, readers=readers, must=True)
                engine.wait()
            agent.look_over(lambda: True)
    assert steps_in(folder) == [8, 7, 6]
    (arena,) = folder.found()
    with folder.open(arena.name) as opened:
        for step in (6, 7, 8):
            with opened.hold(step=step) as held:
                assert held is not None
                assert held.checksums() == leaf_digests(held.data, LEAF_BYTES)
                weight = tensor_bytes(contents_of(held), "model/weight")
                assert torch.frombuffer(weight, dtype=torch.float32).unique().tolist() == [step]
