"""How fast does a state come back?  ``python -m benchmarks.restore [--mebibytes N] [--place FOLDER] [--json FILE]``

A model and its AdamW (2.4 GB of parameters and moments) are restored into where they live: from the arena in memory
beside bare copies of the same bytes (as it is, and before anything was committed: then all is verified before the
first byte is changed), then from a local disk beside bare reads of the same bytes into the same tensors
(in 1, 2 and 4 threads), ``torch.load`` with and without ``mmap``, safetensors, and ``dcp.load``. What is ours is the
whole of a restore: the log read, all compared, every byte verified, the states loaded, the next attempt begun. A last
row restores into a new optimizer, whose memory was never touched.

Turns are interleaved; medians, and each as a part of the fastest bare one, first with the files in the page cache, then
with each file put out of it. One more turn, which is not timed, tells how much memory each takes for itself at the most
(anonymous memory above what the process had), and compares every byte of what came back.

Limits: from the arena at least 0.5 of the fastest copy; no second copy of the state in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from benchmarks.measure import show
from benchmarks.places import MEMORY, place_for_a_run
from lakeckpt import CheckpointManager
from lakeckpt.checkpoint.agent.generations import digest_of_run, identity_of
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.capture.engine import CaptureEngine
from lakeckpt.checkpoint.persist.log import put_entry, read_entry
from lakeckpt.checkpoint.restore.restorer import Restorer
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.recovery.facts import CutId
from lakeckpt.tracking.exchange import Exchange

LAYERS = 24
BLOCK = 16 * 2**20
LIMIT = 0.5


class Job:
    """A model and its optimizer after a step; its tensors by name, and what they held when it was made."""

    def __init__(self, size_bytes: int) -> None:
        width = max(8, int((size_bytes / LAYERS / 12) ** 0.5))
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for one in self.model.parameters():
            one.grad = torch.full_like(one, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.digests = {name: digest(one) for name, one in self.tensors.items()}

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and moments: all but the counts of steps."""
        found = {name: one.detach() for name, one in self.model.named_parameters()}
        for name, one in self.model.named_parameters():
            states = self.optimizer.state[one]
            found |= {f"{name}.{key}": states[key] for key in ("exp_avg", "exp_avg_sq")}
        return found

    @property
    def size_bytes(self) -> int:
        return sum(one.nbytes for one in self.tensors.values())

    def forget(self) -> None:
        for one in self.tensors.values():
            one.zero_()

    def check(self, what: str) -> None:
        """Every byte is as it was saved."""
        for name, one in self.tensors.items():
            if digest(one) != self.digests[name]:
                raise AssertionError(f"{what}: {name} is not what was saved")


def digest(tensor: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(view_of(tensor).data)


def view_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


@dataclass(slots=True, kw_only=True)
class Case:
    """A way of restoring, what of files it reads, and what was measured."""

    name: str
    run: Callable[[], None]
    files: tuple[Path, ...] = ()
    bare: bool = False
    warm_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def rows(self, size_bytes: int, best_s: float, seconds: list[float]) -> list[str]:
        at = statistics.median(seconds)
        spread = f"{size_bytes / max(seconds) / 1e9:.2f}-{size_bytes / min(seconds) / 1e9:.2f}"
        return [self.name, f"{at:.3f}", f"{size_bytes / at / 1e9:.2f}", spread, f"{best_s / at:.2f}"]


# --- from memory


@contextlib.contextmanager
def in_memory(job: Job, place: Path, arenas: Path) -> Iterator[list[Case]]:
    """Ways to restore a generation of an arena, and to copy as many bytes."""
    committed, folder = LocalStorage(place / "committed"), ArenaFolder(arenas)
    new = Early(LocalStorage(place / "new"), name=os.path.realpath(committed.name))
    with CheckpointManager(place / "committed", job.objects, persist_every=1) as manager:
        manager.restore()
        manager.step()
    begin = read_entry(committed, 0)
    put_entry(new, begin)  # the same job, before its first commit
    identity = identity_of(digest_of_run(begin.run, committed), rank=0, world_size=1)
    engine = CaptureEngine(job.objects, identity, folder=folder, generations=2)
    try:
        engine.cut(CutId(attempt=0, step=2), digest=bytes(16), must=True)
        engine.wait()
        source = {name: view_of(one).copy() for name, one in job.tensors.items()}
        copies = [
            Case(name=f"bare copy, {threads} threads", run=partial(copied, job, source, threads), bare=True)
            for threads in (1, 2, 4)
        ]
        yield [
            Case(name="lakeckpt, from the arena", run=partial(ours, job.objects, committed, folder)),
            Case(name="the same, uncommitted", run=partial(ours, job.objects, new, folder)),
            *copies,
        ]
    finally:
        engine.close()


@dataclass
class Early:
    """A log that takes itself for that of the run at ``name``, whose arenas it finds then."""

    storage: LocalStorage
    name: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)


