"""Real pipelines, DDP and FSDP2 on two ranks: they wait where the gate says, and compute what they would without it.

That a rank waits is shown without a clock: the other one goes on only when a slice was admitted into the window.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lakeckpt.checkpoint.bubbles.collectives import watch_forward
from lakeckpt.checkpoint.bubbles.gate import BubbleGate
from tests.patience import PATIENCE_S
from tests.tracking.processes import run_processes

WIDTH = 8
STAGES = 4
MICROBATCHES = 4
V_SCHEDULES = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}
SINGLE_SCHEDULES = ["ScheduleGPipe", "Schedule1F1B"]
LOOPED_SCHEDULES = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
SCHEDULES = [*SINGLE_SCHEDULES, *LOOPED_SCHEDULES, *sorted(V_SCHEDULES)]


class Held(nn.Module):
    """A layer that waits, once, until the other rank has copied something."""

    def __init__(self, store: dist.Store | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.store = store

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.store is not None:
            store, self.store = self.store, None
            store.wait(["copied"], timedelta(seconds=60))
        return torch.relu(self.inner(value))


class Copier(threading.Thread):
    """Asks for one slice and tells the other rank when it was admitted."""

    def __init__(self, gate: BubbleGate, store: dist.Store) -> None:
        super().__init__(daemon=True)
        self.gate, self.store = gate, store
        self.start()

    def run(self) -> None:
        self.gate.admit(1, threading.Event())
        self.store.set("copied", "1")


def join(rank: int, folder: Path, name: str) -> dist.Store:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / name), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    return dist.PrefixStore("test", store)


def leave() -> None:
    """Not before the other rank has received all that was sent to it."""
    dist.barrier()
    dist.destroy_process_group()


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def pipeline(rank: int, name: str) -> tuple[Any, list[nn.Module]]:
    """A schedule of this rank's stages, and their modules."""
    from torch.distributed import pipelining

    is_single = name in SINGLE_SCHEDULES
    numbers = [rank] if is_single else [rank, STAGES - 1 - rank] if name in V_SCHEDULES else [rank, rank + 2]
    modules: list[nn.Module] = []
    for number in numbers:
        torch.manual_seed(number)
        modules.append(Held())
    stages = [
        pipelining.PipelineStage(module, number, 2 if is_single else STAGES, torch.device("cpu"))
        for number, module in zip(numbers, modules, strict=True)
    ]
    kind = getattr(pipelining.schedules, name)
    return kind(stages[0] if is_single else stages, MICROBATCHES, loss_fn=loss_of), modules


def step(schedule: Any, rank: int, name: str) -> None:
    torch.manual_seed(99)
    inputs, target = torch.randn(2, MICROBATCHES, WIDTH).unbind()
    has_last = rank == (0 if name in V_SCHEDULES else 1)
    schedule.step(*([inputs] if rank == 0 else []), **({"target": target, "losses": []} if has_last else {}))


def watch_pipelines(rank: int, folder: Path) -> None:
    store = join(rank, folder, "pipelines")
    for name in SCHEDULES:
        watch_pipeline(rank, name)
    assert watch_pipelines_wait(rank, store)
    leave()


def watch_pipeline(rank: int, name: str) -> None:
    from lakeckpt.checkpoint.bubbles.pipeline import watch_schedule

    bare, bare_modules = pipeline(rank, name)
    schedule, modules = pipeline(rank, name)
    gate = BubbleGate()
    watch_schedule(gate, schedule)
    for number in range(3):
        gate.cut(number)
        step(schedule, rank, name)
        step(bare, rank, name)  # nobody watches it
    gate.cut(3)
    for mine, other in zip(modules, bare_modules, strict=True):
        for one, two in zip(mine.parameters(), other.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)
    second, third = ([window.site for window in record.windows] for record in gate.records()[1:])
    assert second == third == [f"pipeline {number}" for number in range(len(third))] and third, name


