"""Train as `docs/how-to/ddp.md` does, on processors, and note which rows each step used (`tests.frameworks.notes`).

The table lies in ``table`` of the working directory, and the run in ``run``. A step takes at least 0.3 s until the file
``hurry`` is there, so that a test meets the job in the middle. Notes have the number that the run gave an attempt.
``MANAGER`` in the environment has arguments of the manager, as JSON; ``HSDP`` divides the model over the ranks of each
of two nodes, and ``FSDP`` over all ranks. The rank ``HANGS`` reads from a silent socket
after its twelfth step, in the first attempt. What each rank restored is noted in ``restored.jsonl``, and each step
after its update in ``finished.jsonl``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lakeckpt
from tests.frameworks.notes import note
from tests.jobs.stall_kinds import silent_socket

EPOCHS = 2
EPOCH = 1_000
"""What is added to the ids of each later epoch, so that each row of each epoch has a number of its own."""


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(1, 4)
    if "HSDP" in os.environ:  # replicas on two nodes, each divided over the ranks of its node
        fully_shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))
    elif "FSDP" in os.environ:
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = lakeckpt.ReadOptions(num_lanes=24)
    dataset = lakeckpt.LakeDataset("table", batch_size=4, shuffle=True, seed=7, options=options)
    loader = lakeckpt.LakeLoader(dataset)
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    arguments = {"persist_every": 5, **json.loads(os.environ.get("MANAGER", "{}"))}
    with lakeckpt.CheckpointManager("run", state, **arguments) as manager:
        step = manager.restore()
        assert manager.restore_report is not None
        report = manager.restore_report
        os.environ["ATTEMPT"] = str(report.attempt)
        with open("restored.jsonl", "a") as file:
            what = {"attempt": report.attempt, "rank": dist.get_rank(), "step": step, "captured": report.captured}
            file.write(json.dumps({**what, "read": dict(report.read), "passed_over": report.passed_over}) + "\n")
        for _ in range(loader.epoch, EPOCHS):
            for batch in loader:
                if step == 12 and os.environ.get("HANGS") == str(dist.get_rank()) and report.attempt == 0:
                    silent_socket(Path())
                step += 1
                # Before its gradients reach the others: they may go on from this step if this rank dies in it.
                note(step, (batch["id"] + EPOCH * batch.receipt.epoch).tolist())
                loss = (model(batch["x"][:, None]).sum(1) - batch["y"]).square().sum()
                optimizer.zero_grad()
                (loss / max(1, batch.receipt.rows) * batch.receipt.weight).backward()
                optimizer.step()
                with open("finished.jsonl", "a") as file:
                    file.write(json.dumps({"attempt": report.attempt, "step": step}) + "\n")
                manager.step(batch)
                if not Path("hurry").exists():
                    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
