"""Writes the golden run of this version of lakeckpt beside itself: ``python -m tests.golden.checkpoint.make``.

Run it once for a release that changes a format, and commit what it wrote; the runs of older releases stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lakeckpt import __version__
from lakeckpt.lake.storage.local import LocalStorage
from tests.checkpoint.rig import Counter, EventWaiter, HubExchange, MemoryStorage, Reader, good, run_ranks
from tests.checkpoint.seams import manager_with

FOLDER = Path(__file__).parent


def objects_of(rank: int, world_size: int) -> dict[str, Any]:
    """What the golden runs saved, filled by `filled`, or fresh."""
    return {
        "model": torch.nn.Linear(3, 2),
        "own": Counter(),
        "note": Counter(),
        "reader": Reader(rank=rank, world_size=world_size, rows=100),
    }


def filled(rank: int) -> dict[str, Any]:
    """The values that were saved at step 2 by ``rank``."""
    return {
        "weight": torch.arange(6.0).reshape(2, 3),
        "bias": torch.tensor([0.5, -0.0]),
        "own": {"rank": rank, "mean": torch.full((2,), float(rank))},
        "note": {
            "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "complex": torch.tensor([1 + 2j], dtype=torch.complex64),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(True),
            "tuple": (1, None, 2.5, "é", b"\x00", 2**70),
            "array": np.arange(4, dtype=np.int16),
            7: "an integer key",
        },
    }


def main() -> None:
    """Save steps 1 and 2 of a job of two ranks."""
    memory = MemoryStorage()
    waiter = EventWaiter(memory)

    def body(rank: int, exchange: HubExchange) -> None:
        objects, values = objects_of(rank, 2), filled(rank)
        with torch.no_grad():
            objects["model"].weight.copy_(values["weight"])
            objects["model"].bias.copy_(values["bias"])
        objects["own"].value, objects["note"].value = values["own"], values["note"]
        manager = manager_with(memory, objects, persist_every=1, exchange=exchange, waiter=waiter)
        manager.restore()
        batches = iter(objects["reader"])
        for _ in range(2):
            next(batches)
            manager.step()

    good(run_ranks(2, body, waiters=[waiter]))
    target = LocalStorage(FOLDER / __version__)
    for path, data in memory.objects.items():
        target.put(path, [data])


if __name__ == "__main__":
    main()
