"""SPDL: a pipeline of threads, as its guide has it: a light source, an operation that works without the GIL, a sink.

SPDL reads no Parquet itself; the operation is ``read_row_group`` and the cutting into batches. Shuffled: row groups in
random order, and rows inside of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.readers.arrow import slices, tensors
from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, NoState


class Spdl:
    """``workers`` threads decode row groups."""

    modules = ("spdl.pipeline", "pyarrow.parquet", "torch")

    def __init__(self, case: Case) -> None:
        import pyarrow.parquet as pq

        self._case = case
        groups = [(str(path), n) for path in case.files for n in range(pq.read_metadata(path).num_row_groups)]
        self._groups = groups[case.rank :: case.world_size]
        self._epoch = 0

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        pass

    def _read(self, place: tuple[str, int]) -> list[Batch]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pq.ParquetFile(place[0]).read_row_group(place[1], use_threads=False)
        size = self._case.batch_size
        if not self._case.shuffle:
            return list(slices(tensors(table), table.num_rows, size))
        order = np.random.default_rng((self._case.seed, self._epoch, place[1])).permutation(table.num_rows)
        return [tensors(table.take(pa.array(order[at : at + size]))) for at in range(0, table.num_rows, size)]

    def batches(self) -> Iterator[Batch]:
        from spdl.pipeline import PipelineBuilder

        groups = list(self._groups)
        if self._case.shuffle:
            np.random.default_rng((self._case.seed, self._epoch)).shuffle(groups)
        threads = max(1, self._case.workers)
        builder: Any = PipelineBuilder().add_source(groups).pipe(self._read, concurrency=threads, output_order="input")
        pipeline = builder.disaggregate().add_sink(3).build(num_threads=threads)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)
        self._epoch += 1

    def state(self) -> Any:
        raise NoState("an SPDL pipeline has no state")

    def load(self, state: Any) -> None:
        raise NoState("an SPDL pipeline has no state")
