"""A job under `lakeckpt run` that dies whenever a rank gets a certain row, until that row has left the deal.

`run` starts it in a folder, and may be called again with another number of ranks. Each rank notes what each step used
before `manager.step()`. Keys are ids of rows, or of a packed reader, its tokens: three for each row.
`tests/jobs/test_poisoned.py` uses it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.frameworks.harness import ROOT
from tests.patience import PATIENCE_S

ROWS, BATCH, POISON = 240, 4, 77


def write_tables(folder: Path) -> None:
    """Write a table of ids, each with a document of three tokens."""
    folder.mkdir(parents=True)
    for number in range(4):
        ids = list(range(number * ROWS // 4, (number + 1) * ROWS // 4))
        columns = {"id": ids, "tokens": [[3 * at, 3 * at + 1, 3 * at + 2] for at in ids]}
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=16)


def run(folder: Path, *launch: str, ranks: int, status: int = 0, **options: Any) -> str:
    """Run the job in ``folder``, which ends with ``status``; what all processes printed. ``launch`` are options of
    `lakeckpt run`, and ``options`` those of `main`."""
    command = [sys.executable, "-m", "lakeckpt", "run", *launch, f"--nproc-per-node={ranks}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command += [str(folder), json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == status, done.stderr[-6000:]
    return done.stdout + done.stderr


def used(folder: Path) -> dict[int, list[list[int]]]:
    """Step → the keys of each micro-batch of the newest attempt that did it."""
    notes = [json.loads(line) for path in sorted(folder.glob("notes-*")) for line in path.read_text().splitlines()]
    newest = {one["step"]: one["attempt"] for one in sorted(notes, key=lambda one: int(one["attempt"]))}
    found: dict[int, list[list[int]]] = {}
    for one in notes:
        if one["attempt"] == newest[one["step"]]:
            found.setdefault(one["step"], []).append(one["keys"])
    return found


def keys(folder: Path) -> Counter[int]:
    """How often each key counts."""
    return Counter(key for batches in used(folder).values() for batch in batches for key in batch)


def main(
    folder: Path,
    *,
    packed: bool = False,
    workers: int = 0,
    captures: bool = True,
    by: str = "raise",
    times: int = 99,
    steps: int | None = None,
    every: int = 5,
) -> None:
    """The training script. The row ends the first ``times`` starts ``by`` an exception or a signal (of several with
    commas, by each in turn), and the loop ends after so many ``steps`` of an attempt that has left it behind."""
    import torch
    import torch.distributed as dist

    import lakeckpt

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(5)
    model = torch.nn.Linear(1, 8)
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset: Any = lakeckpt.LakeDataset(folder / "table", batch_size=BATCH, shuffle=True, seed=3)
    if packed:
        dataset = lakeckpt.pack(dataset, length=5)
    loader = lakeckpt.LakeLoader(dataset, num_workers=workers)
    state = {"model": model, "optimizer": optimizer, "reader": loader}
    options: dict[str, Any] = {"capture_every": 1} if captures else {}
    with lakeckpt.CheckpointManager(
        folder / "run", state, persist_every=every, on_crash_loop="exclude", **options
    ) as manager:
        begun = manager.restore()
        report = manager.restore_report
        assert report is not None
        with (folder / f"notes-{rank}.jsonl").open("a") as notes:
            for batch in loader if loader.epoch == 0 else ():
                found = [int(one) for one in batch["tokens" if packed else "id"].reshape(-1).tolist()]
                if (3 * POISON if packed else POISON) in found and start < times:
                    if by == "raise":
                        raise ValueError(f"the row {POISON} is bad")
                    signals = by.split(",")
                    os.kill(os.getpid(), signal.Signals[signals[start % len(signals)]])
                optimizer.zero_grad()
                trained(torch.ones(len(found), 1)).mean().backward()
                optimizer.step()
                note = {"attempt": report.attempt, "step": manager.steps_done + 1, "keys": found}
                print(json.dumps(note), file=notes, flush=True)
                manager.step(batch)
                if steps is not None and report.excluded and manager.steps_done == begun + steps:
                    break


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