def watch_pipelines_wait(rank: int, store: dist.Store) -> bool:
    """The last stage waits for a slice of the first rank, which is in its window only because of that."""
    from lakeckpt.checkpoint.bubbles.watch import Bubbles

    name = "ScheduleInterleaved1F1B"
    bubbles = Bubbles()
    gate = bubbles.gate
    schedule, modules = pipeline(rank, name)
    assert bubbles.watch(schedule) is schedule
    step(schedule, rank, name)  # tries shapes out, and waits for them in its own way
    if rank == 1:
        cast(Held, modules[-1]).store = store
    copier = Copier(gate, store) if rank == 0 else None
    gate.cut(0)
    step(schedule, rank, name)
    if copier is not None:
        copier.join(PATIENCE_S)
    return True


def watch_data_parallel(rank: int, folder: Path) -> None:
    from torch.nn.parallel import DistributedDataParallel

    from lakeckpt.checkpoint.bubbles.watch import Bubbles

    store = join(rank, folder, "ddp")
    gradients = []
    for watched in (False, True):
        torch.manual_seed(1)
        waits = store if watched and rank == 1 else None
        model = DistributedDataParallel(nn.Sequential(Held(), Held(waits)), bucket_cap_mb=1e-4)
        bubbles = Bubbles()
        gate = bubbles.gate
        if watched:
            assert bubbles.watch(model) is model
        copier = Copier(gate, store) if watched and rank == 0 else None
        for number in range(3):
            gate.cut(number)
            model.zero_grad()
            model(torch.ones(2, WIDTH) * (rank + 1)).sum().backward()
        gate.cut(3)
        gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
        if copier is not None:
            copier.join(PATIENCE_S)
        if watched:
            assert [[one.site for one in record.windows] for record in gate.records()] == [["ddp 0"]] * 3
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))
    leave()


@pytest.mark.soak
def test_pipelines_wait_where_the_gate_says_and_compute_the_same(tmp_path: Path) -> None:
    run_processes(2, watch_pipelines, tmp_path)


def test_ddp_waits_where_the_gate_says_and_sums_the_same(tmp_path: Path) -> None:
    run_processes(2, watch_data_parallel, tmp_path)


def test_a_forward_pass_is_free_time_also_when_it_fails() -> None:
    gate, model = BubbleGate(), nn.Linear(2, 2)
    watch_forward(gate, model)
    gate.cut(0)
    model(torch.ones(2))
    with pytest.raises(RuntimeError):
        model(torch.ones(3))
    gate.cut(1)
    assert [(one.site, one.kind) for one in gate.records()[0].windows] == [("forward 0", "free"), ("forward 1", "free")]


def test_what_is_no_schedule_is_refused() -> None:
    from lakeckpt.checkpoint.bubbles.pipeline import watch_schedule
    from lakeckpt.errors import ConfigError

    with pytest.raises(ConfigError, match="Schedule1F1B"):
        watch_schedule(BubbleGate(), nn.Linear(2, 2))


def test_a_torch_that_waits_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.pipelining import schedules

    from lakeckpt.checkpoint.bubbles import pipeline as watches
    from lakeckpt.errors import ConfigError

    monkeypatch.setattr(watches, "is_schedule", lambda what: True)
    monkeypatch.delattr(schedules, "_wait_batch_p2p")
    with pytest.raises(ConfigError, match="idle"):
        watches.watch_schedule(BubbleGate(), object())


def test_waits_of_other_threads_and_of_nothing_are_not_reported() -> None:
    from torch.distributed.pipelining import schedules

    from lakeckpt.checkpoint.bubbles.pipeline import watch_schedule

    class Work:
        waited = 0

        def wait(self) -> None:
            self.waited += 1

    class Schedule(schedules.PipelineScheduleSingle):
        def __init__(self) -> None:
            """No stage."""

        def step(self, work: Any) -> None:  # type: ignore[override]
            schedules._wait_batch_p2p([])
            thread = threading.Thread(target=schedules._wait_batch_p2p, args=([work],))
            thread.start()
            thread.join()
            schedules._wait_batch_p2p([work])

        def _step_microbatches(self, *args: Any, **how: Any) -> None:
            """Nothing."""

    gate, work, schedule = BubbleGate(), Work(), Schedule()
    watch_schedule(gate, schedule)
    gate.cut(0)
    schedule.step(work)
    schedules._wait_batch_p2p([work])
    gate.cut(1)
    assert work.waited == 3
    assert [one.site for one in gate.records()[0].windows] == ["pipeline 0"]
