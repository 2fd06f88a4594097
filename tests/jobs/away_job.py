"""A training script whose run or store goes away: each rank notes which rows each step used, and prints where it goes
on, which steps were saved, and when `manager.step` held it up for more than half a second.

The environment has ``TABLE``, ``RUN``, ``OPTIONS`` (of the store, as JSON), ``MANAGER`` (arguments, as JSON), ``NOTES``
and ``HURRY``: a step takes ``STEP_S`` until this file is there.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lakeckpt
from tests.frameworks.notes import note


def main() -> None:
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(1, 1)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = lakeckpt.LakeDataset(os.environ["TABLE"], batch_size=2, columns=["id", "x"], shuffle=True, seed=7)
    loader = lakeckpt.LakeLoader(dataset)
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    options = json.loads(os.environ["OPTIONS"]) or None
    arguments = json.loads(os.environ["MANAGER"])
    rank = os.environ.get("RANK", "0")
    arguments["on_save"] = lambda saved: print(f"rank {rank} has saved step {saved.step}", flush=True)
    with lakeckpt.CheckpointManager(os.environ["RUN"], state, storage_options=options, **arguments) as manager:
        step = manager.restore()
        report = manager.restore_report
        assert report is not None
        os.environ["ATTEMPT"] = str(report.attempt)
        print(f"rank {rank} goes on at step {step} of attempt {report.attempt}", flush=True)
        if loader.epoch == 0:
            for batch in loader:
                loss = model(batch["x"][:, None]).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                note(step, batch["id"].tolist())
                begin_s = time.monotonic()
                manager.step(batch)
                if (took_s := time.monotonic() - begin_s) > 0.5:
                    print(f"rank {rank} was held up from {begin_s:.1f} for {took_s:.1f} s", flush=True)
                if not Path(os.environ["HURRY"]).exists():
                    time.sleep(float(os.environ["STEP_S"]))


if __name__ == "__main__":
    main()