def ours(objects: dict[str, Any], storage: Any, arenas: ArenaFolder | None = None) -> None:
    _, _, report = Restorer(storage, Exchange(), objects, arenas=arenas).restore()
    assert not report.damaged and (report.captured is None) == (arenas is None), report


def copied(job: Job, source: dict[str, np.ndarray], threads: int) -> None:
    def copy(work: tuple[np.ndarray, np.ndarray]) -> None:
        np.copyto(*work)

    works = [
        (target[at : at + BLOCK], source[name][at : at + BLOCK])
        for name, target in ((name, view_of(one)) for name, one in job.tensors.items())
        for at in range(0, len(target), BLOCK)
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, works))


# --- from a disk


def on_disk(job: Job, place: Path) -> list[Case]:
    """Ways to restore from files, which are written here."""
    with CheckpointManager(place / "run", job.objects, persist_every=1) as manager:
        manager.restore()
        manager.step()
    tensors, raw = job.tensors, place / "raw"
    with open(raw, "wb") as file:
        for one in tensors.values():
            file.write(view_of(one).data)
    torch.save(tensors, place / "state.pt")
    save_file(tensors, place / "state.safetensors")
    dcp.save(tensors, checkpoint_id=place / "dcp", no_dist=True)
    os.sync()
    run = tuple(path for path in (place / "run").rglob("*") if path.is_file())
    storage = LocalStorage(place / "run")
    bare = [
        Case(
            name=f"bare read, {n} threads", run=partial(read, job, place / "raw", n), files=(place / "raw",), bare=True
        )
        for n in (1, 2, 4)
    ]
    return [
        Case(name="lakeckpt", run=partial(ours, job.objects, storage), files=run),
        *bare,
        Case(name="torch.load", run=partial(torch_loaded, job, place / "state.pt", False), files=(place / "state.pt",)),
        Case(
            name="torch.load, mmap",
            run=partial(torch_loaded, job, place / "state.pt", True),
            files=(place / "state.pt",),
        ),
        Case(
            name="safetensors",
            run=partial(safetensors_loaded, job, place / "state.safetensors"),
            files=(place / "state.safetensors",),
        ),
        Case(name="dcp.load", run=partial(dcp_loaded, job, place / "dcp"), files=tuple((place / "dcp").iterdir())),
        Case(name="lakeckpt, new optimizer", run=partial(anew, job, storage), files=run),
    ]


def read(job: Job, path: Path, threads: int) -> None:
    works: list[tuple[int, np.ndarray]] = []
    start = 0
    for one in job.tensors.values():
        view = view_of(one)
        works += [(start + at, view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)]
        start += len(view)
    descriptor = os.open(path, os.O_RDONLY)

    def fill(work: tuple[int, np.ndarray]) -> None:
        at, view = work
        done = 0
        while done < len(view):
            done += os.preadv(descriptor, [view[done:]], at + done)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, works))
    os.close(descriptor)


def torch_loaded(job: Job, path: Path, mmap: bool) -> None:
    tensors = job.tensors
    for name, found in torch.load(path, mmap=mmap, weights_only=True).items():
        tensors[name].copy_(found)


def safetensors_loaded(job: Job, path: Path) -> None:
    tensors = job.tensors
    with safe_open(path, framework="pt") as file:
        for name, target in tensors.items():
            target.copy_(file.get_tensor(name))


