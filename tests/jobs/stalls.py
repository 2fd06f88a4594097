"""A job of several ranks into which one fault is put, on one rank after one step: for the watch to find.

`run` starts it under `lakeckpt run` or torchrun, and returns what the run says afterwards. The kinds of faults are in
`tests/jobs/stall_kinds.py`; `tests/jobs/test_stalls.py` and `benchmarks/stalls.py` use the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lakeckpt.watch.facts import children_of
from tests.frameworks.harness import ROOT, write_table
from tests.jobs.stall_kinds import ADDED, DISK, EVERYWHERE, FAULTS, HEALTHY, HOLDS_S, SLOW
from tests.patience import PATIENCE_S

BATCH, ROWS, AT = 4, 4096, 30
STEP_S = 0.05
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
    write_table(folder / "table", rows=ROWS, group=256)
    if fault == "grows":
        _keep_back(folder)
    elif fault == "long save":
        site = _SLOW_SITE.format(path=str(folder / SLOW)) + site
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(site)
    all_of = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(environment or {})}
    all_of["PYTHONPATH"] = os.pathsep.join([*([str(folder / "site")] if site else []), str(ROOT / "src"), str(ROOT)])
    ways = {"run": ["-m", "lakeckpt", "run"], "torchrun": ["-m", "torch.distributed.run"]}
    command = [sys.executable, *ways[launcher], f"--nproc-per-node={ranks}", "--max-restarts=3", __file__]
    with (folder / "said.txt").open("wb") as out, _disk(folder) if fault == "frozen disk" else contextlib.nullcontext():
        job = subprocess.Popen(
            [*command, str(folder), fault, str(on), watch],
            env=all_of,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            _wait(job, folder, until)
        finally:
            _kill(job, folder)
    return _found(folder, job.returncode, all_of)


def _wait(job: subprocess.Popen[bytes], folder: Path, until: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while job.poll() is None and time.monotonic() < end:
        if until == "stall" and any((folder / "run" / "watch" / "stalls").glob("*")):
            break
        time.sleep(0.1)
    if until == "end" and job.poll() is None:
        said = (folder / "said.txt").read_text(errors="replace")
        raise AssertionError(f"the job did not end\n{said[-4000:]}")


def _found(folder: Path, status: int, environment: dict[str, str]) -> dict[str, Any]:
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


def _kill(job: subprocess.Popen[bytes], folder: Path) -> None:
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

    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    follow = lakeckpt.Follow(poll_every_s=0.5, stop_after_idle_s=2 * HOLDS_S) if fault == "grows" else False
    dataset = lakeckpt.LakeDataset(folder / "table", batch_size=BATCH, shuffle=True, seed=3, follow=follow)
    loader = lakeckpt.LakeLoader(dataset, num_workers=int(fault == "stopped worker"))
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    watched: Any = watch if watch != "none" else None
    inject = {**{name: one for name, (one, _) in FAULTS.items()}, **HEALTHY, "none": lambda _: None}[fault]
    with lakeckpt.CheckpointManager(folder / "run", state, capture_every=1, watch=watched) as manager:
        done = manager.restore()
        batches = iter(loader)
        for batch in batches:
            is_slow = fault == "slow" and rank == on and done > AT
            time.sleep((3 if is_slow else 1) * STEP_S if not start else 0)
            optimizer.zero_grad()
            if fault == "stopped worker" and done > AT and rank == on:  # its loader has read ahead
                (folder / "injected").write_text(repr(time.time()))
            if done == AT and not start and (rank == on or fault in EVERYWHERE):
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
