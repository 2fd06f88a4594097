"""lakeckpt, as its README has it: defaults, tensors, the ids among the columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch


class Lake:
    """`lakeckpt.LakeLoader` over the folder of Parquet files."""

    modules = ("torch", "lakeckpt.data.loader.loader")

    def __init__(self, case: Case) -> None:
        import lakeckpt

        dataset = lakeckpt.LakeDataset(
            case.folder,
            batch_size=case.batch_size,
            shuffle=case.shuffle,
            seed=case.seed,
            rank=case.rank,
            world_size=case.world_size,
        )
        persistent = bool(case.workers)
        self._loader = lakeckpt.LakeLoader(dataset, num_workers=case.workers, persistent_workers=persistent)

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        pass

    def batches(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def load(self, state: Any) -> None:
        self._loader.load_state_dict(state)
