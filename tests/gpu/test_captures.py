"""Captures of a CUDA device: in the order of its work, without the host waiting, and the same bits as a copy at once.

Run by ``make gpu-check``. The same engine on a simulated device is in ``tests/checkpoint/capturing/test_mixtures.py``.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.capture.links import CopyBatch, Link, Ticket
from lakeckpt.checkpoint.capture.samples import Samples
from lakeckpt.errors import UnannouncedChange
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.capturing.reading import CUT, IDENTITY, State, assert_same, kept_state, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
LONG_CYCLES = 6 * 10**8  # a third of a second: what is queued behind it has not begun when the host goes on


class Unordered(Link):
    """A link whose copies wait for nothing."""

    def order(self) -> None: ...


class Late(Link):
    """A link whose copies come long after they were queued."""

    def copy(self, batch: CopyBatch, /) -> Ticket:
        with self._copying():
            torch.cuda._sleep(LONG_CYCLES // 4)
        return super().copy(batch)


class Unheld(Late):
    """A link whose copies come late, and which nothing waits for."""

    def hold(self, ticket: object, /) -> None: ...


class Training:
    """A model on the device, whose updates come behind a long kernel."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 8)).cuda()
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def step(self, cycles: int = 0) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(torch.randn(32, 512, device="cuda")).square().mean().backward()
        if cycles:
            torch.cuda._sleep(cycles)
        self.optimizer.step()

    def churn(self) -> None:
        """Write over whatever memory of the device is free for whoever asks next."""
        for size in (2**9, 2**13, 2**20, 2**22):
            for _ in range(8):
                torch.full((size,), 7.0, device="cuda")

    def copied(self) -> dict[str, Any]:
        """A copy made at once, on the device and in its order; the host does not wait."""
        return {
            "model": {key: one.clone() for key, one in self.model.state_dict().items()},
            "optimizer": [one.clone() for state in self.optimizer.state.values() for one in state.values()],
        }


@pytest.fixture
def folder() -> Iterator[ArenaFolder]:
    """In host memory: files on a disk cannot be pinned everywhere, and copies into them keep the host waiting."""
    found = ArenaFolder(f"/dev/shm/lakeckpt-test-{secrets.token_hex(8)}")
    yield found
    shutil.rmtree(found.path, ignore_errors=True)


@pytest.fixture
def made(folder: ArenaFolder) -> Iterator[Callable[..., CaptureEngine]]:
    every: list[CaptureEngine] = []

    def make(objects: dict[str, Any], *, link: Link | None = None, **options: Any) -> CaptureEngine:
        engine = CaptureEngine(objects, IDENTITY, **{"folder": folder, "slice_bytes": 2**20, **options})
        if link is not None:
            engine.open_link = lambda device: link if device.type == "cuda" else None
        every.append(engine)
        return engine

    yield make
    for one in every:
        one.close()


def cut(engine: CaptureEngine, step: int, **options: Any) -> bool:
    return engine.cut(CutId(attempt=0, step=step), digest=CUT, **options)


def differing(found: State, copied: dict[str, Any]) -> list[str]:
    """The keys of the model of which a generation holds other bits than the copy made at once."""
    expected = {
        key: bytes(one.cpu().contiguous().view(-1).view(torch.uint8).numpy()) for key, one in copied["model"].items()
    }
    return [key for key, data in expected.items() if found[1][f"model/{key}"] != data]


