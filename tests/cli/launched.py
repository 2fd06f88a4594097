"""A training script for `lakeckpt run` and torchrun: rank 1 kills itself at the steps that are named.

``launched.py FOLDER KILLS WORKERS METHOD MODE``: KILLS are steps, separated by commas. In attempt i, rank 1 kills
itself after it has finished the i-th of them. MODE is empty, or what else goes wrong in every attempt: ``raise`` and
``crash`` at the micro-batch with row `POISON`, or ``bad cut``: attempts that go on from a step beyond 5 raise. With
``stop 5``, rank 1 is stopped instead of killed, and collectives end after 5 s.
Each rank notes, for each step, the attempt, the time (seconds since 1970) and its rows. `run` runs the script by a
launcher.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
ROWS, BATCH, STEPS = 240, 4, 30
POISON = 77


def run(
    folder: Path,
    *options: str,
    kills: str = "",
    workers: int = 0,
    method: str = "fork",
    cold: bool = False,
    mode: str = "",
    status: int = 0,
) -> str:
    """Run the script under `lakeckpt run`, or if ``cold``, under torchrun, which ends with ``status``; what all
    processes printed."""
    launcher = ["torch.distributed.run", "--standalone", "--max-restarts=9"] if cold else ["lakeckpt", "run"]
    command = [sys.executable, "-m", *launcher, "--nproc-per-node=2", *options, __file__, str(folder), kills]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command += [str(workers), method, mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == status, done.stderr[-4000:]
    return done.stdout + done.stderr


def noted(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What ``rank`` noted, in the order of time."""
    return [json.loads(line) for line in (folder / f"notes-{rank}.jsonl").read_text().splitlines()]


def faults_of_run(folder: Path) -> dict[str, Any]:
    """What ``lakeckpt faults --json`` says of the run in ``folder``."""
    command = [sys.executable, "-m", "lakeckpt", "faults", str(folder / "run"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(folder: Path, kills: list[int], workers: int, method: str, mode: str) -> None:
    import torch
    import torch.distributed as dist

    import lakeckpt
    from lakeckpt.testing import fail_at

    limit_s = float(mode.removeprefix("stop ")) if mode.startswith("stop ") else None
    for start, step in enumerate(kills):
        fail_at(1, step + 1, "batch", by="SIGKILL" if limit_s is None else "SIGSTOP", attempt=start)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=None if limit_s is None else timedelta(seconds=limit_s))
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(5)
    model = torch.nn.Linear(1, 8)
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = lakeckpt.LakeLoader(
        lakeckpt.LakeDataset(folder / "table", batch_size=BATCH, shuffle=True, seed=3),
        num_workers=workers,
        multiprocessing_context=method if workers else None,
    )
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    notes, every = (folder / f"notes-{rank}.jsonl").open("a"), 5 if mode else 100
    with notes, lakeckpt.CheckpointManager(folder / "run", state, persist_every=every, capture_every=1) as manager:
        done = manager.restore()
        if mode == "bad cut" and done > 5:
            raise ValueError("the state is bad")
        for batch in loader:
            if mode in ("raise", "crash") and POISON in batch["id"].tolist():
                if mode == "raise":
                    raise ValueError(f"the row {POISON} is bad")
                os.kill(os.getpid(), 11)
            trained(batch["x"][:, None]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.step(batch)
            done += 1
            if mode == "bad cut" and done == 5:
                manager.wait()  # there is a checkpoint to go back to
            note = {"attempt": attempt, "step": done, "at": time.time(), "ids": batch["id"].tolist()}
            print(json.dumps(note), file=notes, flush=True)
    if rank == 0:
        (folder / "weights.json").write_text(json.dumps(model.weight.flatten().tolist()))


if __name__ == "__main__":
    _, name, steps, workers, method, mode = sys.argv
    main(Path(name), [int(one) for one in steps.split(",") if one], int(workers), method, mode)
