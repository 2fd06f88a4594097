"""What does a capture at every step cost, at once and in bubbles?  A pipeline and a DDP job on two single-thread ranks.

Iterations take turns in one run: one without a capture and one whose capture is let through in bubbles, in either
order; every few rounds also one whose capture copies at once. ``pipeline`` is an interleaved 1F1B of four stages
(torch.distributed.pipelining, gloo), whose gradients are clipped by their norm over all stages, as those of language
models are, so that the rank that is done first waits before its update; in ``pipeline-unclipped`` it goes on, and its
bubbles hold no more than its capture; ``ddp`` are two ranks of which one waits longer for its data; ``ddp-computing``
two of which one computes longer, which has no bubble of its own and shows what that costs. Each rank is bound to a
core, so that what it copies while it computes is at its own expense.

Printed for each way: the median time of an iteration, to the very end of its capture; its cost against the iteration
without in the same round, the Hodges-Lehmann estimate of paired differences of logarithms with its 95 % interval (the
few rounds that other work fell into do not move it, and noise does not push it up, as it does ratios), and their mean.
Since other work makes intervals wide all the same, also what captures took of the rank's core, by processor time: the
training thread in cuts, fences and the hooks of windows, and the copier but for what lay in bubbles from its first look
at the policy to its last slice, by the fastest iteration without captures. What a slice takes from others (caches,
the bandwidth of memory) only the first shows. Then what the training thread spent in cuts and fences, by the clock; and
for each rank the share of bytes that moved inside of bubbles, by when they were copied, not by what the gate meant to
do: of the rounds that count, and of all from the very first iteration, of which nothing was known; what was left for
the fence.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.bubble_gates import Accounted, Observed, Switch
from benchmarks.bubble_jobs import CASES, WORLD, Job
from benchmarks.measure import show
from benchmarks.places import MEMORY, place_for_a_run
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.bubbles.gate import Gate
from lakeckpt.checkpoint.bubbles.record import IterationRecord, waits_of
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.recovery.facts import CutId
from lakeckpt.wire.documents import from_plain, to_plain

WAYS = ("none", "at once", "in bubbles")
PATIENCE = timedelta(seconds=300)
NORMAL_95 = 1.96
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_TOP_PAD_": str(2**26)}
"""For glibc, of the ranks. As it comes, it gives what the optimizer and activations lay in back to the system, and asks
for it again: half of an update was page faults, and more in some than in others."""


def run_rank(rank: int, folder: str, case: str, asked: argparse.Namespace) -> None:
    """All rounds of one rank; what was measured goes to a file."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    cores = sorted(os.sched_getaffinity(0))
    if not asked.anywhere and len(cores) >= WORLD:
        os.sched_setaffinity(0, {cores[rank]})  # training, copies and transfers of a rank share one core
    store = dist.FileStore(f"{folder}/{case}-store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=PATIENCE)
    switch = Switch()
    job = CASES[case](rank, switch, asked)
    job.step()
    job.optimizer.step()  # makes the moments
    gates: dict[str, Accounted | None] = {"none": None, "at once": Observed(), "in bubbles": Accounted()}
    engine = CaptureEngine(
        {"model": job.model, "optimizer": job.optimizer},
        ArenaIdentity(run=case.encode().ljust(16)[:16], rank=rank, world=WORLD),
        folder=ArenaFolder(Path(folder) / "arenas"),
        gate=cast(Gate, switch),
        slice_bytes=None if asked.slice_mib is None else asked.slice_mib * 2**20,
    )
    switch.gate = Observed()
    engine.cut(CutId(attempt=0, step=0), digest=bytes(16), must=True)
    engine.wait()
    seconds: dict[str, dict[int, float]] = defaultdict(dict)
    spent: dict[str, list[float]] = defaultdict(list)
    cpu_s: dict[str, float] = defaultdict(float)
    copier = engine._copier._thread
    assert copier is not None and copier.ident is not None
    of_copier = time.pthread_getcpuclockid(copier.ident)
    steps = itertools.count(1)
    counts_from = 0
    began: list[bool] = []
    for number in range(-asked.warm_up, asked.rounds):
        if number == 0:
            counts_from = next(steps)
        for way in ways_of_round(number, asked.at_once_every):
            switch.cpu_s, before_s = 0.0, time.clock_gettime(of_copier)
            took, in_captures, in_captures_cpu_s = turn(job, engine, switch, gates[way], steps, began)
            if number >= 0:
                seconds[way][number] = took
                spent[way] += in_captures
                cpu_s[way] += in_captures_cpu_s + switch.cpu_s + time.clock_gettime(of_copier) - before_s
    told = {way: gate for way, gate in gates.items() if gate is not None}
    found = {
        "size_bytes": sum(one.nbytes for one in engine.planner.late.values()),
        "captured": sum(began),
        "skipped": len(began) - sum(began),
        "seconds": seconds,
        "spent": spent,
        "cpu_s": cpu_s,
        "cpu_in_bubbles_s": {way: gate.in_bubbles_s(counts_from) for way, gate in told.items()},
        "counts_from": counts_from,
        "records": {way: [to_plain(one) for one in gate.records()] for way, gate in told.items()},
    }
    Path(f"{folder}/{case}-{rank}.json").write_text(json.dumps(found))
    engine.close()
    dist.barrier()
    dist.destroy_process_group()


def ways_of_round(number: int, at_once_every: int) -> tuple[str, ...]:
    """The ways that a round goes through, in the order of their turns."""
    ways = ("none", "in bubbles") if number % 2 else ("in bubbles", "none")
    if number % at_once_every:
        return ways
    return (*ways, "at once") if number // at_once_every % 2 else ("at once", *ways)


def turn(
    job: Job, engine: CaptureEngine, switch: Switch, gate: Accounted | None, steps: Iterator[int], began: list[bool]
) -> tuple[float, list[float], float]:
    """An iteration of one way: its seconds from a barrier to a barrier, what it spent in its cut and fence, and the
    processor time of those."""
    switch.gate = gate
    dist.barrier()
    begin = time.perf_counter()
    job.optimizer.zero_grad()
    if gate is None:
        job.step()
        job.optimizer.step()
        dist.barrier()
        return time.perf_counter() - begin, [], 0.0
    before, cpu_before = time.perf_counter(), time.thread_time()
    step = next(steps)
    gate.cut(step)
    began.append(engine.cut(CutId(attempt=0, step=step), digest=bytes(16), common=max(0, step - 2)))
    after, cpu_after = time.perf_counter(), time.thread_time()
    job.step()
    fence, cpu_fence = time.perf_counter(), time.thread_time()
    engine.fence()
    fenced, cpu_fenced = time.perf_counter(), time.thread_time()
    job.optimizer.step()
    engine.wait()  # what is left of a capture is its own iteration's, not the next one's
    dist.barrier()
    took = time.perf_counter() - begin
    gate.rest()
    return took, [fenced - fence + after - before], cpu_fenced - cpu_fence + cpu_after - cpu_before


def main() -> None:
    """Run both cases and print the tables."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    arguments.add_argument("--rounds", type=int, default=90)
    arguments.add_argument("--warm-up", type=int, default=8, help="rounds that do not count")
    arguments.add_argument("--at-once-every", type=int, default=4, help="of so many rounds one copies at once, too")
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--rows", type=int, help="of a micro-batch; default: 96 in pipelines, 64 under DDP")
    arguments.add_argument("--microbatches", type=int, help="default: 2 in pipelines, 4 under DDP")
    arguments.add_argument("--slice-mib", type=int, help="default: as captures choose it by the size of the state")
    arguments.add_argument("--anywhere", action="store_true", help="ranks are not bound to a core each")
    arguments.add_argument("--slow-s", type=float, default=0.24, help="what rank 1 waits for its data: ddp")
    arguments.add_argument("--more", type=float, default=1.25, help="what rank 1 computes of rank 0: ddp-computing")
    arguments.add_argument("--json", type=Path, help="write what was measured to this file")
    asked = arguments.parse_args()
    written: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    os.environ.update(KEEPS_MEMORY)
    context = multiprocessing.get_context("spawn")
    with place_for_a_run("bubbles", under=MEMORY) as folder:
        for case in asked.cases:
            ranks = [
                context.Process(target=run_rank, args=(rank, str(folder), case, asked), daemon=True)
                for rank in range(WORLD)
            ]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            if any(rank.exitcode for rank in ranks):
                sys.exit(f"{case}: the ranks ended with {[rank.exitcode for rank in ranks]}")
            found = [json.loads(Path(f"{folder}/{case}-{rank}.json").read_text()) for rank in range(WORLD)]
            written[case] = summary(found)
            print_case(case, written[case])
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(written, indent=1))


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What is printed and written of one case."""
    none = ranks[0]["seconds"]["none"]  # from barrier to barrier: the same on all ranks
    ways: dict[str, Any] = {}
    for way in WAYS:
        mine = ranks[0]["seconds"][way]
        cost = [math.log(one / none[number]) for number, one in mine.items()]
        ways[way] = {
            "seconds": mine,
            "median_s": statistics.median(mine.values()),
            "cost": [math.expm1(one) for one in middle_of(cost)],
            "cost_mean": math.expm1(statistics.mean(cost)),
            "ranks": [of_rank(rank, way, list(none.values())) for rank in ranks] if way != "none" else [],
        }
    told = {name: [rank[name] for rank in ranks] for name in ("size_bytes", "captured", "skipped")}
    return told | {"ways": ways}


def middle_of(differences: list[float]) -> tuple[float, float, float]:
    """The Hodges-Lehmann estimate of where ``differences`` lie, and its 95 % interval by Wilcoxon's signed ranks."""
    number = len(differences)
    means = sorted((one + other) / 2 for one, other in itertools.combinations_with_replacement(differences, 2))
    spread = NORMAL_95 * math.sqrt(number * (number + 1) * (2 * number + 1) / 24)
    low = max(0, math.floor(number * (number + 1) / 4 - spread))
    return statistics.median(means), means[low], means[-1 - low]


def of_rank(rank: dict[str, Any], way: str, none: list[float]) -> dict[str, float]:
    """Where one rank's bytes moved, and what captures took of its core; ``none``: iterations without, in seconds."""
    records = [from_plain(IterationRecord, one, "a record") for one in rank["records"][way]]
    counted = [one for one in records if one.step >= rank["counts_from"]]
    slices = [one for record in counted for one in record.slices]
    bubbles = [one for record in counted for one in record.windows if one.kind == "bubble"]
    return {
        "bubble_share": bubble_share(counted),
        "bubble_share_of_all": bubble_share(records),
        "bubble_s": sum(one.end_s - one.begin_s for one in bubbles) / max(1, len(counted)),
        "urgent_share": sum(one.size_bytes for one in slices if one.urgent)
        / max(1, sum(one.size_bytes for one in slices)),
        "spent_s": statistics.mean(rank["spent"][way]),
        "spent_share": statistics.mean(rank["spent"][way]) / statistics.median(none),
        "cpu_share": (rank["cpu_s"][way] - rank["cpu_in_bubbles_s"][way]) / len(rank["spent"][way]) / min(none),
    }


def bubble_share(records: Sequence[IterationRecord]) -> float:
    """The part of the bytes that moved in bubbles."""
    return sum(one.share for one in waits_of(records) if one.kind == "bubble")


def print_case(case: str, found: dict[str, Any]) -> None:
    """The tables."""
    rows, shared = [], []
    for way, one in found["ways"].items():
        middle, low, high = one["cost"]
        costs = (
            [f"{middle:+.2%}", f"{low:+.2%} … {high:+.2%}", f"{one['cost_mean']:+.2%}"] if way != "none" else [""] * 3
        )
        rows.append([way, f"{one['median_s'] * 1000:.1f} ms", *costs])
        for number, rank in enumerate(one["ranks"]):
            names = ("cpu_share", "spent_share", "bubble_share", "bubble_share_of_all", "urgent_share")
            shared.append([way, str(number), *(f"{rank[name]:.2%}" for name in names)])
    sizes = " and ".join(f"{size / 1e6:.0f} MB" for size in found["size_bytes"])
    title = f"{case}: a capture of {sizes} at every step"
    show(title, ["capture", "iteration", "cost", "95 %", "mean"], rows)
    columns = [
        "capture",
        "rank",
        "of the core",
        "in the thread",
        "in bubbles",
        "from the first",
        "at the fence",
    ]
    show("of each rank", columns, shared)
    print(f"cuts captured: {found['captured']}, skipped: {found['skipped']}")


if __name__ == "__main__":
    main()
