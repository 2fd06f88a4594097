"""What a careful user writes: an IterableDataset over pyarrow, in torch's DataLoader and in torchdata's stateful one.

Row groups are dealt to ranks and workers in turn. Shuffled, they are permuted for each epoch, and rows inside of
windows of four row groups: as far as lakeckpt's default. Each batch is made of tensors, so the DataLoader has none to
make (``batch_size=None``). For StatefulDataLoader the dataset has ``state_dict`` and ``load_state_dict``, as torchdata
recommends: the number of batches that it yielded, by which whole windows are skipped without reading them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.readers.arrow import slices, tensors
from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, NoState

WINDOW = 4


class ArrowRows(IterableDataset[Any]):
    """Batches of the row groups of this rank and worker."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case
        self._groups = [
            (str(path), group, pq.read_metadata(path).row_group(group).num_rows)
            for path in case.files
            for group in range(pq.read_metadata(path).num_row_groups)
        ]
        self._epoch = 0
        self._yielded = 0
        self._skip = 0

    def __iter__(self) -> Iterator[Any]:
        case, worker = self._case, get_worker_info()
        part, parts = case.rank, case.world_size
        if worker is not None:
            part, parts = part * worker.num_workers + worker.id, parts * worker.num_workers
        random = np.random.default_rng((case.seed, self._epoch))
        groups = self._groups
        if case.shuffle:
            groups = [groups[n] for n in random.permutation(len(groups))]
        groups = groups[part::parts]
        skip, self._skip, self._yielded = self._skip, 0, self._skip
        width = WINDOW if case.shuffle else 1
        for at in range(0, len(groups), width):
            window = groups[at : at + width]
            rows = sum(group[2] for group in window)
            batches = -(-rows // case.batch_size)
            order = (
                np.random.default_rng((case.seed, self._epoch, part, at)).permutation(rows) if case.shuffle else None
            )
            if skip >= batches:
                skip -= batches
                continue
            for number, batch in enumerate(self._read(window, rows, order)):
                if number >= skip:
                    self._yielded += 1
                    yield batch
            skip = 0
        self._epoch, self._yielded = self._epoch + 1, 0

    def _read(self, window: list[tuple[str, int, int]], rows: int, order: Any) -> Iterator[Any]:
        tables = [pq.ParquetFile(path).read_row_group(group) for path, group, _ in window]
        size = self._case.batch_size
        if order is None:
            yield from slices(tensors(tables[0]), rows, size)
            return
        table = pa.concat_tables(tables).combine_chunks()
        for begin in range(0, rows, size):
            yield tensors(table.take(pa.array(order[begin : begin + size])))

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "yielded": self._yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._skip = state["epoch"], state["yielded"]


class HandWritten:
    """In torch's DataLoader."""

    modules: tuple[str, ...] = ("torch.utils.data", "pyarrow.parquet")

    def __init__(self, case: Case) -> None:
        options = {"persistent_workers": True} if case.workers else {}
        self._loader: Any = DataLoader(ArrowRows(case), batch_size=None, num_workers=case.workers, **options)

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        pass

    def batches(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        raise NoState("torch's DataLoader has no state")

    def load(self, state: Any) -> None:
        raise NoState("torch's DataLoader has no state")


class Stateful(HandWritten):
    """In torchdata's StatefulDataLoader."""

    modules = (*HandWritten.modules, "torchdata.stateful_dataloader")

    def __init__(self, case: Case) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        options = {"persistent_workers": True} if case.workers else {}
        self._loader = StatefulDataLoader(ArrowRows(case), batch_size=None, num_workers=case.workers, **options)

    def state(self) -> Any:
        return self._loader.state_dict()

    def load(self, state: Any) -> None:
        self._loader.load_state_dict(state)
