"""Each slice gets its own checksums, from the agent or from the copier, whichever arena lies under its name."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.slices import plan_slices
from lakeckpt.checkpoint.capture import engine as engine_module
from lakeckpt.checkpoint.capture.slice_copier import Checksums
from lakeckpt.errors import AgentError, CaptureWarning
from tests.checkpoint.arena.summing import summing
from tests.checkpoint.capturing.device import Device, LinkedEngine, SimulatedLink
from tests.checkpoint.capturing.reading import CUT, IDENTITY, steps_in

SLICES = plan_slices({"one": 60, "other": 164}, slice_bytes=128)  # the first slice holds some of both


class Filling:
    """A generation of two slices."""

    def __init__(self) -> None:
        self.data = memoryview(bytearray(SLICES.data_bytes))
        self.checksums: dict[int, bytes] = {}
        self.here: list[int] = []

    bounds = staticmethod(SLICES.bounds)

    def summed(self, number: int, checksums: bytes) -> None:
        self.checksums[number] = checksums

    def filled(self, number: int) -> None:
        self.here.append(number)


class Summer:
    """Answers with what it was asked, until it is lost."""

    is_lost = False

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def ask(self, bounds: Sequence[tuple[int, int]]) -> None:
        if self.is_lost:
            raise AgentError("it died")
        self.asked += bounds

    def take(self) -> bytes:
        if self.is_lost:
            raise AgentError("it died")
        return str(self.asked.pop(0)).encode()


def checksums_of(filling: Filling, summer: Summer | None) -> Checksums:
    return Checksums(filling, summer)  # type: ignore[arg-type]


@pytest.mark.parametrize("from_device", [True, False])
@pytest.mark.parametrize("summer", [Summer(), None])
def test_each_slice_gets_its_own_checksums_from_the_agent_or_from_the_copier(
    summer: Summer | None, *, from_device: bool
) -> None:
    filling = Filling()
    checksums = checksums_of(filling, summer)
    checksums.take([0, 1], from_device=from_device)
    checksums.wait()
    if summer is not None and from_device:
        assert filling.checksums == {0: b"(0, 128)", 1: b"(128, 228)"} and not filling.here
    else:
        assert filling.here == [0, 1] and not filling.checksums


def test_an_agent_that_ends_is_an_error_and_an_abort_none() -> None:
    filling, summer = Filling(), Summer()
    checksums = checksums_of(filling, summer)
    checksums.take([1], from_device=True)
    summer.is_lost = True
    with pytest.raises(AgentError, match="it died"):
        checksums.wait()
    with pytest.raises(AgentError, match="it died"):
        checksums.take([0], from_device=True)
    checksums.abort()
    assert not filling.checksums and not filling.here


def test_an_aborted_capture_takes_its_answers_with_it() -> None:
    filling, summer = Filling(), Summer()
    aborted = checksums_of(Filling(), summer)
    aborted.take([1], from_device=True)
    aborted.abort()
    checksums = checksums_of(filling, summer)
    checksums.take([1], from_device=True)
    checksums.wait()
    assert filling.checksums == {1: b"(128, 228)"} and not summer.asked


@pytest.mark.parametrize("why", ["the state grows", "its documents grow", "it was removed"])
def test_captures_of_a_device_are_whole_after_their_arena_was_made_anew(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    why: Literal["the state grows", "its documents grow", "it was removed"],
) -> None:
    monkeypatch.setattr(engine_module, "_MANY_BYTES", 1)  # the agent's process takes the checksums
    folder = ArenaFolder(tmp_path / "arenas")
    model, links = nn.Linear(64, 64), {torch.device("cpu"): SimulatedLink(Device(0))}
    readers = {"reader": b"place"}
    with (
        summing(folder.path) as (summer, _),
        contextlib.closing(
            LinkedEngine({"model": model}, IDENTITY, folder=folder, links=links, checksummer=lambda: summer)
        ) as engine,
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
                engine.cut(step, attempt="a", cut=CUT, readers=readers, must=True)
                engine.wait()
        assert not summer.is_lost
    assert steps_in(folder) == [8, 7, 6]
    (arena,) = folder.found()
    with folder.open(arena.name) as opened:
        for step in (6, 7, 8):
            with opened.hold(step) as held:
                assert held is not None
                for number in range(opened.layout.num_slices):
                    held.slice(number)