def run_behind_a_long_kernel(
    engine: CaptureEngine, training: Training, folder: ArenaFolder, steps: int = 6, after: int = 0
) -> list[str]:
    """Capture steps whose update has not begun when the host goes on; what differs from copies made at once."""
    if not after:
        training.step()
        assert cut(engine, 1, must=True)
        engine.wait()
    wrong = []
    for step in range(after + 2, after + 2 + steps):
        training.step(LONG_CYCLES)
        copied = training.copied()
        assert cut(engine, step)
        training.step()  # the fence, and the next update, are queued while the first has not begun
        training.churn()
        if engine.wait() == step:
            wrong += differing(kept_state(folder, step), copied)
    return wrong


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_captures_are_the_copies_made_at_once_behind_a_long_kernel(
    made: Callable[..., CaptureEngine], folder: ArenaFolder, optimizer: type[torch.optim.Optimizer]
) -> None:
    training = Training(optimizer)
    engine = made(training.objects)
    assert run_behind_a_long_kernel(engine, training, folder) == []


def test_copies_that_come_late_are_held_for(made: Callable[..., CaptureEngine], folder: ArenaFolder) -> None:
    training = Training()
    device = torch.device("cuda", torch.cuda.current_device())
    engine = made(training.objects, slice_bytes=2**24, link=Late(device))
    assert run_behind_a_long_kernel(engine, training, folder, steps=2) == []


@pytest.mark.parametrize("link", [Unordered, Unheld])
def test_without_either_event_captures_are_wrong(
    made: Callable[..., CaptureEngine], folder: ArenaFolder, link: type[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    device = torch.device("cuda", torch.cuda.current_device())
    engine = made(training.objects, link=link(device))
    with monkeypatch.context() as patch:  # witnesses would see it, and give the captures up
        patch.setattr(Samples, "changed", lambda *_: frozenset())
        assert run_behind_a_long_kernel(engine, training, folder) != []
    if link is Unheld:
        with pytest.raises(UnannouncedChange, match="was dropped"):
            run_behind_a_long_kernel(engine, training, folder, steps=1, after=10)


def test_the_state_of_every_step_is_captured_bit_by_bit(
    made: Callable[..., CaptureEngine], folder: ArenaFolder
) -> None:
    training = Training(torch.optim.AdamW, fused=True)
    engine = made(training.objects)
    for step in range(1, 6):
        training.step()
        expected = state_of(training.objects)
        assert cut(engine, step, must=True)
        training.model(torch.randn(32, 512, device="cuda"))  # changes running averages
        engine.wait()
        assert_same(kept_state(folder, step), expected)


def test_the_fence_does_not_keep_the_host_waiting(made: Callable[..., CaptureEngine]) -> None:
    training = Training()
    engine = made(training.objects)
    for step in (1, 2, 3):  # after which every generation has what it needs on the device
        training.step()
        assert cut(engine, step, must=True)
        engine.wait()
    for step in (4, 5):
        training.step()
        torch.cuda._sleep(LONG_CYCLES)
        before = torch.cuda.Event()
        before.record()
        assert cut(engine, step)  # ordered behind the long kernel: nothing can have been copied
        engine.fence()
        assert not before.query(), "the device had time to finish the long kernel: the host was kept waiting"
        after = torch.cuda.Event()
        after.record()  # behind the copies, for which the device waits
        assert not after.query()
        engine.wait()
        after.synchronize()


def test_the_arena_is_pinned(made: Callable[..., CaptureEngine]) -> None:
    training = Training()
    engine = made(training.objects)
    training.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    assert engine._store._memory is not None
    assert engine._store._memory.is_pinned()


def test_a_step_in_a_graph_is_refused_and_replays_behind_a_fence_are_captured(
    made: Callable[..., CaptureEngine], folder: ArenaFolder
) -> None:
    parameter = nn.Parameter(torch.zeros(2**20, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    model = nn.Module()
    model.register_parameter("one", parameter)
    optimizer = torch.optim.AdamW([parameter], capturable=True)
    objects = {"model": model, "optimizer": optimizer}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()  # before there is an engine
    engine = made(objects)
    for step in range(4, 8):
        graph.replay()
        expected = state_of(objects)
        assert cut(engine, step, must=True)
        engine.fence()
        graph.replay()
        engine.wait()
        assert_same(kept_state(folder, step), expected)
    with pytest.raises(UnannouncedChange, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
