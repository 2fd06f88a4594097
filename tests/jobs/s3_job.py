"""A training job on S3 whose model counts rows: after an epoch of a history without faults in it, each counted once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, open_table
from lakeckpt.lake.parquet.kept_footers import kept_footers

ROWS = 30


class Counts(torch.nn.Module):
    """How often each row was in a step of this history."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(ROWS, dtype=torch.int64))


def train(lake: str, run: str, options: Mapping[str, Any]) -> None:
    """An epoch, with a save after every second step; resumed where an attempt before has left it."""
    kept_footers.forget()  # each job reads as a new process does: faults are addressed by the number of a request
    counts = Counts()
    loader = LakeLoader(
        LakeDataset(open_table(lake, storage_options=options), batch_size=5, columns=["x"], shuffle=True, seed=3)
    )
    state = {"counts": counts, "reader": loader}
    with CheckpointManager(run, state, storage_options=options, persist_every=2) as manager:
        manager.restore()
        if loader.epoch == 0:
            for batch in loader:
                counts.seen[batch["x"]] += 1
                manager.step(batch)


def counted(run: str, options: Mapping[str, Any], lake: str) -> list[int]:
    """The counts in the newest checkpoint."""
    counts = Counts()
    loader = LakeLoader(
        LakeDataset(open_table(lake, storage_options=options), batch_size=5, columns=["x"], shuffle=True, seed=3)
    )
    CheckpointManager(run, {"counts": counts, "reader": loader}, storage_options=options).restore()
    return counts.seen.tolist()
