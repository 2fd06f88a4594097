"""How many bytes does a capture copy?  ``python -m benchmarks.captured_bytes [--mib N] [--json FILE]``

A model as with LoRA: 95 % of the bytes of the state are frozen, the rest are adapters with the moments of Adam. Printed
is what captures copy, as a part of the state: of cuts that stay in memory, once each generation of the arena holds the
frozen tensors, and of those that are saved. Beside it stand the processor seconds of a capture.

And replicas: ``--ranks`` ranks of a node (4) hold a model with Adam each, all trained, and capture a share each.
Printed is what all their arenas take, and what each rank copies and computes, as parts of what one rank alone does; and
how long the end of ``restore()`` takes to find that the state of a rank is that of the others.
Ranks take turns in one process, as each would have a processor of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import show
from benchmarks.places import MEMORY, place_for_a_run
from lakeckpt.checkpoint.arena.dividing import Division, division_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.counters import RunCounters
from lakeckpt.recovery.facts import CutId

MIB = 2**20
_GENERATIONS, _CAPTURES = 3, 12


def lora(mib: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of ``mib`` MiB with its optimizer, of which 95 % are frozen, in 24 layers."""
    layers = 24
    frozen, trained = (round(share * mib * MIB / 4 / layers) for share in (0.95, 0.05 / 3))
    model = nn.Module()
    for number in range(layers):
        model.register_parameter(f"base_{number}", nn.Parameter(torch.rand(frozen), requires_grad=False))
        model.register_parameter(f"lora_{number}", nn.Parameter(torch.rand(trained)))
    adapters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(adapters)
    for one in adapters:
        one.grad = torch.full_like(one, 1e-3)
    optimizer.step()
    return model, optimizer


def measured(mib: int, folder: ArenaFolder) -> dict[str, Any]:
    """Capture a model of ``mib`` MiB. Return the parts of the state that captures copied, and processor seconds."""
    model, optimizer = lora(mib)
    state = [*model.parameters(), *(one for state in optimizer.state.values() for one in state.values())]
    size_bytes = sum(one.nbytes for one in state)
    counters = RunCounters()
    identity = ArenaIdentity(run=b"captured bytes..", rank=0, world=1)
    engine = CaptureEngine({"model": model, "optimizer": optimizer}, identity, folder=folder, counters=counters)

    def capture(step: int, *, must: bool) -> tuple[float, float]:
        optimizer.step()
        before, begun_s = counters.beside_bytes + counters.fence_bytes, time.process_time()
        if not engine.cut(CutId(attempt=0, step=step), digest=bytes(16), common=step - 1, must=must):
            raise RuntimeError("a capture was left out")
        engine.wait()
        took_s = time.process_time() - begun_s
        return (counters.beside_bytes + counters.fence_bytes - before) / size_bytes, took_s

    with closing(engine):
        whole = [capture(step, must=True) for step in range(1, 2 + _GENERATIONS)]
        light = [capture(step, must=False) for step in range(2 + _GENERATIONS, 2 + _GENERATIONS + _CAPTURES)]
    return {
        "state_bytes": size_bytes,
        "copied": max(part for part, _ in light),
        "copied_if_saved": max(part for part, _ in whole),
        "cpu_s": statistics.median(took for _, took in light),
        "cpu_s_if_saved": statistics.median(took for _, took in whole[1:]),
    }


def replicas(mib: int, ranks: int, place: Path) -> dict[str, Any]:
    """Capture ``ranks`` replicas of ``mib`` MiB, alone and divided."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(round(mib / 3 / 4))))
    optimizer = torch.optim.Adam(model.parameters())
    for one in model.parameters():
        one.grad = torch.full_like(one, 1e-3)
    optimizer.step()
    nodes = {rank: tuple(range(ranks)) for rank in range(ranks)}

    def measure(rank: int, division: Division | None) -> tuple[int, int, float]:
        counters = RunCounters()
        identity = ArenaIdentity(run=b"captured bytes..", rank=rank, world=ranks)
        folder = ArenaFolder(place / ("alone" if division is None else "divided"))
        objects = {"model": model, "optimizer": optimizer}
        engine = CaptureEngine(objects, identity, folder=folder, generations=4, counters=counters)
        begun_s = time.perf_counter()
        engine.planner.replica()
        compared_s.append(time.perf_counter() - begun_s)
        engine.divide(division)
        took_s: list[float] = []
        with closing(engine):
            for step in range(1, 10):
                optimizer.step()
                before, begun_s = counters.beside_bytes + counters.fence_bytes, time.process_time()
                if not engine.cut(CutId(attempt=rank, step=step), digest=bytes(16), common=step - 1, must=step == 1):
                    raise RuntimeError("a capture was left out")
                engine.wait()
                took_s.append(time.process_time() - begun_s)
                copied = counters.beside_bytes + counters.fence_bytes - before
        (info,) = [one for one in folder.found() if one.identity == identity]
        return info.size_bytes, copied, statistics.median(took_s[1:])

    compared_s: list[float] = []
    size_bytes, copied, took_s = measure(0, None)
    found = [measure(rank, division_of(nodes, rank)) for rank in range(ranks)]
    return {
        "arenas": sum(one for one, _, _ in found) / size_bytes,
        "copied": max(one for _, one, _ in found) / copied,
        "cpu": max(one for _, _, one in found) / took_s,
        "compared_s": statistics.median(compared_s),
        "alone": {"arena_bytes": size_bytes, "copied": copied, "cpu_s": took_s},
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with place_for_a_run("captured-bytes", under=MEMORY) as place:
        found = measured(options.mib, ArenaFolder(place / "arenas"))
        shared = replicas(options.mib, options.ranks, place)
    show(
        f"Captures of {found['state_bytes'] / MIB:.0f} MiB of state, of which 95 % are frozen",
        ["cut", "bytes copied / state", "processor seconds"],
        [
            ["stays in memory", f"{found['copied']:.3f}", f"{found['cpu_s']:.4f}"],
            ["is saved", f"{found['copied_if_saved']:.3f}", f"{found['cpu_s_if_saved']:.4f}"],
        ],
    )
    show(
        f"{options.ranks} replicas on a node, as parts of what one rank alone takes",
        ["what", "part"],
        [
            ["arenas of all ranks", f"{shared['arenas']:.2f}"],
            ["bytes that a rank copies, at most", f"{shared['copied']:.2f}"],
            ["processor seconds of a rank, at most", f"{shared['cpu']:.2f}"],
        ],
    )
    print(f"restore() compares replicas of {options.mib} MiB in {shared['compared_s']:.3f} s")
    found = {**found, "replicas": shared}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
