"""What does a long history cost?  ``python -m benchmarks.long_log [--commits 2000] [--ranks 1000] [--json FILE]``

A job of one rank reads a table in order and saves after every step. Then the log is that of a job of ``--ranks`` ranks:
the manifests say so, and the newest register has as many digests. Beside one another, in one process: ``latest()``, the
steps that a roll-back can choose from, the first commit's register of the next attempt, and the audit of the whole
history, with the memory that it takes. All figures are seconds by the clock and MiB.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import lakeckpt
from benchmarks.measure import show
from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, short_digest
from lakeckpt.checkpoint.format.manifest import Manifest, entry_to_bytes
from lakeckpt.checkpoint.format.verified_reads import fetch_register
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.persist.log import read_log, slot_path
from lakeckpt.checkpoint.restore.run_log import RunLog, newest_checkpoint
from lakeckpt.lake.storage.local import LocalStorage


def made(folder: Path, commits: int, keep: lakeckpt.Keep) -> LocalStorage:
    """Train, and save ``commits`` times."""
    pq.write_table(pa.table({"id": range(4 * commits)}), folder / "rows.parquet")
    loader = lakeckpt.LakeLoader(lakeckpt.LakeDataset(str(folder / "rows.parquet"), batch_size=4))
    state = {"model": torch.nn.Linear(1, 1), "reader": loader}
    with lakeckpt.CheckpointManager(folder / "run", state, persist_every=1, keep=keep) as manager:
        manager.restore()
        for batch in loader:
            manager.step(batch)
    return LocalStorage(folder / "run")


def of_many(storage: LocalStorage, ranks: int) -> None:
    """Let the log be that of a job of so many ranks."""
    manifests = read_log(storage).manifests
    register = fetch_register(storage, manifests[0])
    data = replace(register, digests=bytes(DIGEST_BYTES * ranks)).to_bytes()
    storage.put(manifests[0].save.register_path, [data])
    for one in manifests:
        digest = short_digest(data) if one is manifests[0] else one.register
        changed: Manifest = replace(one, world_size=ranks, register=digest)
        storage.put(slot_path(one.slot), [entry_to_bytes(changed)])


def timed(work: Callable[[], Any]) -> float:
    """Return the least time of three calls."""
    times = []
    for _ in range(3):
        before = time.perf_counter()
        work()
        times.append(time.perf_counter() - before)
    return min(times)


def steps_kept(storage: LocalStorage) -> list[int]:
    """Return the steps that a roll-back can choose from."""
    log = RunLog(storage)
    log.look()
    return [one.step for one in log.kept()]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commits", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--keep-all", action="store_true", help="keep the data of every checkpoint")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    keep = lakeckpt.Keep(every=1) if options.keep_all else lakeckpt.Keep(last=3)
    with tempfile.TemporaryDirectory() as folder:
        storage = made(Path(folder), options.commits, keep)
        of_many(storage, options.ranks)
        found = {
            "latest_s": timed(lambda: newest_checkpoint(storage)),
            "rollback_choices_s": timed(lambda: steps_kept(storage)),
        }
        before = time.perf_counter()
        report = audit(storage)
        found["audit_s"] = time.perf_counter() - before
        tracemalloc.start()
        audit(storage)
        found["audit_MiB"] = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
    rows = [(name, f"{value:.3f}") for name, value in found.items()]
    show(f"{options.commits} commits of {options.ranks} ranks ({report.verdict})", ("what", "figure"), rows)
    if options.json is not None:
        options.json.write_text(json.dumps({"commits": options.commits, "ranks": options.ranks, **found}, indent=1))


if __name__ == "__main__":
    main()
