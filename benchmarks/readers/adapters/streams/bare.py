"""This module measures bare pyarrow and numpy: the values of row groups, in order, cut into sequences or batches.

A sequence is a view of its row group's values; only the one at a border of row groups is joined. So this is the least
that any reader of the same bytes must do: no shuffle, no positions, no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.readers.arrow import slices, tensors
from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, NoState


class Bare:
    """``ParquetFile.read_row_group`` of the column of tokens."""

    modules = ("pyarrow.parquet", "torch")
    pads = False

    def __init__(self, case: Case) -> None:
        self._case = case

    @staticmethod
    def refuses(case: Case) -> str | None:
        if case.shuffle or case.workers or case.world_size > 1 or case.sources > 1:
            return "a limit: one table, in order, in one process"
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        pass

    @staticmethod
    def mask(batch: Batch) -> torch.Tensor | None:
        found: Any = batch.get("mask")
        return found

    def batches(self) -> Iterator[Batch]:
        return self._packed() if self._case.length else self._rows()

    def _row_groups(self) -> Iterator[Any]:
        import pyarrow.parquet as pq

        for path in self._case.files:
            with pq.ParquetFile(path, memory_map=True) as file:
                for group in range(file.num_row_groups):
                    yield file.read_row_group(group, columns=["tokens"])

    def _rows(self) -> Iterator[Batch]:
        for table in self._row_groups():
            yield from slices(tensors(table), table.num_rows, self._case.batch_size)

    def _packed(self) -> Iterator[Batch]:
        length, size = self._case.length, self._case.length * self._case.batch_size
        rest = np.empty(0, np.int32)
        for table in self._row_groups():
            values = tensors(table)["tokens"].values.numpy()  # type: ignore[union-attr]
            begin = 0
            if len(rest):
                begin = min(size - len(rest), len(values))
                rest = np.concatenate([rest, values[:begin]])
                if len(rest) < size:
                    continue
                yield {"tokens": torch.from_numpy(rest.reshape(-1, length))}
            end = begin + (len(values) - begin) // size * size
            for at in range(begin, end, size):
                yield {"tokens": torch.from_numpy(values[at : at + size].reshape(-1, length))}
            rest = values[end:]
        if len(rest):
            padded = np.zeros(-(-len(rest) // length) * length, np.int32)
            padded[: len(rest)] = rest
            mask = torch.arange(len(padded)) < len(rest)
            yield {"tokens": torch.from_numpy(padded.reshape(-1, length)), "mask": mask.reshape(-1, length)}

    def state(self) -> Any:
        raise NoState("bare pyarrow has no state")

    def load(self, state: Any) -> None:
        raise NoState("bare pyarrow has no state")
