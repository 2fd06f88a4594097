"""The engine: what a generation holds is the state at its cut, bit by bit, whatever training does meanwhile."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lakeckpt.checkpoint.arena.filling import Filling
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.checkpoint.capture import copier
from lakeckpt.checkpoint.capture import engine as module
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.capture.moves import Issued, Moves
from lakeckpt.errors import (
    ArenaDamaged,
    ArenaError,
    CaptureWarning,
    ConfigError,
    SaveFailed,
    UnannouncedChange,
    UnsupportedValue,
)
from lakeckpt.recovery.facts import CutId
from tests.checkpoint.capturing.reading import CUT, IDENTITY, assert_same, kept_state, state_of, steps_in
from tests.patience import PATIENCE_S

Made = Callable[..., CaptureEngine]


class HeldGate(Gate):
    """Admits slices when it is told to, or the fence has come."""

    paces = True

    def __init__(self) -> None:
        self.open = threading.Event()
        self.admitted: list[int] = []
        self.is_moving = False
        self.moved_bytes = self.fenced_bytes = 0

    def start(self, size_bytes: int) -> None:
        self.expected_bytes = size_bytes
        self.is_moving = False
        self.open.clear()

    def admit(self, size_bytes: int, urgent: threading.Event) -> None:
        if not urgent.is_set():
            assert self.open.wait(PATIENCE_S), "neither the test nor the fence has come"
        assert not self.is_moving, "moved follows each admit"
        self.is_moving = True
        self.admitted.append(size_bytes)

    def hurry(self) -> None:
        self.open.set()

    def moved(self, size_bytes: int, begin_s: float, end_s: float) -> None:
        assert begin_s <= end_s and self.is_moving
        self.is_moving = False
        if not size_bytes:
            self.admitted.pop()
        self.moved_bytes += size_bytes

    def fenced(self, size_bytes: int, begin_s: float, end_s: float) -> None:
        assert begin_s <= end_s
        self.fenced_bytes += size_bytes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 4))
        self.tied = self.inner[3].weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.inner(x)  # type: ignore[no-any-return]


class Job:
    """A small training job."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(1)
        self.model = Net()
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)  # type: ignore[call-arg]
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.objects: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 16)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.scheduler.step()


@pytest.fixture
def folder(tmp_path: Path) -> ArenaFolder:
    return ArenaFolder(tmp_path / "arenas")


@pytest.fixture
def made(folder: ArenaFolder) -> Iterator[Made]:
    every: list[CaptureEngine] = []

    def make(objects: dict[str, Any], **options: Any) -> CaptureEngine:
        every.append(CaptureEngine(objects, **{"identity": IDENTITY, "folder": folder, "slice_bytes": 4096, **options}))
        return every[-1]

    yield make
    for one in every:
        one.close()


def cut(engine: CaptureEngine, step: int, **options: Any) -> bool:
    return engine.cut(CutId(attempt=0, step=step), digest=CUT, **options)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_every_step_is_captured_as_it_was_at_its_cut(
    made: Made, folder: ArenaFolder, optimizer: type[torch.optim.Optimizer]
) -> None:
    job = Job(optimizer)
    engine = made(job.objects)
    expected = {}
    for step in range(1, 8):
        job.step()
        expected[step] = state_of(job.objects)
        assert cut(engine, step, readers={"loader": b"%d" % step}, must=True)
        job.model(torch.randn(8, 16))  # changes what a forward pass changes
    assert engine.wait() == 7
    assert steps_in(folder) == [7, 6, 5]
    for step in (5, 6, 7):
        assert_same(kept_state(folder, step), expected[step])


def test_what_the_gate_did_not_admit_is_copied_at_the_fence_before_the_update(made: Made, folder: ArenaFolder) -> None:
    job, gate = Job(), HeldGate()
    engine = made(job.objects, gate=gate)
    job.step()
    assert cut(engine, 1, must=True)
    expected = state_of(job.objects)
    job.step()  # nothing was admitted: all of it is copied when the optimizer is about to step
    assert engine.wait() == 1
    assert gate.moved_bytes + gate.fenced_bytes == gate.expected_bytes > 0 and gate.fenced_bytes > 0
    assert_same(kept_state(folder, 1), expected)


def test_a_capture_goes_through_the_gate_slice_by_slice(made: Made) -> None:
    job, gate = Job(), HeldGate()
    engine = made(job.objects, gate=gate)
    job.step()
    assert cut(engine, 1, must=True)
    gate.open.set()
    engine._idle()
    assert engine.completed == 1
    assert gate.moved_bytes == sum(gate.admitted) == gate.expected_bytes > 0
    assert gate.fenced_bytes == 0
    assert max(gate.admitted) <= 4096


