"""A job of several ranks into which one fault is put, on one rank after one step: for the watch to find.

`run` starts it under `lakeckpt run` or torchrun, and returns what the run says afterwards. `FAULTS` are the kinds that
hold up the job, `HEALTHY` those that do not. `tests/jobs/test_stalls.py` and `benchmarks/stalls.py` use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.frameworks.harness import ROOT, write_table
from tests.patience import PATIENCE_S

BATCH, ROWS, AT = 4, 4096, 30
STEP_S = 0.05


def stopped(folder: Path) -> None:
    """Stop by a signal."""
    os.kill(os.getpid(), signal.SIGSTOP)


def two_locks(folder: Path) -> None:
    """Two threads take two locks in different orders."""
    one, other, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take_other() -> None:
        with other:
            both.wait()
            one.acquire()

    threading.Thread(target=take_other, daemon=True).start()
    with one:
        both.wait()
        other.acquire()


def loop(folder: Path) -> None:
    """An endless loop of Python."""
    while True:
        pass


def loop_in_c(folder: Path) -> None:
    """An endless call of C that holds the interpreter's lock."""
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def busy_in_c(folder: Path) -> None:
    """A long call of C that holds the interpreter's lock and computes."""
    sum(range(1 << 62))


def sleep_in_c(folder: Path) -> None:
    """An endless call of C without the interpreter's lock."""
    ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def silent_socket(folder: Path) -> None:
    """Read from a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.recv(1)


def full_pipe(folder: Path) -> None:
    """Write into a pipe that nobody reads."""
    _, end = os.pipe()
    while True:
        os.write(end, bytes(4096))


def file_lock(folder: Path) -> None:
    """Wait for a lock on a file that another opening holds."""
    with (folder / "locked").open("w") as one, (folder / "locked").open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)


def child(folder: Path) -> None:
    """Wait for a child process that does not end."""
    subprocess.run(["sleep", "1000"], check=False)


def dead_child(folder: Path) -> None:
    """Wait for the answer of a child process that has died."""
    subprocess.Popen(["true"])
    time.sleep(0.2)
    threading.Event().wait()


def swapped(folder: Path) -> None:
    """Enter another collective than the others."""
    import torch
    import torch.distributed as dist

    dist.all_gather([torch.zeros(3) for _ in range(dist.get_world_size())], torch.zeros(3))


def leaves(folder: Path) -> None:
    """Leave the loop before the others."""
    raise StopIteration


def skips(folder: Path) -> None:
    """Take a micro-batch more than the others; the loop does it."""


def sleeps(folder: Path) -> None:
    """Sleep."""
    time.sleep(1000)


def naps(folder: Path) -> None:
    """Sleep for a while."""
    time.sleep(8)


def all_stop(folder: Path) -> None:
    """Stop with all other ranks; somebody lets them go on."""


def evaluates(folder: Path) -> None:
    """Evaluate for a while."""
    until_s, data = time.monotonic() + 8, bytes(1000)
    while time.monotonic() < until_s:
        data = bytes(reversed(data))


def killed(folder: Path) -> None:
    """Die by a signal."""
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(folder: Path) -> None:
    """Die by a fault of memory."""
    ctypes.string_at(0)


def raises(folder: Path) -> None:
    """Raise an exception."""
    raise ValueError("this micro-batch is bad")


FAULTS: dict[str, tuple[Callable[[Path], None], frozenset[str]]] = {
    "stopped": (stopped, frozenset({"stopped"})),
    "two locks": (two_locks, frozenset({"lock"})),
    "loop": (loop, frozenset({"loop"})),
    "in C with the lock": (loop_in_c, frozenset({"gil", "pipe"})),
    "computes in C with the lock": (busy_in_c, frozenset({"loop", "gil"})),
    "in C without the lock": (sleep_in_c, frozenset({"pipe"})),
    "silent socket": (silent_socket, frozenset({"socket"})),
    "full pipe": (full_pipe, frozenset({"pipe"})),
    "file lock": (file_lock, frozenset({"file"})),
    "child": (child, frozenset({"child"})),
    "dead child": (dead_child, frozenset({"child"})),
    "swapped collective": (swapped, frozenset({"mismatch"})),
    "leaves": (leaves, frozenset({"out of step"})),
    "skips": (skips, frozenset({"out of step"})),
    "sleeps": (sleeps, frozenset({"sleep"})),
}
"""Name → what holds up the job, and the kinds of verdict that are right."""
HEALTHY = {"naps": naps, "evaluates": evaluates}


def run(
    folder: Path,
    fault: str,
    *,
    ranks: int = 4,
    on: int = 2,
    watch: str = "report",
    until: str = "stall",
    launcher: str = "run",
) -> dict[str, Any]:
    """Run the job in ``folder`` with a fault ``on`` a rank. ``until``: "stall": end it once a stall is written down;
    "end": wait for its end. Returns what ``lakeckpt faults --json`` says, with the time of the fault as ``"injected"``.
    """
    write_table(folder / "table", rows=ROWS, group=256)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ways = {"run": ["-m", "lakeckpt", "run"], "torchrun": ["-m", "torch.distributed.run"]}
    command = [sys.executable, *ways[launcher], f"--nproc-per-node={ranks}", "--max-restarts=3", __file__]
    with (folder / "said.txt").open("wb") as out:
        job = subprocess.Popen(
            [*command, str(folder), fault, str(on), watch],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + PATIENCE_S
            while job.poll() is None and time.monotonic() < end:
                if until == "stall" and any((folder / "run" / "watch" / "stalls").glob("*")):
                    break
                time.sleep(0.1)
            if until == "end" and job.poll() is None:
                raise AssertionError(
                    f"the job did not end\n{(folder / 'said.txt').read_text(errors='replace')[-4000:]}"
                )
        finally:
            _kill(job)
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
    return {**json.loads(done.stdout), "injected": at_s, "said": said, "status": job.returncode}


def _kill(job: subprocess.Popen[bytes]) -> None:
    """End the job and all its processes, stopped ones too: torchelastic's ranks lead no sessions of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


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
    loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(folder / "table", batch_size=BATCH, shuffle=True, seed=3))
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    watched: Any = watch if watch != "none" else None
    inject = {**{name: one for name, (one, _) in FAULTS.items()}, **HEALTHY, "none": lambda _: None}[fault]
    with lakeckpt.CheckpointManager(folder / "run", state, capture_every=1, watch=watched) as manager:
        done = manager.restore()
        batches = iter(loader)
        for batch in batches:
            time.sleep(STEP_S if not start else 0)
            optimizer.zero_grad()
            if rank == on and done == AT and not start:
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
    if rank == 0:
        (folder / "weights.json").write_text(json.dumps([one.tolist() for one in model.parameters()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
