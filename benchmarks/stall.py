"""How long does training stand still for a save?  ``python -m benchmarks.stall [--params N] [--json FILE]``

A model of N parameters with Adam (12 bytes each) is updated and saved; then comes a stand-in for forward and backward
(a product of matrices on one thread, for ``--compute-s``); then the next update. Counted is what the training thread
spends in the call that saves, and what it waits for before it may update: nothing else, so that writing to storage,
which all do elsewhere, is not in it. All ways of saving take turns in one process; medians, and the spread.

``async_save`` of torch.distributed.checkpoint runs as it comes, with a stager that is kept (its memory is touched
once), with one that keeps it in shared memory, and with ``--process`` in a process of its own. What restoring from the
arena takes, `benchmarks.restore` tells.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.measure import show
from benchmarks.places import MEMORY, place_for_a_run
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.recovery.facts import CutId

_LAYER = 4096


class Job:
    """A model, its optimizer, and a stand-in for the work between two updates."""

    def __init__(self, params: int, compute_s: float) -> None:
        torch.set_num_threads(1)
        layers = max(1, round(params / (_LAYER * _LAYER)))
        self.model = nn.Sequential(*(nn.Linear(_LAYER, _LAYER) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)
        for one in self.model.parameters():
            one.grad = torch.full_like(one, 1e-3)
        self.compute_s = compute_s
        self._a = torch.randn(512, 512)
        self.optimizer.step()

    @property
    def state_bytes(self) -> int:
        """Parameters and moments."""
        return 3 * sum(one.nbytes for one in self.model.parameters())

    def compute(self) -> None:
        """Forward and backward."""
        end = time.perf_counter() + self.compute_s
        while time.perf_counter() < end:
            self._a @ self._a

    def state(self) -> dict[str, Any]:
        """What `torch.distributed.checkpoint` saves."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@dataclass(slots=True, kw_only=True)
class Way:
    """A way of saving: what is called after the update, before the next one, and when the timing is over."""

    name: str
    save: Callable[[int], None]
    before_update: Callable[[], None] = lambda: None
    settle: Callable[[], None] = lambda: None
    stalls_s: list[float] = field(default_factory=list)
    iterations_s: list[float] = field(default_factory=list)


def _lakeckpt(job: Job, folder: ArenaFolder) -> tuple[Way, CaptureEngine]:
    objects = {"model": job.model, "optimizer": job.optimizer}
    engine = CaptureEngine(objects, ArenaIdentity(run=b"stall benchmark.", rank=0, world=1), folder=folder)

    def save(step: int) -> None:
        if not engine.cut(CutId(attempt=0, step=step), digest=bytes(16)):
            raise RuntimeError("the cut was left out")

    def settle() -> None:
        engine.wait()

    engine.cut(CutId(attempt=0, step=0), digest=bytes(16), must=True)
    engine.wait()
    return Way(name="lakeckpt, every step", save=save, before_update=engine.fence, settle=settle), engine


def _async_save(job: Job, name: str, folder: Path, **options: Any) -> Way:
    running: list[Any] = []

    def save(step: int) -> None:
        running.append(dcp.async_save(job.state(), checkpoint_id=folder, **options))

    def settle() -> None:
        for one in running:
            one.result() if hasattr(one, "result") else one.upload_completion.result()
        running.clear()
        shutil.rmtree(folder, ignore_errors=True)

    return Way(name=name, save=save, settle=settle)


def _ways(job: Job, folder: Path, arenas: ArenaFolder, *, process: bool) -> tuple[list[Way], CaptureEngine]:
    def stager(*, shared: bool) -> DefaultStager:
        return DefaultStager(StagingOptions(False, shared, False, False))

    ours, engine = _lakeckpt(job, arenas)
    ways = [
        ours,
        _async_save(job, "async_save", folder / "a", no_dist=True),
        _async_save(job, "async_save, stager kept", folder / "b", no_dist=True, async_stager=stager(shared=False)),
        _async_save(
            job, "async_save, shared memory kept", folder / "c", no_dist=True, async_stager=stager(shared=True)
        ),
    ]
    if process:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        kind = AsyncCheckpointerType.PROCESS
        ways.append(_async_save(job, "async_save, process", folder / "d", async_checkpointer_type=kind))
    return ways, engine


def _turn(job: Job, way: Way, step: int, *, counts: bool) -> None:
    begin = time.perf_counter()
    job.optimizer.step()
    saving = time.perf_counter()
    way.save(step)
    saved = time.perf_counter()
    job.compute()
    fencing = time.perf_counter()
    way.before_update()
    end = time.perf_counter()
    way.settle()
    if counts:
        way.stalls_s.append(saved - saving + end - fencing)
        way.iterations_s.append(end - begin)


def _row(way: Way, best_s: float) -> list[str]:
    stall_s = statistics.median(way.stalls_s)
    return [
        way.name,
        f"{1e3 * stall_s:.2f}",
        f"{1e3 * min(way.stalls_s):.2f} … {1e3 * max(way.stalls_s):.2f}",
        f"{stall_s / best_s:.3f}",
        f"{statistics.median(way.iterations_s):.3f}",
    ]


def main() -> None:
    """Measure, print, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=200e6)
    parser.add_argument("--compute-s", type=float, default=2.0, help="seconds of forward and backward")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--process", action="store_true", help="async_save in a process of its own, too")
    parser.add_argument("--quick", action="store_true", help="a small model: does everything run?")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    repetitions = 2 if options.quick else options.repetitions
    job = Job(int(1e6 if options.quick else options.params), 0.1 if options.quick else options.compute_s)
    with place_for_a_run("stall") as folder, place_for_a_run("stall", under=MEMORY) as arenas:
        ways, engine = _ways(job, folder, ArenaFolder(arenas), process=options.process)
        try:
            for step in range(1, repetitions + 2):
                for way in ways:
                    _turn(job, way, 100 * step + ways.index(way), counts=step > 1)
        finally:
            engine.close()
    best_s = min(statistics.median(way.stalls_s) for way in ways[1:])
    show(
        f"a save of {job.state_bytes / 1e9:.2f} GB: how long training stands still",
        ("way", "stall, ms", "spread, ms", "to the best async_save", "iteration, s"),
        [_row(way, best_s) for way in ways],
    )
    if options.json is not None:
        told = {
            "on": {"torch": torch.__version__, "machine": platform.machine(), "system": platform.system()},
            "state_bytes": job.state_bytes,
            "ways": [{"name": w.name, "stalls_s": w.stalls_s, "iterations_s": w.iterations_s} for w in ways],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
