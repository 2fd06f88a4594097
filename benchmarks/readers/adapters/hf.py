"""Hugging Face datasets: Parquet streamed, in batches of Arrow, or of torch tensors as its tutorials have it.

The documentation recommends streaming for training, ``with_format("torch")`` to get tensors, a DataLoader for workers,
`shuffle` with its default buffer, `split_dataset_by_node` for ranks, and StatefulDataLoader to save a place.
``with_format("arrow")`` is the fastest that it offers; its batches become tensors by `benchmarks.readers.arrow`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from benchmarks.readers.arrow import tensors
from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, as_ragged

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def _of_torch(batch: Any) -> Batch:
    """What ``with_format("torch")`` delivers: tensors, and lists of what differs in length."""
    found: dict[str, Any] = {}
    for name, column in batch.items():
        found[name] = column if not isinstance(column, list) else as_ragged(column)
    return found


class Arrow:
    """``with_format("arrow")``."""

    modules: tuple[str, ...] = ("datasets", "torch.utils.data", "torchdata.stateful_dataloader")
    format = "arrow"

    def __init__(self, case: Case) -> None:
        import datasets
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        files = [str(path) for path in case.files]
        found: Any = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        if case.shuffle:
            found = found.shuffle(seed=case.seed)
        if case.world_size > 1:
            found = split_dataset_by_node(found, rank=case.rank, world_size=case.world_size)
        self._dataset = found.with_format(self.format).batch(case.batch_size)
        options = {"persistent_workers": True} if case.workers else {}
        self._loader: Any = StatefulDataLoader(
            self._dataset, batch_size=None, num_workers=case.workers, collate_fn=self.finish, **options
        )
        self._epoch = 0

    @staticmethod
    def finish(batch: Any) -> Batch:
        """Tensors of one batch; in the worker, if there is one. `batch` makes a row of lists of it."""
        import pyarrow as pa

        columns = [column.combine_chunks().flatten() for column in batch.itercolumns()]
        return tensors(pa.table(columns, names=batch.schema.names))

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        pass

    def batches(self) -> Iterator[Batch]:
        self._dataset.set_epoch(self._epoch)
        yield from self._loader
        self._epoch += 1

    def state(self) -> Any:
        return self._loader.state_dict()

    def load(self, state: Any) -> None:
        self._loader.load_state_dict(state)


class Torch(Arrow):
    """``with_format("torch")``."""

    format = "torch"

    @staticmethod
    def finish(batch: Any) -> Batch:
        return _of_torch(batch)


__all__ = ["Arrow", "Torch"]
