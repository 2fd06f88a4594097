"""MosaicML streaming: rows converted to MDS shards, read by StreamingDataset in its StreamingDataLoader.

Set up as its guide has it: the loader's ``batch_size`` is told to the dataset too, the shuffle is its default (py1e),
and rows, which come one by one, become tensors in the collate function. Tabular rows are converted at ~10⁴ a second,
so only a part of that data set is.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch
from benchmarks.readers.rows import Collate


class _Absent(ModuleType):
    """In the place of torchvision: streaming imports it for its image data sets, which nobody uses here, and there is
    no build of it for every build of torch."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


if importlib.util.find_spec("torchvision") is None:
    for _name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        _absent = _Absent(_name)
        _absent.__spec__ = ModuleSpec(_name, None)  # transformers asks for it
        sys.modules.setdefault(_name, _absent)

_TYPES = {"int32": "int32", "int64": "int64", "float": "float32", "double": "float64", "binary": "bytes"}


class Mosaic:
    """MDS, uncompressed."""

    modules = ("streaming", "torch")

    def __init__(self, case: Case) -> None:
        from streaming import StreamingDataLoader, StreamingDataset

        dataset: Any = StreamingDataset(
            local=str(case.converted("mds")),
            batch_size=case.batch_size,
            shuffle=case.shuffle,
            shuffle_seed=case.seed,
        )
        options = {"persistent_workers": True} if case.workers else {}
        self._loader: Any = StreamingDataLoader(
            dataset, batch_size=case.batch_size, num_workers=case.workers, collate_fn=Collate(case), **options
        )

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        import pyarrow.parquet as pq
        import streaming
        from streaming.base.util import clean_stale_shared_memory

        if case.world_size == 1:
            clean_stale_shared_memory()
        folder = case.converted("mds")
        if folder.exists():
            return
        new = folder.with_name(folder.name + ".new")
        shutil.rmtree(new, ignore_errors=True)
        schema = pq.read_schema(case.files[0])
        columns = {
            field.name: _TYPES.get(str(field.type), "ndarray:int32" if "list" in str(field.type) else "")
            for field in schema
        }
        with streaming.MDSWriter(out=str(new), columns=columns, size_limit="64mb") as writer:
            for path in case.files:
                for part in pq.ParquetFile(path).iter_batches(1024):
                    arrays = [_values(part.column(n)) for n in range(part.num_columns)]
                    for row in zip(*arrays, strict=True):
                        writer.write(dict(zip(schema.names, row, strict=True)))
        new.rename(folder)

    def batches(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def load(self, state: Any) -> None:
        self._loader.load_state_dict(state)


def _values(column: Any) -> list[Any]:
    if str(column.type) == "binary":
        found: list[Any] = column.to_pylist()
        return found
    return list(column.to_numpy(zero_copy_only=False))
