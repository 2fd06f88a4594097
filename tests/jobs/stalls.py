"""A job of several ranks into which one fault is put, on one rank after one step: for the watch to find.

`run` starts it under `lakeckpt run` or torchrun, and returns what the run says afterwards. The kinds of faults are in
`tests/jobs/stall_kinds.py`; `tests/jobs/test_stalls.py` and `benchmarks/stalls.py` use the job.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lakeckpt.watch.facts import children_of
from tests.frameworks.harness import ROOT, write_table
from tests.jobs.stall_kinds import ADDED, DISK, EVERYWHERE, FAULTS, HEALTHY, HOLDS_S, SLOW
from tests.patience import PATIENCE_S

BATCH, ROWS, AT = 4, 4096, 30
STEP_S = 0.05
_PRELOADED = [
    "torch._dynamo", "torch.distributed.launcher.api", "lakeckpt.checkpoint.manager", "lakeckpt.data.loader.loader",
    "lakeckpt.data.dataset.dataset", __name__,
]  # fmt: skip
_SLOW_SITE = """
import functools, os, time
from lakeckpt.lake.storage.local import LocalStorage
def slow(call):
    @functools.wraps(call)
    def later(*args, **options):
        if os.path.exists({path!r}):
            time.sleep(1)
        return call(*args, **options)
    return later
for name in ("list", "read", "put", "put_new"):
    setattr(LocalStorage, name, slow(getattr(LocalStorage, name)))
"""


def run(
    folder: Path,
    fault: str,
    *,
    ranks: int = 4,
    on: int = 2,
    watch: str = "report",
    until: str = "stall",
    launcher: str = "run",
    environment: Mapping[str, str] | None = None,
    site: str = "",
) -> dict[str, Any]:
    """Run the job in ``folder`` with a fault ``on`` a rank. ``until``: "stall": end it once a stall is written down;
    "end": wait for its end. ``environment``: more of it; ``site``: the script that each process of Python begins with.
    Returns what ``lakeckpt faults --json`` says, with the time of the fault as ``"injected"``.
    """
    write_table(folder / "table", rows=ROWS, group=32 if fault == "stopped worker" else 256)
    if fault == "grows":
        _keep_back(folder)
    elif fault == "long save":
        site = _SLOW_SITE.format(path=str(folder / SLOW)) + site
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(site)
    all_of = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(environment or {})}
    all_of["PYTHONPATH"] = os.pathsep.join([*([str(folder / "site")] if site else []), str(ROOT / "src"), str(ROOT)])
    with _disk(folder) if fault == "frozen disk" else contextlib.nullcontext():
        job = _started(folder, [str(folder), fault, str(on), watch], ranks, launcher, all_of)
        try:
            _wait(job, folder, until)
            if until == "stall":  # before the watch sees that all are killed
                return _found(folder, job.status(), all_of)
        finally:
            _kill(job, folder)
    return _found(folder, job.status(), all_of)


@dataclass(frozen=True)
class _Launcher:
    """The launcher of a job, which leads a group of processes. ``status`` returns its exit status; None: it lives."""

    pid: int
    status: Callable[[], int | None]
    wait: Callable[[], object]


def _started(folder: Path, arguments: list[str], ranks: int, launcher: str, environment: dict[str, str]) -> _Launcher:
    """Start the job: "run" and "torchrun" are commands; "elastic" is torchrun's function, in a process that is forked
    from one that has imported torch, which saves its ranks half a minute of processor time."""
    out = folder / "said.txt"
    if launcher == "elastic":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        forked = context.Process(target=_launch, args=(out, arguments, ranks, environment))
        forked.start()
        return _Launcher(forked.pid or 0, lambda: forked.exitcode, forked.join)
    ways = {"run": ["-m", "lakeckpt", "run"], "torchrun": ["-m", "torch.distributed.run"]}
    command = [sys.executable, *ways[launcher], f"--nproc-per-node={ranks}", "--max-restarts=3", __file__, *arguments]
    with out.open("wb") as said:
        job = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    return _Launcher(job.pid, job.poll, job.wait)


def _launch(out: Path, arguments: list[str], ranks: int, environment: dict[str, str]) -> None:
    """Be torchrun."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with out.open("wb") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder, fault, on, watch = arguments
    exec((Path(folder) / "site" / "sitecustomize.py").read_text(), {})
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=Path(folder).name, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=3, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, main)(Path(folder), fault, int(on), watch)


