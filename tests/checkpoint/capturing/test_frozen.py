"""Frozen tensors: captures skip them once the memory holds them, and hold the state of their cut all the same."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lakeckpt
from lakeckpt.checkpoint.arena import checksums
from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.checksums import look_over
from lakeckpt.checkpoint.arena.contents import contents_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.format.digests import LEAF_BYTES, leaf_digests
from lakeckpt.counters import RunCounters
from lakeckpt.errors import ArenaDamaged, CaptureWarning, UnannouncedChange
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.capturing.device import Device, LinkedEngine, SimulatedLink
from tests.checkpoint.capturing.reading import CUT, IDENTITY, assert_same, kept_state, state_of, steps_in
from tests.patience import PATIENCE_S

GENERATIONS = 3
MIB = 2**20


class Lora(nn.Module):
    """Frozen tables of 3 MiB with a trained adapter between each two of them, as in a model with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ParameterList(nn.Parameter(torch.rand(3 * MIB // 4), requires_grad=False) for _ in range(3))
        self.adapters = nn.ParameterList(nn.Parameter(torch.rand(500)) for _ in range(3))


class Job:
    """A model, an optimizer that trains its adapters, and an engine that captures both."""

    def __init__(self, folder: Path, *, is_linked: bool = False) -> None:
        torch.manual_seed(0)
        self.folder = ArenaFolder(folder)
        self.model = Lora()
        self.optimizer = torch.optim.Adam(self.model.adapters.parameters())
        self.train()
        self.counters = RunCounters()
        self.objects = {"model": self.model, "optimizer": self.optimizer}
        self.engine: CaptureEngine
        if is_linked:
            links = {torch.device("cpu"): SimulatedLink(Device(0))}
            self.engine = LinkedEngine(self.objects, IDENTITY, folder=self.folder, counters=self.counters, links=links)
        else:
            self.engine = CaptureEngine(self.objects, IDENTITY, folder=self.folder, counters=self.counters)
        self.step = 0

    def train(self) -> None:
        for one in self.model.adapters:
            one.grad = torch.rand_like(one)
        self.optimizer.step()

    def capture(self, *, must: bool = True) -> int:
        """Train a step, capture it, and compare what was captured with the state. Returns the bytes copied."""
        self.train()
        return self.capture_only(must=must)

    def capture_only(self, *, must: bool = False, compares: bool = True) -> int:
        """Capture, as a cut that is saved (``must``) or as any other one."""
        self.step += 1
        before = self._copied()
        expected = state_of(self.objects)
        assert self.engine.cut(CutId(attempt=0, step=self.step), digest=CUT, common=self.step - 1, must=must)
        self.engine.wait()
        if compares and self.engine.completed == self.step:
            assert_same(kept_state(self.folder, self.step), expected)
        return self._copied() - before

    def _copied(self) -> int:
        return self.counters.beside_bytes + self.counters.fence_bytes

    def fill(self) -> None:
        """Let each generation of the arena hold the frozen tensors."""
        for _ in range(GENERATIONS):
            self.capture()

    def arena(self) -> contextlib.AbstractContextManager[Arena]:
        (found,) = self.folder.found()
        return self.folder.open(found.name)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "arenas")
    with contextlib.closing(made.engine):
        yield made


def test_a_frozen_tensor_is_copied_once_into_each_generation(job: Job) -> None:
    whole = job.capture()
    job.fill()
    copied = [job.capture(must=False) for _ in range(3 * GENERATIONS)]
    trained = 3 * 3 * 500 * 4  # parameters and two moments, and the number of steps
    assert set(copied) == {trained + 3 * 4}
    assert whole == copied[0] + 9 * MIB


def test_frozen_tensors_of_a_device_are_skipped_too(tmp_path: Path) -> None:
    job = Job(tmp_path / "arenas", is_linked=True)
    with contextlib.closing(job.engine):
        job.fill()
        assert max(job.capture(must=False) for _ in range(2 * GENERATIONS)) < MIB


def test_a_cut_that_is_saved_copies_all(job: Job) -> None:
    job.fill()
    assert job.capture(must=False) < MIB and not job.engine.has_whole
    assert job.capture(must=True) > 9 * MIB and job.engine.has_whole


def fill_by_data(job: Job) -> None:
    job.model.adapters[1].data.fill_(7)


def fill_counted(job: Job) -> None:
    with torch.no_grad():
        job.model.base[1].fill_(7)


def load_another(job: Job) -> None:
    job.model.load_state_dict({key: one + 1 for key, one in job.model.state_dict().items()})


def replace_memory(job: Job) -> None:
    job.model.base[1].data = torch.rand(3 * MIB // 4)


def replace_parameter(job: Job) -> None:
    job.model.base[1] = nn.Parameter(torch.rand(3 * MIB // 4), requires_grad=False)


CHANGES = [fill_by_data, fill_counted, load_another, replace_memory, replace_parameter]


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_changes_that_torch_counts_and_all_of_trained_tensors_are_captured(
    job: Job, change: Callable[[Job], None]
) -> None:
    job.fill()
    for _ in range(2 * GENERATIONS):
        change(job)
        job.capture_only()  # compares


def test_a_tensor_that_is_trained_again_is_copied_every_time(job: Job) -> None:
    job.fill()
    job.model.base[1].requires_grad_(True)
    for _ in range(GENERATIONS):
        job.model.base[1].data[5] += 1  # not counted
        assert 3 * MIB <= job.capture(must=False) < 4 * MIB


def test_a_tensor_that_some_optimizer_has_is_copied_every_time(job: Job) -> None:
    job.optimizer.add_param_group({"params": [job.model.base[0]]})
    job.fill()
    for _ in range(GENERATIONS):
        job.model.base[0].data[MIB // 2] += 1
        assert 3 * MIB <= job.capture(must=False) < 4 * MIB


def test_memory_that_two_parameters_share_is_copied_every_time(job: Job) -> None:
    other = nn.Parameter(job.model.base[0].data, requires_grad=False)  # its changes are counted apart
    job.model.register_parameter("other", other)
    job.fill()
    for _ in range(GENERATIONS):
        with torch.no_grad():
            other[MIB // 2] += 1
        job.capture(must=False)  # compares


def test_a_change_that_torch_does_not_count_is_noticed_at_the_next_cut_and_copied_from_then_on(job: Job) -> None:
    job.fill()
    job.capture(must=False)
    job.model.base[2].data.mul_(0.5)  # as an average of weights does
    with pytest.warns(CaptureWarning, match=r"'model/base.2' changed, though .* torch has counted no change"):
        job.capture_only()
    assert job.step not in steps_in(job.folder), "it would have been a mixture"
    for _ in range(2 * GENERATIONS):
        job.model.base[2].data.mul_(0.5)
        assert 3 * MIB <= job.capture(must=False) < 4 * MIB


def test_a_capture_that_is_dropped_leaves_nothing_that_another_one_would_skip(job: Job) -> None:
    job.fill()
    for _ in range(2 * GENERATIONS):
        with torch.no_grad():
            job.model.base[1].add_(1)
        job.step += 1
        is_changed = threading.Event()
        job.engine._copier.do(lambda changed=is_changed: changed.wait(PATIENCE_S))  # type: ignore[misc]
        assert job.engine.cut(CutId(attempt=0, step=job.step), digest=CUT, common=job.step - 1)
        with torch.no_grad():
            job.model.adapters[1].add_(1)  # before the fence
        is_changed.set()
        with pytest.raises(UnannouncedChange):
            job.engine.wait()
        job.capture(must=False)  # compares


def test_the_memory_of_skipped_tensors_is_not_hashed_again_and_is_verified(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    def counting(data: memoryview, leaf_bytes: int) -> bytes:
        hashed.append(len(data))
        return leaf_digests(data, leaf_bytes)

    monkeypatch.setattr(checksums, "leaf_digests", counting)
    with job.arena() if job.capture() else contextlib.nullcontext() as agent:
        assert agent is not None
        for _ in range(GENERATIONS):
            job.capture()
            look_over(agent, lambda: True)
        for _ in range(2 * GENERATIONS):
            hashed.clear()
            job.capture(must=False)
            look_over(agent, lambda: True)
            assert sum(hashed) <= 2 * LEAF_BYTES, "the adapters, and the edge of the frozen tensors"
            with agent.hold() as held:
                assert held is not None and held.record.cut.step == job.step
                assert held.checksums() == leaf_digests(held.data, LEAF_BYTES)
        with torch.no_grad():
            job.model.base[1].add_(1)
        for _ in range(2 * GENERATIONS):
            job.capture(must=False)  # the agent is busy: it takes no checksums of what was written anew
        look_over(agent, lambda: True)
        with agent.hold() as held:
            assert held is not None and held.record.kept is not None
            assert held.checksums() == leaf_digests(held.data, LEAF_BYTES)
        for _ in range(GENERATIONS):
            job.capture(must=False)
            look_over(agent, lambda: True)
        with job.arena() as other, other.hold() as held:
            assert held is not None
            contents = contents_of(held)
            at = contents.documents.table.places["model/base.1"].start + MIB
        assert job.engine._store.arena is not None
        for number in range(GENERATIONS):  # a bit of the memory falls over in each generation
            layout = job.engine._store.arena.layout
            job.engine._store.arena.memory[layout.data_at(number) + at] ^= 1
        job.capture_only(compares=False)
        look_over(agent, lambda: True)
        with agent.hold() as held:
            assert held is not None and held.record.cut.step == job.step
            contents = contents_of(held)
            with pytest.raises(ArenaDamaged):
                contents.verify()


def test_a_change_between_the_spots_is_noticed_when_a_cut_is_saved(tmp_path: Path) -> None:
    """And what is saved is right: captures that are saved copy all tensors."""
    model = Lora()
    optimizer = torch.optim.Adam(model.adapters.parameters())
    objects = {"model": model, "optimizer": optimizer}
    with lakeckpt.CheckpointManager(
        tmp_path / "run", objects, capture_every=1, arenas=tmp_path / "arenas", rank=0, world_size=1
    ) as manager:
        manager.restore()
        for _ in range(4):
            manager.step()
        manager.save()
        model.base[0].data[MIB // 2] += 1
        manager.step()
        with pytest.warns(CaptureWarning, match=r"'model/base.0' changed, though .* torch has counted no change"):
            manager.save()
    expected = state_of(objects)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    with lakeckpt.CheckpointManager(tmp_path / "run", objects) as again:
        assert again.restore() == 5
        assert_same((expected[0], state_of(objects)[1]), expected)
