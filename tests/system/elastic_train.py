"""Train one epoch with a global batch of 8 rows on however many ranks there are, and note which rows each step used.

The table lies in ``table`` of the working directory, and the run in ``run``. A step takes at least 0.3 s until the file
``hurry`` is there, and none in an attempt that finds the file ``hold``. ``ARENAS`` in the environment is
the folder of this node's memory. The rank of the node ``FAILS_ON`` kills itself in its first step, each time by another
signal: else the micro-batch would be blamed. What each rank restored is noted in ``restored.jsonl``, and each finished
step in ``finished.jsonl``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lakeckpt
from tests.frameworks.notes import note

GLOBAL_BATCH = 8


def append(name: str, **facts: object) -> None:
    with open(name, "a") as file:
        file.write(json.dumps(facts) + "\n")


def hold() -> None:
    """Wait as in a step: a lost node breaks the collective, and SIGTERM ends the process at once."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while Path("hold").exists():
        dist.barrier()
        time.sleep(0.05)
    signal.signal(signal.SIGTERM, before)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = lakeckpt.ReadOptions(num_lanes=8)
    dataset = lakeckpt.LakeDataset("table", batch_size=4, shuffle=True, seed=7, options=options)
    loader = lakeckpt.LakeLoader(dataset)
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    is_bad = os.environ.get("FAILS_ON") == socket.gethostname()
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with lakeckpt.CheckpointManager(
        "run", state, persist_every=50, capture_every=1, arenas=os.environ["ARENAS"]
    ) as manager:
        step = manager.restore()
        report = manager.restore_report
        assert report is not None
        os.environ["ATTEMPT"] = str(report.attempt)
        append(
            "restored.jsonl",
            attempt=report.attempt,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            node=socket.gethostname(),
            step=step,
            captured=report.captured,
            read=dict(report.read),
            passed_over=report.passed_over,
        )
        hold()
        accumulate = manager.accumulation(global_batch=GLOBAL_BATCH, exact=True)
        ids: list[int] = []
        batches = 0
        for batch in loader if loader.epoch == 0 else ():
            ids += batch["id"].tolist()
            batches += 1
            loss = (model(batch["x"][:, None]).sum(1) - batch["y"]).square().sum()
            (loss / GLOBAL_BATCH).backward()
            if batches < accumulate and not batch.receipt.last:
                continue
            step += 1
            note(step, ids)
            optimizer.step()
            optimizer.zero_grad()
            append("finished.jsonl", attempt=report.attempt, step=step)
            if is_bad:
                os.kill(os.getpid(), (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)[start % 3])
            manager.step(batch)
            ids, batches = [], 0
            if not Path("hurry").exists():
                time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
