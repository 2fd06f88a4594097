"""Runs of loops that read ahead: killed, resumed, and what the surviving history has used."""

from __future__ import annotations

import threading
import warnings
from collections import Counter as Multiset
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import torch

import lakeckpt
from lakeckpt.checkpoint.ledger.audit import audit
from tests.checkpoint.rig import Counter, HubExchange, MemoryStorage, good, run_ranks
from tests.checkpoint.seams import manager_with
from tests.data.reading import dataset_of
from tests.patience import PATIENCE_S

ROWS = 199
"""Of the table of `FILES`."""

FILES = ((99, 50), (50,))
BATCH = 10

Wrapped = Callable[[lakeckpt.LakeLoader], Iterator[Any]]


def loader_of(table: lakeckpt.Table, **options: Any) -> lakeckpt.LakeLoader:
    column = options.pop("receipt_column", None)
    return lakeckpt.LakeLoader(
        dataset_of(table, batch_size=BATCH, columns=["id"], shuffle=True, seed=5, **options),
        receipt_column=column,
    )


class Filler:
    """A thread that fills a queue, as far as it is allowed to be ahead of what was taken."""

    def __init__(self, loader: lakeckpt.LakeLoader, ahead: Callable[[int], int]) -> None:
        self.source, self.ahead = iter(loader), ahead
        self.queue: Queue[Any] = Queue()
        self.changed = threading.Condition()
        self.taken = self.filled = 0
        self.stopped = False
        self.thread = threading.Thread(target=self.fill, daemon=True)
        self.thread.start()

    def fill(self) -> None:
        while True:
            with self.changed:
                allowed = self.changed.wait_for(
                    lambda: self.stopped or self.filled < self.taken + self.ahead(self.taken), PATIENCE_S
                )
                if self.stopped or not allowed:
                    return
            batch = next(self.source, None)
            with self.changed:
                self.filled += 1
                self.changed.notify_all()
            self.queue.put(batch)
            if batch is None:
                return

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self.changed:
                self.taken += 1
                self.changed.notify_all()
            batch = self.queue.get(timeout=PATIENCE_S)
            if batch is None:
                return
            with self.changed:  # what may be ahead now is there, so that each run of a test sees the same
                is_filled = self.changed.wait_for(
                    lambda: not self.thread.is_alive() or self.filled >= self.taken + self.ahead(self.taken) - 1,
                    PATIENCE_S,
                )
                assert is_filled
            yield batch

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        self.thread.join(PATIENCE_S)


class Run:
    """Attempts at one run: an epoch, a checkpoint at every step."""

    def __init__(self, table: lakeckpt.Table, *, world_size: int = 1) -> None:
        self.table, self.world_size = table, world_size
        self.storage = MemoryStorage()
        self.warned: list[str] = []

    def attempt(self, wrap: Wrapped, *, says: bool, steps: int = 10**9, column: str | None = None) -> None:
        """Train, and be killed after ``steps`` steps. ``says``: whether the loop says what a step used."""

        def body(rank: int, exchange: HubExchange) -> None:
            loader = loader_of(self.table, rank=rank, world_size=self.world_size, receipt_column=column)
            book = Counter([])
            state = {"reader": loader, f"book{rank}": book, "model": torch.nn.Linear(1, 1)}
            manager = manager_with(self.storage, state, persist_every=1, exchange=exchange, timeout_s=PATIENCE_S)
            manager.restore()
            batches = wrap(loader)
            for _, batch in zip(range(steps), batches, strict=False):
                book.value = [*book.value, *batch["id"].tolist()]
                manager.step(batch if says else None)
            if isinstance(batches, Filler):
                batches.stop()
            self.books[rank] = book.value

        self.books: dict[int, list[int]] = {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            good(run_ranks(self.world_size, body))
        self.warned += [str(one.message) for one in caught if issubclass(one.category, lakeckpt.ReadAheadWarning)]

    @property
    def lost(self) -> int:
        """How many rows no step of the surviving history has used."""
        used = Multiset(row for rows in self.books.values() for row in rows)
        return sum((Multiset(range(ROWS)) - used).values())

    @property
    def used_once(self) -> bool:
        return sorted(row for rows in self.books.values() for row in rows) == list(range(ROWS))

    @property
    def verdict(self) -> str:
        return audit(self.storage).verdict