def test_slices_hold_the_state_however_tensors_lie_in_them(made: Made, folder: ArenaFolder) -> None:
    torch.manual_seed(3)
    model = nn.ParameterList([torch.randn(size) for size in (16384, 16385, 40_001, 100_003, 7)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gate, objects = HeldGate(), {"model": model, "optimizer": optimizer}
    engine = made(objects, gate=gate, slice_bytes=2**17)
    for step in (1, 2):
        for one in model:
            one.grad = torch.randn_like(one)
        optimizer.step()
        assert cut(engine, step, must=True)
        gate.open.set()
        engine._idle()
        assert_same(kept_state(folder, step), state_of(objects))


@pytest.fixture
def may_document(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no document of a generation is made."""
    may = threading.Event()
    to_bytes = copier.GenerationDocuments.to_bytes

    def late(documents: copier.GenerationDocuments) -> bytes:
        assert may.wait(PATIENCE_S)
        return to_bytes(documents)

    monkeypatch.setattr(copier.GenerationDocuments, "to_bytes", late)
    return may


class Traced(torch.optim.SGD):
    """Counts in arrays, in place: in its group, and in the state of each parameter."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        (group,) = self.param_groups
        group.setdefault("trace", [np.zeros(3)])[0][:] += 1
        for one in group["params"]:
            self.state[one].setdefault("seen", {"times": np.zeros((), np.int64)})["times"] += 1
        return found


def test_arrays_that_an_optimizer_changes_in_place_are_those_of_the_cut_in_a_document_that_is_made_later(
    made: Made, folder: ArenaFolder, may_document: threading.Event
) -> None:
    job = Job(Traced)
    engine = made(job.objects, gate=HeldGate())
    for step in (1, 2, 3):
        may_document.clear()
        job.step()
        expected = state_of(job.objects)
        assert expected[0]["optimizer"]["param_groups"][0]["trace"][0].tolist() == [2 * step - 1.0] * 3
        assert cut(engine, step, must=True)
        job.step()
        may_document.set()
        assert engine.wait() == step
        assert_same(kept_state(folder, step), expected)


class Counting(torch.optim.SGD):
    """Has a state dict of its own, without groups."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"steps": self.steps, "array": np.full(2, self.steps)}


def test_a_state_without_groups_is_that_of_its_cut_though_the_next_cut_came_before_its_document(
    made: Made, folder: ArenaFolder, may_document: threading.Event
) -> None:
    job = Job(Counting)
    engine = made(job.objects, gate=HeldGate())
    job.step()
    expected = state_of(job.objects)
    assert expected[0]["optimizer"]["steps"] == 1
    assert cut(engine, 1, must=True)
    job.step()
    assert not cut(engine, 2), "step 1 is under way"
    may_document.set()
    assert engine.wait() == 1
    assert_same(kept_state(folder, 1), expected)


def test_no_cut_is_left_out_where_the_capture_before_has_only_to_seal_its_generation(
    made: Made, folder: ArenaFolder
) -> None:
    job = Job()
    engine = made(job.objects, gate=HeldGate())
    job.step()
    assert cut(engine, 1, must=True)
    complete, asked = engine._completes, threading.Event()

    def late(capture: Any) -> bool:  # a cut that would be left out comes before this ends
        asked.wait(0.05)
        return complete(capture)

    engine._completes = late  # type: ignore[method-assign]
    for step in range(2, 6):
        job.step()
        assert cut(engine, step)
    assert engine.wait() == 5


def test_cuts_are_left_out_while_the_capture_before_is_under_way(
    made: Made, folder: ArenaFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SEAL_S", 0.0)
    job, gate = Job(), HeldGate()
    engine = made(job.objects, gate=gate)
    job.step()
    assert not cut(engine, 1), "the arena is not made yet"
    engine._idle()
    entered, go_on = threading.Event(), threading.Event()

    def complete(step: int) -> None:
        entered.set()
        assert go_on.wait(PATIENCE_S)

    engine._run, run = (lambda one: (complete(0), run(one))[1]), engine._run  # type: ignore[method-assign,func-returns-value]
    assert cut(engine, 2)
    assert entered.wait(PATIENCE_S)
    job.step()
    assert not cut(engine, 3), "step 2 is not complete"
    go_on.set()
    assert engine.wait() == 2
    job.step()
    assert cut(engine, 4)
    assert engine.wait() == 4
    assert steps_in(folder) == [4, 2]


class Manual(torch.optim.Optimizer):
    """Changes its parameters in a method of its own, so that no hook of a step is called."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.update()

    def update(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                with torch.no_grad():
                    one.mul_(0.5)


def test_an_update_that_calls_no_hook_is_refused_by_name_and_none_after_a_fence(
    made: Made, folder: ArenaFolder
) -> None:
    model = nn.Linear(64, 64)
    optimizer = Manual(model.parameters())
    objects = {"model": model, "optimizer": optimizer}
    engine = made(objects, gate=HeldGate())
    optimizer.step()
    assert cut(engine, 1, must=True)
    optimizer.update()
    with pytest.raises(UnannouncedChange, match=r"'model/weight' and 1 more tensors changed after the cut of step 1"):
        engine.wait()
    assert steps_in(folder) == []
    expected = state_of(objects)
    assert cut(engine, 2)
    engine.fence()
    optimizer.update()
    assert engine.wait() == 2
    assert_same(kept_state(folder, 2), expected)


def test_a_step_that_is_captured_into_a_graph_is_refused_by_name(
    made: Made, folder: ArenaFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = Job(torch.optim.SGD), Job(torch.optim.SGD)
    engine = made(job.objects, gate=HeldGate())
    job.step()
    expected = state_of(job.objects)
    assert cut(engine, 1, must=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(UnannouncedChange, match=r"a step of SGD, which changes 'model/.*CUDA graph"):
            job.optimizer.step()
        other.optimizer.step()  # of which nothing is captured
        with pytest.raises(ConfigError, match=r"Call manager.step\(\) outside of the graph"):
            cut(engine, 2)
    assert engine.wait() == 1
    assert_same(kept_state(folder, 1), expected)


def test_replays_of_a_step_are_seen_by_the_sample_and_harmless_behind_a_fence(made: Made, folder: ArenaFolder) -> None:
    """A replay calls no hook, and torch counts no change."""
    job = Job()
    engine = made(job.objects, gate=HeldGate())

    def replay() -> None:
        for one in job.model.parameters():
            one.data.mul_(2)

    job.step()
    assert cut(engine, 1, must=True)
    replay()
    with pytest.raises(UnannouncedChange, match="'model/inner"):
        engine.wait()
    expected = state_of(job.objects)
    assert cut(engine, 2)
    engine.fence()
    replay()
    assert engine.wait() == 2
    assert_same(kept_state(folder, 2), expected)


def test_a_step_of_any_optimizer_of_the_process_is_announced(made: Made, folder: ArenaFolder) -> None:
    job = Job()
    other = torch.optim.SGD([job.model.inner[0].weight], lr=0.1)  # which is in no state
    engine = made(job.objects, gate=HeldGate())
    for step in (1, 2, 3):
        job.step()
        expected = state_of(job.objects)
        assert cut(engine, step, must=True)
        job.backward()
        other.step()
        assert engine.wait() == step
        assert_same(kept_state(folder, step), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_the_hook_is_called_each_time_of_a_compiled_step(made: Made, folder: ArenaFolder, *, before: bool) -> None:
    job = Job(torch.optim.SGD)
    compiled = torch.compile(job.optimizer.step, backend="eager")
    if before:
        job.backward()
        compiled()
    engine = made(job.objects, gate=HeldGate())
    expected = {}
    for step in range(1, 5):
        job.backward()
        compiled()
        expected[step] = state_of(job.objects)
        assert cut(engine, step, must=True)
    job.backward()
    compiled()
    assert engine.wait() == 4
    for step in (2, 3, 4):
        assert_same(kept_state(folder, step), expected[step])


def test_a_frozen_parameter_and_an_average_of_weights_are_copied_beside_training(
    made: Made, folder: ArenaFolder
) -> None:
    frozen, head = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 4)
    optimizer = torch.optim.SGD(head.parameters())
    average = torch.optim.swa_utils.AveragedModel(head)
    objects = {"frozen": frozen, "head": head, "optimizer": optimizer, "average": average}
    gate = HeldGate()
    engine = made(objects, gate=gate)
    for number in (1, 2, 3):
        head(frozen(torch.randn(3, 64))).sum().backward()
        optimizer.step()
        average.update_parameters(head)
        state = state_of(objects)
        assert cut(engine, number, must=True)
        assert gate.expected_bytes > frozen.weight.nbytes + 2 * head.weight.nbytes
        engine.wait()
        assert_same(kept_state(folder, number), state)


class Losses:
    """Keeps all that it is given."""

    def __init__(self) -> None:
        self.every: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"every": list(self.every)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_what_is_taken_at_the_cut_may_outgrow_its_room(made: Made, folder: ArenaFolder) -> None:
    job, losses = Job(), Losses()
    objects = {**job.objects, "losses": losses}
    engine = made(objects)
    for step, size in enumerate((3, 10_000, 40_000, 1), 1):
        losses.every.append(torch.arange(float(size)))
        job.step()
        assert cut(engine, step, must=True) and engine.wait() == step
        assert_same(kept_state(folder, step), state_of(objects))


def test_what_an_optimizer_is_given_as_something_else_grows_is_captured(made: Made, folder: ArenaFolder) -> None:
    job, losses = Job(), Losses()
    job.model.register_parameter("later", nn.Parameter(torch.arange(300.0)))
    objects = {**job.objects, "losses": losses}
    engine = made(objects)
    for step in (1, 2):
        losses.every.append(torch.ones(3))
        assert cut(engine, step, must=True)
        engine.wait()
        assert_same(kept_state(folder, step), state_of(objects))
        if step == 1:
            job.optimizer.add_param_group({"params": [job.model.later]})


def test_a_state_is_loaded_behind_a_fence(made: Made, folder: ArenaFolder) -> None:
    job = Job()
    engine = made(job.objects, gate=HeldGate())
    job.step()
    other = {name: one.state_dict() for name, one in Job().objects.items()}
    expected = state_of(job.objects)
    assert cut(engine, 1, must=True)
    engine.fence()
    job.model.load_state_dict(other["model"])
    job.optimizer.load_state_dict(other["optimizer"])
    assert engine.wait() == 1
    assert_same(kept_state(folder, 1), expected)
    job.step()
    assert cut(engine, 2, must=True)
    assert engine.wait() == 2


def test_a_state_that_changes_its_shape_gets_another_arena(made: Made, folder: ArenaFolder) -> None:
    job = Job()
    engine = made(job.objects)
    for step in (1, 2, 3):
        job.step()
        assert cut(engine, step, must=True)
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5000))]})
    job.optimizer.param_groups[1]["params"][0].grad = torch.ones(5000)
    job.optimizer.step()
    assert not cut(engine, 4), "it is made beside training"
    engine.wait()
    assert steps_in(folder) == [] and len(folder.found()) == 1, "it took the place of the one before"
    for step in (5, 5, 6):
        assert cut(engine, step)
        engine.wait()
    assert steps_in(folder) == [6, 5, 5]
    assert_same(kept_state(folder, 6), state_of(job.objects))


def test_parameters_that_move_are_followed(made: Made, folder: ArenaFolder) -> None:
    job = Job()
    engine = made(job.objects)
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    job.model.inner[0].weight.data = job.model.inner[0].weight.data.clone() + 1
    job.model.inner[1].running_mean = torch.ones(256)
    job.optimizer.state[job.model.inner[0].weight]["exp_avg"] = torch.full((256, 16), 5.0)
    assert cut(engine, 2)
    engine.wait()
    assert_same(kept_state(folder, 2), state_of(job.objects))


def _other_memory(job: Job) -> None:
    for one in job.model.parameters():
        one.data = one.data.clone() + 1


def _other_type(job: Job) -> None:
    job.model.inner.double()


def _other_shape(job: Job) -> None:
    job.model.inner[3].bias.data = torch.ones(9)


def _other_moments(job: Job) -> None:
    for state in job.optimizer.state.values():
        state["exp_avg"].data = state["exp_avg"].data.clone() + 1


@pytest.mark.parametrize("change", [_other_memory, _other_type, _other_shape, _other_moments])
def test_parameters_whose_memory_was_replaced_are_captured_where_they_lie_now(
    made: Made, folder: ArenaFolder, change: Callable[[Job], None]
) -> None:
    """The tensors are the same objects: ``.data`` is how ``Module.to`` moves them, and others swap weights."""
    job = Job()
    engine = made(job.objects)
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    change(job)
    expected = state_of(job.objects)
    assert cut(engine, 2, must=True)
    engine.wait()
    assert_same(kept_state(folder, 2), expected)


def test_tensors_of_all_sorts_are_stored_in_the_order_of_their_elements(made: Made, folder: ArenaFolder) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(70, 90).t())
            self.last = nn.Parameter(torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last))
            self.short = nn.Parameter(torch.randn(3000).bfloat16())
            self.imaginary = nn.Parameter(torch.randn(700, dtype=torch.complex64))
            self.single = nn.Parameter(torch.tensor(3.0))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.long_one = nn.Parameter(torch.randn(100_000))
            self.register_buffer("conjugated", torch.randn(9, dtype=torch.complex64).conj())
            self.register_buffer("flags", torch.tensor([True, False]))

    odd = Odd()
    optimizer = torch.optim.SGD(list(odd.parameters()))
    objects = {"odd": odd, "optimizer": optimizer}
    engine = made(objects)
    for step in (1, 2):  # at the cut, and beside training
        optimizer.step()
        assert cut(engine, step, must=True)
        engine.wait()
        assert_same(kept_state(folder, step), state_of(objects))


