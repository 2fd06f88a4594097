"""How fast does a cut get from memory to a disk?  ``python -m benchmarks.persist [--mebibytes N] [--place FOLDER]``

Persisting a generation of an arena (verified, digested, agreed on, written, synced, committed, by the code that the
agent runs) beside bare writes of the same bytes with fsync (buffered, and past the page cache; in 1, 2 and 4 threads),
`torch.save` and safetensors with fsync, and `dcp.save`, which syncs its files and not their names. Interleaved; medians
in GB/s, and each as a part of the fastest bare write.

Limit: persisting is at least 0.8 of the fastest bare write.

``--touched`` shows instead what saves of one embedding write when some of its rows changed since the last one: bytes of
files of tensors, and seconds of `CheckpointManager.save`, beside `torch.save` and fsync of all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from benchmarks.measure import show
from benchmarks.places import MEMORY, place_for_a_run
from lakeckpt.checkpoint.agent.generations import Generations, identity_of
from lakeckpt.checkpoint.agent.orders import Bye, Order, Outcome
from lakeckpt.checkpoint.agent.persister import Persister
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.format.keep import Keep
from lakeckpt.checkpoint.format.manifest import Begin
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.log import put_entry
from lakeckpt.checkpoint.persist.publish import Settings
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.recovery.facts import CutId
from lakeckpt.tracking.waiting import SystemWaiter

TENSORS = 24
BLOCK = 64 * 2**20
WIDTH = 128


class State:
    """Tensors of one size, as layers have them."""

    def __init__(self, size_bytes: int) -> None:
        count = size_bytes // TENSORS // 4 // 1024 * 1024
        self.tensors = {f"layer.{n}": torch.randn(count) for n in range(TENSORS)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        return sum(one.numel() * 4 for one in self.tensors.values())


def bare(place: Path, data: memoryview, *, threads: int, direct: bool) -> None:
    """Write ``data`` in so many files, and sync each and their folder."""

    def write(number: int) -> None:
        begin, end = (len(data) * n // threads // 4096 * 4096 for n in (number, number + 1))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
        descriptor = os.open(place / str(number), flags, 0o600)
        while begin < end:
            begin += os.write(descriptor, data[begin : min(begin + BLOCK, end)])
        os.fsync(descriptor)
        os.close(descriptor)

    jobs = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    _sync(place)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def ours(place: Path, generations: Generations, run: str) -> None:
    """Persist the newest generation by what the agent runs, from nothing to a commit. Like an agent, it keeps the arena
    mapped from one save to the next: ``generations``."""
    storage = LocalStorage(place / "run")
    entry = Begin(run=run, slot=0, world_size=1, library="", created_s=0.0, write_id=uuid.uuid4().hex)
    put_entry(storage, entry)
    said: list[Outcome] = []
    persister = Persister(
        storage,
        generations,
        Attempt(run=run, number=0, last=0, parent=None, seed=0),
        rank=0,
        world_size=1,
        settings=Settings(keep=Keep(), timeout_s=600.0),
        waiter=SystemWaiter(),
        report=said.append,
    )
    persister.take(Order(step=1, number=0))
    persister.take(Bye())
    persister.run()
    assert said[0].slot == 1, said


def torch_saved(place: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, place / "state.pt")
    _sync(place / "state.pt")
    _sync(place)


def safetensors_saved(place: Path, state: State) -> None:
    save_file(state.tensors, place / "state.safetensors")
    _sync(place / "state.safetensors")
    _sync(place)


def touched(place: Path, size_bytes: int) -> None:
    """What is written of an embedding of which some rows changed."""
    table = torch.nn.Embedding(size_bytes // 4 // WIDTH, WIDTH)
    rows, whole = table.num_embeddings, table.weight.nbytes
    changes = {
        "all of it, for the first time": range(0),
        "nothing": range(0),
        "one row": range(rows // 2, rows // 2 + 1),
        "the last 1 % of its rows": range(rows - rows // 100, rows),
        "64 rows at random": torch.randint(rows, (64,)).tolist(),
        "1 % of its rows at random": torch.randint(rows, (rows // 100,)).tolist(),
    }
    storage, found, known = LocalStorage(place / "run"), [], set[str]()
    saver = CheckpointManager(storage, {"model": table}, persist_every=10**9, keep=3)
    saver.restore()
    for what, change in changes.items():
        with torch.no_grad():
            for row in change:
                table.weight[row] += 1
        saver.step()
        begin_s = time.perf_counter()
        saver.save()
        took_s = time.perf_counter() - begin_s
        new = {info.path: info.size_bytes for info in storage.list("objects") if info.path not in known}
        known |= new.keys()
        wrote = sum(new.values())
        found.append((what, f"{wrote / 2**20:.1f}", f"{wrote / whole:.3f}", f"{took_s:.2f}"))
    begin_s = time.perf_counter()
    torch_saved(place, {"weight": table.weight.detach()})
    found.append(
        ("torch.save + fsync, all of it", f"{whole / 2**20:.1f}", "1.000", f"{time.perf_counter() - begin_s:.2f}")
    )
    show(f"an embedding of {whole / 2**20:.0f} MiB", ("changed", "MiB written", "of all", "seconds"), found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--place", default=None, help="a folder on the disk to be measured")
    parser.add_argument("--arenas", default=None, help="a folder of its own in memory; default: in /dev/shm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default=None)
    parser.add_argument("--quick", action="store_true", help="bare direct writes only, to compare with")
    parser.add_argument("--touched", action="store_true", help="what is written of an embedding that changed in part")
    given = parser.parse_args()
    if given.touched:
        with place_for_a_run("persist", under=given.place) as folder:
            touched(folder, given.mebibytes * 2**20)
        return 0
    state, run = State(given.mebibytes * 2**20), uuid.uuid4().hex
    places = contextlib.ExitStack()
    arenas = places.enter_context(place_for_a_run("persist", under=given.arenas or MEMORY))
    place = places.enter_context(place_for_a_run("persist", under=given.place))
    identity = identity_of(uuid.uuid4().bytes, rank=0, world_size=1)
    engine = CaptureEngine({"model": state}, identity, folder=ArenaFolder(arenas), generations=2)
    generations = Generations(ArenaFolder(arenas), identity)
    try:
        engine.cut(CutId(attempt=0, step=1), digest=bytes(16), must=True)
        engine.wait()
        memory = mmap.mmap(-1, state.size_bytes)
        data = memoryview(memory)
        for at in range(0, len(data), 2**20):
            data[at : at + 2**20] = os.urandom(2**20)[: len(data) - at]
        cases: dict[str, Callable[[Path], None]] = {"persist (ours)": lambda at: ours(at, generations, run)}
        for threads in (1, 2, 4):
            for direct in (False, True):
                name = f"bare write, {'direct' if direct else 'buffered'}, {threads} threads"
                cases[name] = lambda at, t=threads, d=direct: bare(at, data, threads=t, direct=d)  # type: ignore[misc]
        cases["torch.save + fsync"] = lambda at: torch_saved(at, state.tensors)
        cases["safetensors + fsync"] = lambda at: safetensors_saved(at, state)
        cases["dcp.save"] = lambda at: dcp.save({"model": state.tensors}, checkpoint_id=at / "dcp", no_dist=True)
        if given.quick:
            cases = {name: case for name, case in cases.items() if "ours" in name or "direct" in name}
        rates = measured(cases, place, state.size_bytes, given.rounds)
    finally:
        generations.close()
        engine.close()
        places.close()
    return told(rates, state.size_bytes, given.json)


def measured(
    cases: dict[str, Callable[[Path], None]], place: Path, size_bytes: int, rounds: int
) -> dict[str, list[float]]:
    """GB/s of each case in each round, after a round that does not count. Every round begins with another case: what a
    case leaves to the disk (blocks to be freed) costs the one after it."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        turn = number % len(cases)
        for name, case in [*cases.items()][turn:] + [*cases.items()][:turn]:
            at = place / uuid.uuid4().hex
            at.mkdir()
            begin_s = time.perf_counter()
            case(at)
            took_s = time.perf_counter() - begin_s
            shutil.rmtree(at)
            os.sync()
            if number:
                rates[name].append(size_bytes / took_s / 1e9)
    return rates


def told(rates: dict[str, list[float]], size_bytes: int, path: str | None) -> int:
    medians = {name: statistics.median(found) for name, found in rates.items()}
    best = max((name for name in medians if name.startswith("bare")), key=medians.__getitem__)
    rows = [
        (name, f"{medians[name]:.2f}", f"{min(found):.2f}-{max(found):.2f}", f"{medians[name] / medians[best]:.2f}")
        for name, found in rates.items()
    ]
    show(f"{size_bytes / 1e9:.2f} GB to a disk", ("", "GB/s", "spread", "of the fastest bare write"), rows)
    ratio = medians["persist (ours)"] / medians[best]
    print(f"persisting is {ratio:.2f} of the fastest bare write ({best}); the limit is 0.8")
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"size_bytes": size_bytes, "gb_per_s": rates, "ratio": ratio}, file, indent=1)
    return 0 if ratio >= 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
