"""litdata: its StreamingDataset over the plain Parquet files, in its StreamingDataLoader.

The index that it needs is made once, beside the data set. Rows come one by one; the collate function makes tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch
from benchmarks.readers.rows import Collate


class Litdata:
    """Indexed Parquet."""

    modules = ("litdata", "polars", "torch")

    def __init__(self, case: Case) -> None:
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.streaming.item_loader import ParquetLoader

        dataset = StreamingDataset(
            case.folder,
            item_loader=ParquetLoader(),
            shuffle=case.shuffle,
            seed=case.seed,
            drop_last=False,
            index_path=str(case.converted("litdata-index")),
        )
        options: dict[str, Any] = {}
        if case.workers:  # it refuses forked workers with Parquet, for it reads by polars
            options = {"persistent_workers": True, "multiprocessing_context": "spawn"}
        self._loader: Any = StreamingDataLoader(
            dataset, batch_size=case.batch_size, num_workers=case.workers, collate_fn=Collate(case), **options
        )

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        import litdata

        folder = case.converted("litdata-index")
        if not (folder / "index.json").exists():
            folder.mkdir(exist_ok=True)
            litdata.index_parquet_dataset(case.folder, cache_dir=str(folder), num_workers=1)

    def batches(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def load(self, state: Any) -> None:
        self._loader.load_state_dict(state)
