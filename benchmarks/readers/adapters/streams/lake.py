"""This module measures lakeckpt: `lakeckpt.pack` and `lakeckpt.mix` over Parquet files, by their defaults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch
from benchmarks.readers.streams.sources import sources


class Lake:
    """A `lakeckpt.LakeLoader` over one dataset, or over a mixture; all sources are packed, or none."""

    modules = ("torch", "lakeckpt.data.loader.loader")
    pads = False

    def __init__(self, case: Case) -> None:
        import lakeckpt

        dataset: Any = _dataset(case, Path(case.folder))
        if case.sources > 1:
            mixed = {source.name: (_dataset(case, source.folder), source.weight) for source in sources(case)}
            dataset = lakeckpt.mix(mixed, seed=case.seed)
        self._loader = lakeckpt.LakeLoader(dataset, num_workers=case.workers)

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        pass

    @staticmethod
    def mask(batch: Batch) -> torch.Tensor | None:
        found: Any = batch.get("loss_mask")
        return found if isinstance(found, torch.Tensor) else None

    def batches(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def load(self, state: Any) -> None:
        self._loader.load_state_dict(state)


def _dataset(case: Case, folder: Path) -> Any:
    import lakeckpt

    dataset = lakeckpt.LakeDataset(
        folder,
        batch_size=case.batch_size,
        columns=["tokens"],
        shuffle=case.shuffle,
        seed=case.seed,
        endless=case.sources > 0,
        rank=case.rank,
        world_size=case.world_size,
    )
    return lakeckpt.pack(dataset, length=case.length) if case.length else dataset