def dcp_loaded(job: Job, path: Path) -> None:
    dcp.load(job.tensors, checkpoint_id=path, no_dist=True)


def anew(job: Job, storage: LocalStorage) -> None:
    """As after a restart: the optimizer has no state yet, and keeps what it is given."""
    job.optimizer.state.clear()
    ours(job.objects, storage)


# --- measuring


def put_out(files: tuple[Path, ...]) -> None:
    """Files leave the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(case: Case, seconds: list[float]) -> None:
    begin_s = time.perf_counter()
    case.run()
    seconds.append(time.perf_counter() - begin_s)


def measure(cases: list[Case], rounds: int, *, cold: bool) -> None:
    for number in range(rounds + 1):
        for case in cases:
            timed(case, case.warm_s if number else [])
    for _ in range(rounds if cold else 0):
        for case in cases:
            put_out(case.files)
            timed(case, case.cold_s)


def check(job: Job, cases: list[Case]) -> None:
    """What each takes of memory, and whether it restores."""
    for case in cases:
        job.forget()
        with Peak() as peak:
            case.run()
        case.peak_bytes = peak.bytes
        job.check(case.name)


class Peak:
    """The most of anonymous memory that the process has above what it had, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = 0
        self.looked, self._over = threading.Event(), threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peak:
        self._before = anonymous_bytes()
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._over.wait(0.003):
            self.bytes = max(self.bytes, anonymous_bytes() - self._before)
            self.looked.set()


def anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


# --- telling


def told(title: str, cases: list[Case], size_bytes: int, seconds: Callable[[Case], list[float]]) -> float:
    """Print a table; the first case's speed as a part of the fastest bare one's."""
    best_s = min(statistics.median(seconds(case)) for case in cases if case.bare)
    show(
        title,
        ("", "s", "GB/s", "spread", "of the fastest bare one", "memory for itself, MB"),
        [[*case.rows(size_bytes, best_s, seconds(case)), f"{case.peak_bytes / 1e6:.0f}"] for case in cases],
    )
    return best_s / statistics.median(seconds(cases[0]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=2300, help="the size of the state")
    parser.add_argument("--place", default=None, help="a folder on the disk to be measured")
    parser.add_argument("--arenas", default=None, help="a folder in memory; default: in /dev/shm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small state: does everything run?")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    job = Job((8 if given.quick else given.mebibytes) * 2**20)
    rounds = 1 if given.quick else given.rounds
    places = contextlib.ExitStack()
    arenas = places.enter_context(place_for_a_run("restore", under=given.arenas or MEMORY))
    place = places.enter_context(place_for_a_run("restore", under=given.place))
    try:
        with in_memory(job, place, arenas) as memory:
            measure(memory, rounds, cold=False)
            check(job, memory)
        disk = on_disk(job, place)
        measure(disk, rounds, cold=True)
        check(job, disk)
    finally:
        places.close()
    size = f"{job.size_bytes / 1e9:.2f} GB"
    ratios = {
        "memory": told(f"{size} from memory", memory, job.size_bytes, lambda case: case.warm_s),
        "warm": told(f"{size} from the page cache", disk, job.size_bytes, lambda case: case.warm_s),
        "cold": told(f"{size} from the disk", disk, job.size_bytes, lambda case: case.cold_s),
    }
    heaviest = max(case.peak_bytes for case in (memory[0], disk[0]))
    print(f"from the arena: {ratios['memory']:.2f} of the fastest copy; the limit is {LIMIT}")
    print(f"the most memory that a restore takes for itself: {heaviest / 1e6:.0f} MB")
    if given.json is not None:
        plain = [
            {"name": one.name, "warm_s": one.warm_s, "cold_s": one.cold_s, "peak_bytes": one.peak_bytes}
            for one in (*memory, *disk)
        ]
        on = {"torch": torch.__version__, "machine": platform.machine(), "cpus": os.cpu_count()}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(
            json.dumps({"on": on, "size_bytes": job.size_bytes, "ratios": ratios, "cases": plain}, indent=1)
        )
    return 0 if given.quick or (ratios["memory"] >= LIMIT and heaviest < job.size_bytes / 2) else 1


if __name__ == "__main__":
    sys.exit(main())
