"""Ray Data: ``read_parquet(…).iter_torch_batches(…)`` in a cluster of this machine's cores.

The cluster is started before the clock. Shuffled as its guide recommends for training: files in random order, and a
local buffer of some batches. Lists and bytes come by an `ArrowBatchCollateFn`, the fast way that it offers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from benchmarks.readers.arrow import tensors
from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, NoState

BUFFER_BATCHES = 16


class Ray:
    """Tasks in worker processes of the cluster, as many as there are cores."""

    modules = ("ray.data", "torch")

    def __init__(self, case: Case) -> None:
        import ray.data

        self._case = case
        files = [str(path) for path in case.files]
        self._dataset = ray.data.read_parquet(files, shuffle="files" if case.shuffle else None)

    @staticmethod
    def refuses(case: Case) -> str | None:
        if case.world_size > 1:
            return "ranks are actors of one Ray job (streaming_split), not processes of torchrun"
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        import ray
        import ray.data

        os.environ.setdefault("RAY_DEDUP_LOGS", "1")
        ray.init(
            num_cpus=max(1, case.workers), include_dashboard=False, log_to_driver=False, logging_level="error",
            object_store_memory=2 << 30,
        )  # fmt: skip
        ray.data.DataContext.get_current().enable_progress_bars = False

    def batches(self) -> Iterator[Batch]:
        from ray.data.collate_fn import ArrowBatchCollateFn

        class Tensors(ArrowBatchCollateFn):
            def __call__(self, batch: Any) -> Any:
                return tensors(batch)

        size = self._case.batch_size
        yield from self._dataset.iter_torch_batches(
            batch_size=size,
            prefetch_batches=4,
            collate_fn=Tensors(),
            local_shuffle_buffer_size=BUFFER_BATCHES * size if self._case.shuffle else None,
            local_shuffle_seed=self._case.seed if self._case.shuffle else None,
        )

    def state(self) -> Any:
        raise NoState("ray.data has no state inside of an epoch")

    def load(self, state: Any) -> None:
        raise NoState("ray.data has no state inside of an epoch")
