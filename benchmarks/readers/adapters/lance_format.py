"""Lance: rows converted to its own format, read by its torch dataset in process, or by its safe loader in workers.

`lance.torch.data.LanceDataset` with read-ahead, a sampler for the order (shuffled: batches in random order, rows inside
of them as they lie), and `tensors` in place of its own conversion, which takes no lists and no bytes. For worker
processes its documentation has `get_safe_loader`: spawned workers over a map of rows, which come as Python objects.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.readers.arrow import tensors
from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, NoState, as_ragged


def _tensors(batch: Any, **_: Any) -> Batch:
    return tensors(batch)


def _collate(types: dict[str, str], rows: list[dict[str, Any]]) -> Batch:
    import numpy as np
    import torch

    found: dict[str, Any] = {}
    for name, dtype in types.items():
        column = [row[name] for row in rows]
        if isinstance(column[0], (list, bytes)):
            found[name] = as_ragged([one if isinstance(one, bytes) else np.array(one, dtype) for one in column])
        else:
            found[name] = torch.from_numpy(np.array(column, dtype))
    return found


class Lance:
    """In process."""

    modules: tuple[str, ...] = ("lance.torch.data",)

    def __init__(self, case: Case) -> None:
        import lance.torch.data
        from lance.sampler import FullScanSampler, ShardedBatchSampler

        uri = str(case.converted("lance"))
        self._sampler: Any = None
        self._epoch = 0
        if case.workers:
            from torch.utils.data import RandomSampler

            rows = lance.torch.data.SafeLanceDataset(uri)
            schema = lance.dataset(uri).schema
            types = {field.name: _dtype(field.type) for field in schema}
            self._loader: Any = lance.torch.data.get_safe_loader(
                rows,
                batch_size=case.batch_size,
                num_workers=case.workers,
                collate_fn=partial(_collate, types),
                sampler=RandomSampler(rows) if case.shuffle else None,
            )
            return
        if case.shuffle:
            self._sampler = ShardedBatchSampler(case.rank, case.world_size, randomize=True, seed=case.seed)
        self._loader = lance.torch.data.LanceDataset(
            uri,
            batch_size=case.batch_size,
            batch_readahead=16,
            to_tensor_fn=_tensors,
            sampler=FullScanSampler() if self._sampler is None else self._sampler,
        )

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        import lance
        import pyarrow.dataset as ds

        folder = case.converted("lance")
        if not folder.exists():
            new = folder.with_name(folder.name + ".new")
            shutil.rmtree(new, ignore_errors=True)
            rows = ds.dataset([str(path) for path in case.files], format="parquet")
            lance.write_dataset(rows.to_batches(), str(new), schema=rows.schema)
            new.rename(folder)

    def batches(self) -> Iterator[Batch]:
        if self._sampler is not None:
            self._sampler.set_epoch(self._epoch)
        yield from self._loader
        self._epoch += 1

    def state(self) -> Any:
        raise NoState("lance.torch.data has no state")

    def load(self, state: Any) -> None:
        raise NoState("lance.torch.data has no state")


def _dtype(kind: Any) -> str:
    import pyarrow as pa

    return str((kind.value_type if pa.types.is_list(kind) else kind).to_pandas_dtype().__name__) if not (
        pa.types.is_binary(kind)
    ) else "uint8"  # fmt: skip
