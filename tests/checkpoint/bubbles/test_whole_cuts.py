"""Whatever part of a capture moves in bubbles, and whatever at the fence, a generation holds one step alone."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.bubbles.moved import moved_bytes, urgent_bytes
from tests.checkpoint.capturing.reading import CUT, IDENTITY
from tests.checkpoint.capturing.stamped import Stamped, Stamper, check_stamps
from tests.patience import PATIENCE_S

STEPS = 40


class Told(BubbleGate):
    """Tells of each slice that moved."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.one_moved = threading.Semaphore(0)

    def moved(self, size_bytes: int, begin_s: float, end_s: float, /) -> None:
        super().moved(size_bytes, begin_s, end_s)
        self.one_moved.release()


def test_cuts_that_move_partly_in_bubbles_are_of_one_step(tmp_path: Path) -> None:
    chance = random.Random(7)
    model = Stamped((2000, 7, 300))
    optimizer = Stamper(model, lambda stamp: stamp())
    gate, folder = Told(iterations=STEPS), ArenaFolder(tmp_path / "arenas")
    objects = {"model": model, "optimizer": optimizer}
    engine = CaptureEngine(objects, IDENTITY, folder=folder, gate=gate, slice_bytes=256)
    for step in range(1, STEPS + 1):
        optimizer.step()
        model.seen.fill_(step)  # type: ignore[operator, union-attr]
        gate.cut(step)
        assert engine.cut(CutId(attempt=0, step=step), digest=CUT, common=step - 1, must=True)
        for _ in range(chance.randrange(3)):
            with gate.idle(f"gap of {step}"):
                for _ in range(chance.randrange(20)):
                    assert gate.one_moved.acquire(timeout=PATIENCE_S)
        if step % 10 == 0:
            engine.fence()
            assert engine.wait() == step
            (arena,) = folder.found()
            with folder.open(arena.name) as opened:
                assert check_stamps(opened)[0] == step
    records = gate.records()
    assert 0 < urgent_bytes(records) < moved_bytes(records), "some moved in bubbles, and some at the fence"
    engine.close()
