"""What ranks hold in parts is captured beside training as well: their parts, as they were at the cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.capturing.reading import CUT, assert_same, kept_state, state_of
from tests.checkpoint.test_sharded import begin, fsdp
from tests.tracking.processes import run_processes


def captured(rank: int, world_size: int, folder: str) -> None:
    begin(rank, world_size, folder)
    objects = fsdp(3, world_size)
    identity = ArenaIdentity(run=b"r" * 16, rank=rank, world=world_size)
    arenas = ArenaFolder(Path(folder, f"arenas-{rank}"))
    engine = CaptureEngine(objects, identity, folder=arenas, slice_bytes=64)
    for step in range(1, 5):
        objects["model"](torch.randn(4, 7)).square().mean().backward()
        objects["optimizer"].step()
        objects["optimizer"].zero_grad()
        expected = state_of(objects)
        assert engine.cut(CutId(attempt=0, step=step), digest=CUT, must=True)
        objects["model"](torch.randn(4, 7)).square().mean().backward()
        objects["optimizer"].step()  # fences
        engine.wait()
        assert_same(kept_state(arenas, step), expected)
        late_bytes = sum(one.nbytes for one in engine.planner.late.values())
        assert late_bytes > 0.9 * sum(map(len, expected[1].values())), "most of it is copied beside training"
    engine.close()


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_the_parts_of_a_sharded_model_wait_for_the_copier_and_hold_their_cut(tmp_path: Path, world_size: int) -> None:
    run_processes(world_size, captured, world_size, str(tmp_path))
