"""A training script for torchrun: rank 1 kills itself in the middle of the first attempt.

``elastic.py FOLDER MODE``: MODE is ``on`` (save_on) or ``off``. Ranks note when one was killed, and when the process of
each began, in seconds since the machine was started. `run` runs the script.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import lakeckpt
from tests.frameworks.harness import ROOT
from tests.patience import PATIENCE_S

KILLED_AFTER = 5


def run(folder: Path, mode: str) -> str:
    """Run the script under torchrun, which starts it again once; what all processes have printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    # torchrun keeps its store, over which gloo may hang in the second attempt, with or without lakeckpt
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command += [__file__, str(folder), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def begun_s() -> float:
    """When this process began."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def main(folder: Path, mode: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(folder / "table", batch_size=4, shuffle=True, seed=3))
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    options = {"save_on": ("SIGTERM",), "grace_s": 10_000.0} if mode == "on" else {}
    notes = (folder / f"notes-{attempt}-{rank}.jsonl").open("a")
    with notes, lakeckpt.CheckpointManager(folder / "run", state, persist_every=2, **options) as manager:
        done = manager.restore()
        print(json.dumps({"restored": done, "begun_s": begun_s()}), file=notes, flush=True)
        for batch in loader:
            (model(batch["x"][:, None]) * batch.receipt.weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            print(json.dumps({"step": done, "ids": batch["id"].tolist()}), file=notes, flush=True)
            manager.step(batch)
            if attempt == 0 and done == KILLED_AFTER:
                if rank == 1:
                    print(json.dumps({"killed_s": time.clock_gettime(time.CLOCK_BOOTTIME)}), file=notes, flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()  # as in a collective: SIGTERM comes from torchrun
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
