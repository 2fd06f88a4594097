"""Bare pyarrow: the fastest that we know to get the same tensors, with no shuffling, no ranks and no state.

Row groups are read as they come and cut into views, which is less than any loader must do: row groups of the data sets
are multiples of the batches, so nothing has to be joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.readers.arrow import slices, tensors
from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, NoState


class RowGroups:
    """``ParquetFile.read_row_group`` with one thread."""

    modules: tuple[str, ...] = ("pyarrow.parquet", "torch")
    threads = False

    def __init__(self, case: Case) -> None:
        self._case = case

    @staticmethod
    def refuses(case: Case) -> str | None:
        if case.shuffle or case.workers or case.world_size > 1:
            return "a limit: in order, in one process"
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        pass

    def batches(self) -> Iterator[Batch]:
        import pyarrow.parquet as pq

        for path in self._case.files:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, use_threads=self.threads)
                    yield from slices(tensors(table), table.num_rows, self._case.batch_size)

    def state(self) -> Any:
        raise NoState("bare pyarrow has no state")

    def load(self, state: Any) -> None:
        raise NoState("bare pyarrow has no state")


class RowGroupsThreads(RowGroups):
    """The same, columns in threads."""

    threads = True


class IterBatches(RowGroups):
    """``ParquetFile.iter_batches``, in threads, with ``pre_buffer``."""

    def batches(self) -> Iterator[Batch]:
        import pyarrow.parquet as pq

        for path in self._case.files:
            with pq.ParquetFile(path, pre_buffer=True) as file:
                for found in file.iter_batches(self._case.batch_size, use_threads=True):
                    yield tensors(found)


class Scanner(RowGroups):
    """``dataset.scanner(batch_size=…).to_batches()``, with its own read-ahead."""

    modules = (*RowGroups.modules, "pyarrow.dataset")

    def batches(self) -> Iterator[Batch]:
        import pyarrow.dataset as ds

        table = ds.dataset([str(path) for path in self._case.files], format="parquet")
        for found in table.scanner(batch_size=self._case.batch_size).to_batches():
            if found.num_rows:
                yield tensors(found)
