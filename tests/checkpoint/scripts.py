"""A training script with its own book: what each optimizer step of each rank consumed, by ids that are table rows.

Ranks are loaders in one process, taken from in lockstep; the manager holds rank 0's. An attempt that ends early has
crashed: what was not committed is forgotten by the next restore, and struck from the book too.
"""

from __future__ import annotations

from collections import Counter as Multiset
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import lakeckpt
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.checkpoint.persist.history import History
from tests.checkpoint.rig import Counter, MemoryStorage
from tests.data.reading import dataset_of

Book = dict[int, list[list[tuple[int, int]]]]
"""optimizer step → per rank → (epoch, id) in the order of reading."""


def write_table(folder: Path, *, files: Sequence[Sequence[int]] = ((30, 30, 40), (25, 0, 1), (74,))) -> Path:
    """Files of row groups of so many rows; column ``id`` is the table row."""
    folder.mkdir(parents=True, exist_ok=True)
    done = 0
    for number, groups in enumerate(files):
        schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
        with pq.ParquetWriter(folder / f"part-{number}.parquet", schema) as writer:
            for rows in groups:
                ids = np.arange(done, done + rows)
                writer.write_table(pa.table({"id": ids, "text": [f"row {i}" for i in ids]}, schema=schema))
                done += rows
    return folder


class Script:
    """A run over ``table``: attempts, one after the other, on a storage of its own."""

    def __init__(self, table: Path, **options: Any) -> None:
        self.storage = MemoryStorage()
        self.table = lakeckpt.open_table(str(table))
        self.options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 11, **options}
        self.book: Book = {}
        self.readers: list[list[lakeckpt.LakeLoader]] = []

    def loaders(self, world_size: int, **options: Any) -> list[lakeckpt.LakeLoader]:
        chosen = {**self.options, **options}
        return [
            lakeckpt.LakeLoader(dataset_of(self.table, columns=["id"], rank=rank, world_size=world_size, **chosen))
            for rank in range(world_size)
        ]

    def attempt(
        self,
        steps: int,
        *,
        world_size: int = 1,
        every: int = 4,
        accumulate: int = 1,
        keep: int = 3,
        save_last: bool = False,
        lose_state: bool = False,
        after_restore: Callable[[list[lakeckpt.LakeLoader]], None] | None = None,
        **options: Any,
    ) -> int:
        """Restore, then make ``steps`` optimizer steps; the number of steps done."""
        ranks = self.loaders(world_size, **options)
        state = {"count": Counter(), "model": torch.nn.Linear(3, 2), "reader": ranks[0]}
        manager = CheckpointManager(self.storage, state, persist_every=every, keep=keep)
        if lose_state:
            ranks[0].load_state_dict = lambda state: None  # type: ignore[method-assign]
        done = manager.restore()
        for other in ranks[1:]:
            other.dataset._progress.deliveries.saved()  # it stands for another process, which has a manager of its own
            other.load_state_dict(ranks[0].state_dict())
        for one in ranks if after_restore else ():
            assert after_restore is not None
            after_restore([one])
        self.book = {step: rows for step, rows in self.book.items() if step <= done}
        goal = done + steps
        source = _lockstep(ranks)
        while done < goal:
            used: list[list[tuple[int, int]]] = [[] for _ in ranks]
            for _ in range(accumulate):
                for rank, rows in enumerate(next(source)):
                    used[rank] += rows
            done += 1
            self.book[done] = used
            manager.step(ranks[0].last_receipt)
        if save_last:
            manager.save()
        manager.close()
        return done

    def truth(self, upto: int) -> Multiset[tuple[int, int]]:
        """How often each (epoch, id) was consumed in steps 1 … ``upto``, by the book."""
        return Multiset(row for step, ranks in self.book.items() if step <= upto for rank in ranks for row in rank)


def _lockstep(ranks: list[lakeckpt.LakeLoader]) -> Any:
    """Per step of the loaders, what each rank got: (epoch, id) of each row; from epoch to epoch, for ever."""
    while True:
        for items in zip(*ranks, strict=True):
            yield [_rows(one, item) for one, item in zip(ranks, items, strict=True)]


def _rows(loader: lakeckpt.LakeLoader, item: Any) -> list[tuple[int, int]]:
    receipt = loader.last_receipt
    assert receipt is not None
    epochs = [span.epoch for span in receipt.spans for _ in range(span.rows)]
    return list(zip(epochs, item["id"].reshape(-1).tolist(), strict=True))


def without(history: History, slot: int) -> History:
    """The history as if the checkpoint in ``slot`` had never been: its child goes on from its parent."""
    lost = next(one for one in history.chain if one.slot == slot)
    chain = [
        replace(one, parent=lost.parent) if one.parent == slot else one for one in history.chain if one.slot != slot
    ]
    return replace(history, chain=tuple(chain))