class Growing:
    """Gives other tensors at each cut, and more of them."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        self.count += 1
        return {str(number): torch.full((number + 1,), self.count) for number in range(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_small_objects_may_change_what_they_hold_without_another_arena(made: Made, folder: ArenaFolder) -> None:
    job = Job()
    growing = Growing()
    engine = made({**job.objects, "growing": growing})
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    for step in range(2, 8):
        job.step()
        assert cut(engine, step)
        engine.wait()
        tensors = kept_state(folder, step)[1]
        found = {key: data for key, data in tensors.items() if key.startswith("growing/")}
        count = growing.count
        assert found == {f"growing/{n}": bytes(torch.full((n + 1,), count).numpy().data) for n in range(count)}
    assert len(folder.found()) == 1


def test_a_restarted_process_goes_on_in_the_arena_that_it_finds(made: Made, folder: ArenaFolder) -> None:
    job = Job()
    engine = made(job.objects)
    for step in (1, 2, 3):
        job.step()
        assert cut(engine, step, must=True)
    engine.close()
    (before,) = folder.found()
    again = made(job.objects, step=2)  # what came after step 2 is no part of the history that goes on
    job.step()
    assert cut(again, 3, must=True)
    again.wait()
    (info,) = folder.found()
    assert info.name == before.name
    assert info.steps == (3, 2, 1)
    assert_same(kept_state(folder, 3), state_of(job.objects))
    again.close()


def test_memory_that_a_restarted_process_has_outgrown_gives_way(made: Made, folder: ArenaFolder) -> None:
    job = Job()
    engine = made(job.objects)
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    engine.close()
    job.model.register_buffer("grown", torch.arange(2.0**14))
    again = made(job.objects, step=1)
    job.step()
    assert cut(again, 2, must=True) and again.wait() == 2
    assert_same(kept_state(folder, 2), state_of(job.objects))
    assert steps_in(folder) == [2]


@pytest.mark.parametrize("error", [ArenaDamaged("what is in it makes no sense"), FileNotFoundError("it was removed")])
def test_an_arena_that_was_left_and_cannot_be_opened_gives_way_to_another_one(
    made: Made, folder: ArenaFolder, error: Exception
) -> None:
    class Broken(ArenaFolder):
        def open(self, name: str, *, writes: bool = False) -> Any:
            if writes:
                raise error
            return super().open(name)

    job = Job()
    engine = made(job.objects)
    assert cut(engine, 1, must=True)
    engine.close()
    again = made(job.objects, step=1, folder=Broken(folder.path))
    for step in (2, 3):
        assert cut(again, step, must=True) and again.wait() == step
    assert steps_in(folder) == [3, 2]


def test_what_another_rank_has_left_is_not_filled(made: Made, folder: ArenaFolder) -> None:
    job = Job()
    other = made(job.objects, identity=replace(IDENTITY, world=2, rank=1))
    assert cut(other, 1, must=True)
    other.close()
    engine = made(job.objects, identity=replace(IDENTITY, world=2), step=1)
    assert cut(engine, 2, must=True)
    engine.wait()
    assert sorted((one.identity.rank, one.steps) for one in folder.found() if one.identity) == [(0, (2,)), (1, (1,))]
    engine.close()


def test_what_cannot_be_captured_is_told_by_its_path_and_costs_nothing_else(made: Made) -> None:
    job = Job()
    broken = Growing()
    engine = made({**job.objects, "broken": broken})
    job.step()
    assert cut(engine, 1, must=True)
    broken.state_dict = lambda: {"a": [object()]}  # type: ignore[method-assign]
    with pytest.raises(UnsupportedValue, match=r"broken\.a\[0\]"):
        cut(engine, 2)
    del broken.state_dict
    engine.wait()
    assert cut(engine, 3, must=True)
    assert engine.wait() == 3


def test_an_arena_that_does_not_fit_is_told_at_the_next_cut(
    made: Made, folder: ArenaFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    engine = made(job.objects)
    monkeypatch.setattr(type(folder), "_check_room", lambda *_, **__: (_ for _ in ()).throw(ArenaError("no room")))
    assert not cut(engine, 1)
    with pytest.raises(ArenaError, match="no room"):
        engine.wait()


class OneFits:
    """A file system with room for one arena of a size, and not for a larger one."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: ArenaFolder) -> None:
        self.room_bytes: int | None = None
        check = ArenaFolder._check_room

        def checked(given: ArenaFolder, opened: int, layout: Any) -> None:
            taken = sum(one.size_bytes for one in folder.found())
            self.room_bytes = layout.size_bytes * 3 // 2 if self.room_bytes is None else self.room_bytes
            if taken + layout.size_bytes > self.room_bytes:
                raise ArenaError("no room")
            check(given, opened, layout)

        patch.setattr(ArenaFolder, "_check_room", checked)


