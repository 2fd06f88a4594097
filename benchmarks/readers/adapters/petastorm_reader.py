"""petastorm: ``make_batch_reader`` with a pool of threads, in its BatchedDataLoader for torch.

Row groups are shuffled by the reader and rows by the loader's queue (16 batches), as its documentation has it for
Parquet that petastorm did not write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, NoState

QUEUE_BATCHES = 16


class Petastorm:
    """``workers`` threads decode row groups."""

    modules = ("petastorm", "petastorm.pytorch", "torch")

    def __init__(self, case: Case) -> None:
        self._case = case
        self._epoch = 0

    @staticmethod
    def refuses(case: Case) -> str | None:
        if case.table != "tabular":
            return "its BatchedDataLoader makes tensors of fixed-width columns only"
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        pass

    def batches(self) -> Iterator[Batch]:
        from petastorm import make_batch_reader
        from petastorm.pytorch import BatchedDataLoader

        case = self._case
        sharding: dict[str, Any] = (
            {"cur_shard": case.rank, "shard_count": case.world_size} if case.world_size > 1 else {}
        )
        reader = make_batch_reader(
            [f"file://{path}" for path in case.files],
            reader_pool_type="thread",
            workers_count=max(1, case.workers),
            num_epochs=1,
            shuffle_row_groups=case.shuffle,
            seed=case.seed + self._epoch,
            **sharding,
        )
        capacity = QUEUE_BATCHES * case.batch_size if case.shuffle else 0
        with BatchedDataLoader(reader, batch_size=case.batch_size, shuffling_queue_capacity=capacity) as loader:
            yield from loader
        self._epoch += 1

    def state(self) -> Any:
        raise NoState("petastorm has no state")

    def load(self, state: Any) -> None:
        raise NoState("petastorm has no state")
