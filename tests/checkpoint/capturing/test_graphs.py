"""While a CUDA graph is captured nothing is copied from a device, and no cut begins. (torch's own seam is replaced.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.capturing.engine import CaptureEngine
from lakeckpt.checkpoint.capturing.graphs import before_graphs
from lakeckpt.checkpoint.gate import OpenGate
from lakeckpt.checkpoint.report import CaptureWarning
from tests.checkpoint.capturing.device import Device, SimulatedLink
from tests.checkpoint.capturing.reading import CUT, IDENTITY
from tests.checkpoint.capturing.stamped import Stamped, Stamper
from tests.patience import PATIENCE_S


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in its order; a graph that is captured says so."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda *_: told.append("captured"))
    return told


def capture_graph() -> None:
    torch.cuda.CUDAGraph.capture_begin(None)  # type: ignore[arg-type]


def test_whoever_asks_for_it_is_told_before_a_graph_is_captured_and_no_longer(begun: list[str]) -> None:
    bare = torch.cuda.CUDAGraph.capture_begin
    undo = [before_graphs(lambda name=name: begun.append(name)) for name in ("one", "other")]  # type: ignore[misc]
    capture_graph()
    assert begun == ["one", "other", "captured"]
    undo[0]()
    capture_graph()
    assert begun[3:] == ["other", "captured"]
    undo[1]()
    undo[1]()
    assert torch.cuda.CUDAGraph.capture_begin is bare


def test_a_capture_is_over_when_a_graph_begins_to_be_captured(tmp_path: Path, begun: list[str]) -> None:
    class Shut(OpenGate):
        def admit(self, size_bytes: int, urgent: object, /) -> None:
            assert urgent.wait(PATIENCE_S)  # type: ignore[attr-defined]

    model, device = Stamped(), Device(0)
    optimizer = Stamper(model, lambda work: device.queue(0, work))
    engine = CaptureEngine(
        {"model": model, "optimizer": optimizer},
        IDENTITY,
        folder=ArenaFolder(tmp_path),
        gate=Shut(),
        on_complete=lambda step: begun.append(f"complete {step}"),
        slice_bytes=256,
        links={torch.device("cpu"): SimulatedLink(device)},
    )
    for step in (1, 2):
        optimizer.step()
        assert engine.cut(step, attempt="a", cut=CUT, must=step == 1)
        if step == 1:
            engine.wait()
    capture_graph()
    assert begun == ["complete 1", "complete 2", "captured"]
    bare = torch.cuda.CUDAGraph.capture_begin
    engine.close(remove=True)
    assert torch.cuda.CUDAGraph.capture_begin is not bare  # it is torch's own again


def test_a_cut_within_a_graph_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stamped()
    objects = {"model": model, "optimizer": Stamper(model, lambda work: work())}
    engine = CaptureEngine(objects, IDENTITY, folder=ArenaFolder(tmp_path), slice_bytes=256)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.warns(CaptureWarning, match="step 1 is left out: a CUDA graph"):
            assert not engine.cut(1, attempt="a", cut=CUT, must=True)
    assert engine.left_out == 1 and engine.cut(2, attempt="a", cut=CUT, must=True)
    engine.close(remove=True)