def _wait(job: _Launcher, folder: Path, until: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while job.status() is None and time.monotonic() < end:
        if until == "stall" and any((folder / "run" / "watch" / "stalls").glob("*")):
            break
        time.sleep(0.1)
    if until == "end" and job.status() is None:
        said = (folder / "said.txt").read_text(errors="replace")
        raise AssertionError(f"the job did not end\n{said[-4000:]}")


def _found(folder: Path, status: int | None, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "lakeckpt", "faults", str(folder / "run"), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    said = (folder / "said.txt").read_text(errors="replace")
    assert done.returncode == 0, said[-4000:] + done.stderr
    injected = folder / "injected"
    at_s = float(injected.read_text()) if injected.exists() else 0.0
    return {**json.loads(done.stdout), "injected": at_s, "said": said, "status": status}


def _kill(job: _Launcher, folder: Path) -> None:
    """End the job and all its processes, stopped ones too. The ranks of torchrun lead groups of their own, with their
    loaders' workers."""
    if (folder / DISK).exists():  # a rank that waits for a disk cannot be killed
        subprocess.run(["fsfreeze", "-u", folder / DISK], capture_output=True, check=False)
    ranks = [one.pid for one in children_of(job.pid)]
    for group in (job.pid, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    job.wait()


def can_freeze() -> bool:
    """Return whether this process may mount a file system and freeze it."""
    return os.geteuid() == 0 and all(map(shutil.which, ("mkfs.ext4", "mount", "fsfreeze"))) and _has_loops()


def _has_loops() -> bool:
    return subprocess.run(["losetup", "-f"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Mount a file system of its own in the folder."""
    with (folder / "image").open("wb") as image:
        image.truncate(32 << 20)
    (folder / DISK).mkdir()
    subprocess.run(["mkfs.ext4", "-q", folder / "image"], check=True)
    subprocess.run(["mount", "-o", "loop", folder / "image", folder / DISK], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder / DISK], check=True)


def _keep_back(folder: Path) -> None:
    """Leave so many rows in the table that they are read soon after the fault; the rest comes later."""
    for file in sorted((folder / "table").glob("*"))[1:]:
        file.unlink()
    pq.write_table(pq.read_table(folder / "table" / "part-00.parquet"), folder / ADDED)


def main(folder: Path, fault: str, on: int, watch: str) -> None:
    """The training script."""
    import torch
    import torch.distributed as dist

    import lakeckpt

    rank = int(os.environ["RANK"])
    is_again = (folder / "injected").exists()  # the first attempt may have died at its start
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    follow = lakeckpt.Follow(poll_every_s=0.5, stop_after_idle_s=2 * HOLDS_S) if fault == "grows" else False
    dataset = lakeckpt.LakeDataset(folder / "table", batch_size=BATCH, shuffle=True, seed=3, follow=follow)
    workers: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 1} if fault == "stopped worker" else {}
    loader = lakeckpt.LakeLoader(dataset, **workers)
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    watched: Any = watch if watch != "none" else None
    inject = {**{name: one for name, (one, _) in FAULTS.items()}, **HEALTHY, "none": lambda _: None}[fault]
    with lakeckpt.CheckpointManager(folder / "run", state, capture_every=1, watch=watched) as manager:
        done = manager.restore()
        batches = iter(loader)
        for batch in batches:
            is_slow = fault == "slow" and rank == on and done > AT
            time.sleep((3 if is_slow else 1) * STEP_S if not is_again else 0)
            optimizer.zero_grad()
            if fault == "stopped worker" and done > AT and rank == on:  # its loader has read ahead
                (folder / "injected").write_text(repr(time.time()))
            if done == AT and not is_again and (rank == on or fault in EVERYWHERE):
                if rank == on:
                    (folder / "injected").write_text(repr(time.time()))
                if fault == "skips":
                    next(batches)
                elif fault == "leaves":
                    break
                else:
                    inject(folder)
            trained(batch["x"][:, None]).square().sum().backward()
            optimizer.step()
            done += 1
            manager.step(batch)
            if fault == "long save" and done == AT + 1:
                manager.save()
                (folder / SLOW).unlink(missing_ok=True)
    if rank == 0:
        (folder / "weights.json").write_text(json.dumps([one.tolist() for one in model.parameters()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
