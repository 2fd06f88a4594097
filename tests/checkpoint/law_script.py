"""This script trains over a table, is killed, goes on, and audits its run. It checks without a single assert.

`python -O` drops asserts, so a check that has to hold there raises `SystemExit` instead. The script keeps a book of its
own: one line for each optimizer step, written before the step is taken.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.testing import assert_exactly_once

BATCH_SIZE = 5


def make_loader(table: str, rank: int = 0, world_size: int = 1, num_workers: int = 0) -> lakeckpt.LakeLoader:
    dataset = lakeckpt.LakeDataset(
        table, columns=["id"], batch_size=BATCH_SIZE, shuffle=True, rank=rank, world_size=world_size
    )
    return lakeckpt.LakeLoader(dataset, num_workers=num_workers)


def train(table: str, run: str, book: Path, *, steps: int, ending: str) -> None:
    """Take ``steps`` optimizer steps, then ``ending``: "killed" at once, or "again" from the first row."""
    loader = make_loader(table)
    with lakeckpt.CheckpointManager(run, {"reader": loader}, persist_every=3) as manager:
        done = manager.restore()
        beginning, batches = loader.state_dict(), iter(loader)
        for _ in range(steps):
            done += 1
            take(manager, batches, book, done)
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        loader.load_state_dict(beginning)
        batches = iter(loader)
        for _ in range(steps):
            done += 1
            take(manager, batches, book, done)


def take(manager: lakeckpt.CheckpointManager, batches: Iterator[Any], book: Path, step: int) -> None:
    batch = next(batches)
    note(book, step, batch["id"].tolist())
    manager.step(batch.receipt)


def note(book: Path, step: int, ids: list[int]) -> None:
    with book.open("a") as lines:
        lines.write(json.dumps([step, ids]) + "\n")


def check(run: str, book: Path) -> None:
    """Compare the ledger's counts with the book's: a step that was taken again counts as it was taken last."""
    report = audit(open_storage(run))
    last = dict(json.loads(line) for line in book.read_text().splitlines())
    times = Counter(row for step, ids in last.items() if step <= report.step for row in ids)
    surplus = sum(times.values()) - len(times)
    (epoch,) = report.readers[0].epochs
    if (epoch.once + epoch.repeated + epoch.again, report.surplus, report.lost) != (len(times), surplus, 0):
        fail(f"{len(times)} rows were consumed, {surplus} too many; the audit says {report.to_plain()}")
    if bool(report.findings) != bool(surplus):
        fail(f"{surplus} rows too many, but the findings are {report.findings}")


def fail(words: str) -> NoReturn:
    raise SystemExit(words)


def main(action: str, table: str, run: str, book: Path) -> None:
    if __debug__:
        fail("run this with python -O")
    if action == "law":
        assert_exactly_once(
            lambda rank, world_size, num_workers: make_loader(table, rank, world_size, num_workers),
            topologies=[(1, 0), (2, 0)],
            offsets=3,
            chains=1,
        )
    else:
        train(table, run, book, steps=4, ending=action)
        check(run, book)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
