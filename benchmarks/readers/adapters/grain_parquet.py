"""grain: its ParquetIterDataset over the files of this rank, batched; worker processes by ``mp_prefetch``.

As its documentation has it for many files: a MapDataset of paths, shuffled and sharded there, then interleaved, with a
window shuffle of rows (1,000). Rows come one by one; the batch function makes arrays. Its state is of the iterator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch
from benchmarks.readers.rows import Collate

WINDOW = 1000


class Grain:
    """``InterleaveIterDataset`` of Parquet files."""

    modules = ("grain", "grain.experimental", "pyarrow.parquet", "torch")

    def __init__(self, case: Case) -> None:
        import grain

        paths: Any = grain.MapDataset.source([str(path) for path in case.files])
        if case.shuffle:
            paths = paths.shuffle(seed=case.seed)
        paths = paths[case.rank :: case.world_size].map(grain.experimental.ParquetIterDataset)
        rows: Any = grain.experimental.InterleaveIterDataset(paths, cycle_length=4)
        if case.shuffle:
            rows = grain.experimental.WindowShuffleIterDataset(rows, window_size=WINDOW, seed=case.seed)
        collate = Collate(case)
        found = rows.batch(case.batch_size, drop_remainder=False, batch_fn=collate.arrays)
        if case.workers:
            found = found.mp_prefetch(grain.MultiprocessingOptions(num_workers=case.workers))
        self._dataset, self._state, self._iterator, self._finish = found, None, None, collate.finish

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        from absl import flags

        if not flags.FLAGS.is_parsed():  # grain starts its processes by absl's flags
            flags.FLAGS(["bench"])

    def batches(self) -> Iterator[Batch]:
        self._iterator = iter(self._dataset)
        if self._state is not None:
            self._iterator.set_state(self._state)
            self._state = None
        try:
            for batch in self._iterator:
                yield self._finish(batch)
        finally:
            if hasattr(self._iterator, "close"):
                self._iterator.close()

    def state(self) -> Any:
        return self._iterator.get_state()

    def load(self, state: Any) -> None:
        self._state = state