def test_a_state_that_outgrows_all_memory_is_told_at_each_cut_and_captured_where_there_is_room_again(
    made: Made, folder: ArenaFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits, job = OneFits(monkeypatch, folder), Job()
    engine = made(job.objects)
    job.step()
    assert cut(engine, 1, must=True) and engine.wait() == 1
    job.model.register_buffer("grown", torch.zeros(2**18 - 1024))  # a MiB would be worth a warning
    for _ in range(3):
        with pytest.raises(ArenaError, match="no room"):
            cut(engine, 3, must=True)
    assert fits.room_bytes is not None
    fits.room_bytes *= 20
    assert cut(engine, 4, must=True) and engine.wait() == 4
    assert steps_in(folder) == [4]


def test_where_only_the_new_arena_fits_the_old_one_is_removed_for_it(
    made: Made, folder: ArenaFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    OneFits(monkeypatch, folder)
    job = Job()
    engine = made(job.objects)
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    job.model.register_buffer("grown", torch.zeros(2**14))
    assert cut(engine, 2, must=True) and engine.wait() == 2
    assert steps_in(folder) == [2]


@pytest.mark.parametrize("must", [False, True])
def test_an_arena_that_somebody_removed_is_made_anew_and_that_is_told(
    made: Made, folder: ArenaFolder, *, must: bool
) -> None:
    job = Job()
    engine = made(job.objects)
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    shutil.rmtree(folder.path)
    job.step()
    if must:
        with pytest.warns(CaptureWarning, match=r"an arena was removed .* RemoveIPC=no"):
            assert cut(engine, 2, must=True)
    else:
        assert not cut(engine, 2)
        with pytest.warns(CaptureWarning, match="an arena was removed"):
            engine.wait()
        assert cut(engine, 2)
    expected = state_of(job.objects)
    assert engine.wait() == 2 and steps_in(folder) == [2]
    assert_same(kept_state(folder, 2), expected)
    job.step()
    assert cut(engine, 3) and engine.wait() == 3, "told once"


def test_memory_that_the_run_left_on_another_number_of_ranks_gives_way_to_two_newer_cuts(
    made: Made, folder: ArenaFolder
) -> None:
    """Another rank may be a cut behind, and have nothing else to go on from. What another run left is not its own."""
    job, another = Job(), b"another run's id"
    more = replace(IDENTITY, world=IDENTITY.world + 2)
    for identity in (more, replace(more, rank=1), replace(IDENTITY, run=another)):
        engine = made(job.objects, identity=identity)
        assert cut(engine, 1, must=True)
        engine.close()
    lives = made(job.objects, identity=replace(more, rank=2))
    assert cut(lives, 1, must=True)
    lives.wait()
    engine = made(job.objects)
    for step, arenas in ((2, 5), (3, 3)):
        job.step()
        assert cut(engine, step, must=True) and engine.wait() == step
        assert len(folder.found()) == arenas
    left = [(one.identity.run == another, one.identity.rank, one.steps) for one in folder.found() if one.identity]
    assert sorted(left) == [(False, 0, (3, 2)), (False, 2, (1,)), (True, 0, (1,))]


def test_memory_of_another_number_of_ranks_gives_way_at_once_if_there_is_no_other_room(
    made: Made, folder: ArenaFolder
) -> None:
    class Full(ArenaFolder):
        def create(self, layout: Any) -> Any:
            if self.found():
                raise ArenaError("no room is free")
            return super().create(layout)

    job = Job()
    other = made(job.objects, identity=replace(IDENTITY, world=IDENTITY.world + 1))
    assert cut(other, 1, must=True)
    other.close()
    engine = made(job.objects, folder=Full(folder.path))
    assert cut(engine, 2, must=True) and engine.wait() == 2 and steps_in(folder) == [2]


def test_an_arena_that_another_process_fills_is_not_taken(made: Made, folder: ArenaFolder) -> None:
    job = Job()
    lives = made(job.objects)
    assert cut(lives, 1, must=True) and lives.wait() == 1
    engine = made(job.objects)
    with pytest.raises(ArenaError, match="filled by another process"):
        cut(engine, 2, must=True)
    assert steps_in(folder) == [1]


def test_a_failing_copy_is_told_and_the_next_cut_is_captured(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    engine = made(job.objects)
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    make = Moves.make

    def failing(self: Moves, **how: Any) -> list[Issued]:
        if threading.current_thread().name == "lakeckpt-copier":
            raise MemoryError("x")
        return make(self, **how)

    monkeypatch.setattr(Moves, "make", failing)
    job.step()
    assert cut(engine, 2)
    engine._idle()
    with pytest.raises(SaveFailed, match="the capture of step 2 failed: MemoryError"):
        engine.wait()
    monkeypatch.undo()
    job.step()
    assert cut(engine, 3)
    assert engine.wait() == 3


def test_a_copier_that_fails_on_and_on_tells_all_of_it_and_captures_the_next_cut(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation that was given up cannot be let go of either: the copier goes on, and nobody waits for it."""
    job = Job()
    engine = made(job.objects)
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()

    def failing(self: CaptureEngine, job: Any) -> bool:
        raise MemoryError("no memory")

    def no_files(self: Filling) -> None:
        abandon(self)
        raise OSError("no files")

    abandon = Filling.abandon
    with monkeypatch.context() as patched:
        patched.setattr(CaptureEngine, "_completes", failing)
        patched.setattr(Filling, "abandon", no_files)
        job.step()
        assert cut(engine, 2)
        engine.finish()
    assert engine._failures
    engine._failures.add(None, OSError("another one"))
    with pytest.raises(SaveFailed, match="the capture of step 2 failed: MemoryError") as caught:
        engine.wait()
    assert caught.value.__notes__ == ["and then: memory for captures could not be made: OSError('another one')"]
    job.step()
    assert cut(engine, 3)
    assert engine.wait() == 3


def test_why_a_capture_was_given_up_is_told_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    engine = made(job.objects)
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    assert engine.dropped(1) == (False, None)

    def failing(self: CaptureEngine, job: Any) -> bool:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(CaptureEngine, "_completes", failing)
        job.step()
        assert cut(engine, 2)
        engine.finish()
    over, failure = engine.dropped(2)
    assert over and isinstance(failure, SaveFailed) and "no memory" in str(failure)
    assert engine.dropped(2) == (False, None) and engine.wait() == 1


def test_documents_that_outgrow_the_arena_get_another_one(made: Made, folder: ArenaFolder) -> None:
    job = Job()
    engine = made(job.objects)
    job.step()
    assert cut(engine, 1, must=True)
    assert cut(engine, 2, must=True, readers={"x": bytes(2**20)})
    engine.wait()
    assert steps_in(folder) == [1]
    assert cut(engine, 3, must=True, readers={"x": bytes(2**20)})
    assert engine.wait() == 3
    assert 3 in steps_in(folder)


def test_closing_leaves_no_thread_and_no_fence(folder: ArenaFolder) -> None:
    job = Job()
    before = set(threading.enumerate())
    engine = CaptureEngine(job.objects, IDENTITY, folder=folder)
    job.step()
    assert cut(engine, 1, must=True)
    engine.close()
    assert set(threading.enumerate()) == before
    left = weakref.ref(engine)
    del engine
    gc.collect()
    assert left() is None, "no hook knows it"
    job.step()


@pytest.mark.parametrize("back", [False, True], ids=["swapped", "and back"])
def test_weights_that_are_swapped_in_place_unannounced_do_not_get_into_a_generation(
    made: Made, folder: ArenaFolder, *, back: bool
) -> None:
    """As averages of weights are, for an evaluation: through ``.data``, which torch does not count as a change."""
    job, gate = Job(), HeldGate()
    engine = made(job.objects, gate=gate)
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    job.step()
    assert cut(engine, 2)
    kept = [one.data.clone() for one in job.model.parameters()]
    for one in job.model.parameters():
        one.data.mul_(0.9)
    gate.open.set()
    if back:
        engine._idle()  # all was copied while others were swapped in
        for one, other in zip(job.model.parameters(), kept, strict=True):
            one.data.copy_(other)
    with pytest.raises(UnannouncedChange, match=r"'model/inner.*step 2.*call manager.fence\(\)"):
        engine.wait()
    assert steps_in(folder) == [1]


def test_the_bytes_that_are_copied_last_are_always_sampled(made: Made) -> None:
    model = nn.ParameterList([torch.zeros(16 * 1024) for _ in range(100)])  # many more slices than spots
    gate = HeldGate()
    engine = made({"model": model}, gate=gate)
    assert cut(engine, 1, must=True)
    model[99].data[-1] = 1.0
    with pytest.raises(UnannouncedChange, match="'model/99' changed"):
        engine.wait()


def test_an_interrupt_in_the_fence_gives_the_capture_up_and_leaves_nobody_waiting(
    made: Made, folder: ArenaFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    engine = made(job.objects, gate=HeldGate())
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    job.step()
    assert cut(engine, 2)
    make = Moves.make

    def interrupted(self: Moves, **how: Any) -> list[Issued]:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return make(self, **how)

    monkeypatch.setattr(Moves, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.step()
    monkeypatch.undo()
    with pytest.raises(SaveFailed, match="the capture of step 2 was interrupted"):
        engine.wait()
    assert steps_in(folder) == [1]
    job.step()
    assert cut(engine, 3)
    assert engine.wait() == 3


class Wrapper(torch.optim.Optimizer):
    """An optimizer by its class alone, as some libraries wrap another one: without its hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def test_the_optimizer_in_a_wrapper_without_hooks_announces_its_steps(made: Made, folder: ArenaFolder) -> None:
    job, gate = Job(), HeldGate()
    wrapper = Wrapper(job.optimizer)
    objects = {"model": job.model, "optimizer": wrapper}
    engine = made(objects, gate=gate)
    for step in (1, 2):
        job.backward()
        wrapper.step()
        expected = state_of(objects)
        assert cut(engine, step, must=True)
        assert gate.expected_bytes > 2.5 * sum(one.nbytes for one in job.model.parameters())
        job.backward()
        wrapper.step()
        assert engine.wait() == step
        assert_same(kept_state(folder, step), expected)


def test_what_a_wrapped_optimizer_is_given_later_is_captured(made: Made, folder: ArenaFolder) -> None:
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    inner = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    objects = {"one": one, "other": other, "optimizer": Wrapper(inner)}
    engine = made(objects)
    for step in (1, 2, 3):
        other(one(torch.randn(3, 8))).sum().backward()
        inner.step()
        expected = state_of(objects)
        assert cut(engine, step, must=True)
        engine.wait()
        assert_same(kept_state(folder, step), expected)
        if step == 1:
            inner.add_param_group({"params": list(other.parameters())})


def test_a_forked_child_that_closes_leaves_the_arena_alone(made: Made, folder: ArenaFolder) -> None:
    job = Job()
    engine = made(job.objects)
    job.step()
    assert cut(engine, 1, must=True)
    engine.wait()
    if not (child := os.fork()):
        try:
            engine.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert steps_in(folder) == [1]
    job.step()
    assert cut(engine, 2)
    assert engine.wait() == 2


class AppState:
    """Wraps a model and its optimizer, as the tutorial of ``torch.distributed.checkpoint`` does."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = [model], {"one": optimizer}
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        (model,) = self.model
        state = self.optimizer["one"].state_dict()
        return {"model": model.state_dict(), "optimizer": state, "calls": torch.tensor(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Hidden:
    """Keeps what it wraps where nobody looks."""

    def __init__(self, model: nn.Module) -> None:
        self.of = model.state_dict

    def state_dict(self) -> dict[str, Any]:
        return dict(self.of())

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_parameters_and_moments_in_a_wrapper_are_copied_beside_training(made: Made, folder: ArenaFolder) -> None:
    job, gate = Job(), HeldGate()
    objects = {"app": AppState(job.model, job.optimizer)}
    engine = made(objects, gate=gate)
    prepared = []
    for step in (1, 2, 3):
        job.step()
        assert cut(engine, step, must=True)
        prepared.append(id(engine.planner.late))
        tensors = {**job.model.state_dict(), "seen": job.model.seen.clone()}
        expected = {f"app/model/{key}": bytes(one.numpy().copy().data) for key, one in tensors.items()}
        assert gate.expected_bytes > 2.5 * sum(one.nbytes for one in job.model.parameters())
        job.model(torch.randn(8, 16))
        job.step()
        assert engine.wait() == step
        found = kept_state(folder, step)[1]
        changed = [key for key in expected.keys() & found.keys() if bytes(found[key]) != expected[key]]
        assert len(expected.keys() & found.keys()) > 4 and not [key for key in changed if "running" not in key]
    assert prepared[1] == prepared[2], "a new small tensor at each cut makes no copy ready anew"


def test_a_state_of_which_much_is_copied_at_the_cut_is_named_once(made: Made) -> None:
    model = nn.Linear(1024, 256)
    engine = made({"hidden": Hidden(model), "small": nn.Linear(8, 8)})
    with pytest.warns(CaptureWarning, match=r"captures copy 100% of the state \(1 MiB\).*'hidden/weight'"):
        assert cut(engine, 1, must=True)
    engine.wait()
    assert cut(engine, 2, must=True) and engine.wait() == 2
