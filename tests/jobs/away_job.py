"""A training script whose run goes away: each rank notes which rows each step used, and prints where it goes on.

The environment has ``TABLE``, ``RUN``, ``OPTIONS`` (of the store, as JSON), ``MANAGER`` (arguments, as JSON), ``NOTES``
and ``HURRY``: a step takes a while until this file is there.
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
    with lakeckpt.CheckpointManager(os.environ["RUN"], state, storage_options=options, **arguments) as manager:
        step = manager.restore()
        report = manager.restore_report
        assert report is not None
        os.environ["ATTEMPT"] = str(report.attempt)
        print(f"rank {os.environ.get('RANK', '0')} goes on at step {step} of attempt {report.attempt}", flush=True)
        if loader.epoch == 0:
            for batch in loader:
                loss = model(batch["x"][:, None]).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                note(step, batch["id"].tolist())
                manager.step(batch)
                if not Path(os.environ["HURRY"]).exists():
                    time.sleep(0.1)


if __name__ == "__main__":
    main()
