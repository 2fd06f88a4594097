"""Windows of a real device: where its work says they are, and captures that move in them are whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lakeckpt import CheckpointManager
from lakeckpt.bubbles import Bubbles
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.bubbles.device import CudaMarks
from lakeckpt.checkpoint.bubbles.record import waits_of
from tests.checkpoint.capturing.reading import kept_state
from tests.gpu.device import DEVICE, MARKS, arenas

__all__ = ["arenas"]
pytestmark = [*MARKS, pytest.mark.skipif(DEVICE != "cuda", reason="only a device has a line of time of its own")]
STEPS = 30
CYCLES = 10**8  # some 50 ms


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)  # a forward pass of a length that is known
        return self.inner(features)


def test_marks_tell_the_devices_time() -> None:
    marks = CudaMarks(torch.device(DEVICE))
    torch.cuda.synchronize()
    begin = marks.mark()
    torch.cuda._sleep(2 * CYCLES)
    end = marks.mark()
    assert marks.seconds(begin, end) is None, "the device has not passed it"
    marks.wait(end)
    assert 0.02 < (marks.seconds(begin, end) or 0) < 2


def test_captures_move_while_the_device_goes_forward(
    tmp_path: Path, arenas: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    model = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    objects = {"model": model, "optimizer": optimizer}
    bubbles = Bubbles(DEVICE)
    bubbles.watch(model)
    with CheckpointManager(tmp_path / "run", objects, capture_every=1, arenas=arenas, bubbles=bubbles) as manager:
        manager.restore()
        copied = {}
        for step in range(1, STEPS + 1):
            loss = model(torch.randn(64, 1024, device=DEVICE)).square().mean()
            loss.backward()
            torch.cuda._sleep(CYCLES // 2)
            optimizer.step()
            optimizer.zero_grad()
            copied[step] = {f"model/{key}": one.clone() for key, one in model.state_dict().items()}
            manager.step()
            loss.item()  # else the host is iterations ahead, and cuts are left out
        newest = manager._saves._engine.wait()  # type: ignore[union-attr]
        assert newest is not None and newest > STEPS - 4
        kept = kept_state(ArenaFolder(arenas), newest)[1]
        for key, one in copied[newest].items():
            assert kept[key] == one.cpu().view(-1).view(torch.uint8).numpy().tobytes(), key
        records = bubbles.gate.records()
    assert len(records) >= STEPS // 2
    for one in records:
        for window in one.windows:
            assert one.begin_s <= window.begin_s <= window.end_s <= one.end_s + 1e-6
    lengths = [window.end_s - window.begin_s for one in records for window in one.windows if window.kind == "free"]
    assert len(lengths) >= len(records) - 1 and min(lengths) > 0.02, "the forward pass was seen on the device"
    assert sum(one.size_bytes for record in records for one in record.slices) > 0
    waits = waits_of(records)
    assert [one.site for one in waits if one.kind == "free"] == ["forward"]
    print(f"windows {min(lengths):.4f} to {max(lengths):.4f} s; {waits}")
