"""This module measures Hugging Face datasets: streamed Parquet, interleaved by probabilities, packed by ``map``.

Two ways to pack are common, both by batches of 1,000 documents, ``map``'s default. `Wrapped` works on Arrow tables and
lays new offsets over the values, as TRL's ``pack_dataset(strategy="wrapped")`` does: nothing is dropped, and each 1,000
documents end in a short sequence. `GroupTexts` works on Python lists and drops that rest, as the ``run_clm`` example of
transformers does. ``interleave_datasets`` mixes documents before they are packed. The five seconds that the library
sleeps at the end of each iterator, until Arrow's threads have ended, are switched off, as they are no part of reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.readers.adapters import hf as rows
from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, NoState, Ragged
from benchmarks.readers.streams.sources import sources


class Wrapped:
    """``with_format("arrow")``, ``map`` with new offsets."""

    modules: tuple[str, ...] = rows.Arrow.modules
    pads = True
    format: str | None = "arrow"

    def __init__(self, case: Case) -> None:
        self._case, self._epoch = case, 0
        found = _documents(case).with_format(self.format)
        if case.length:
            found = found.map(self.pack, batched=True, fn_kwargs={"length": case.length})
        self._dataset = found

    @staticmethod
    def pack(table: Any, length: int) -> Any:
        import pyarrow as pa

        column = table["tokens"].combine_chunks()
        values = column.flatten()
        offsets = np.append(np.arange(0, len(values), length, np.int32), np.int32(len(values)))
        return pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), values)})

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    @staticmethod
    def prepare(case: Case) -> None:
        pass

    @staticmethod
    def mask(batch: Batch) -> torch.Tensor | None:
        found: Any = batch.get("mask")
        return found

    def batches(self) -> Iterator[Batch]:
        self._dataset.set_epoch(self._epoch)
        self._epoch += 1
        for batch in self._dataset.iter(self._case.batch_size):
            yield self.finish(batch)

    def finish(self, batch: Any) -> Batch:
        """Tensors of the rows of an Arrow table."""
        column = batch["tokens"].combine_chunks()
        values, offsets = torch.from_numpy(column.flatten().to_numpy()), column.offsets.to_numpy()
        lengths, length = np.diff(offsets), self._case.length
        if not length:
            return {"tokens": Ragged(values, torch.from_numpy(offsets.astype(np.int64) - offsets[0]))}
        if (lengths == length).all():
            return {"tokens": values.reshape(-1, length)}
        mask = torch.arange(length) < torch.from_numpy(lengths)[:, None]
        tokens = torch.zeros(mask.shape, dtype=values.dtype)
        tokens[mask] = values
        return {"tokens": tokens, "mask": mask}

    def state(self) -> Any:
        raise NoState("not measured here")

    def load(self, state: Any) -> None:
        raise NoState("not measured here")


class GroupTexts(Wrapped):
    """``map`` over lists; what does not fill a sequence is dropped."""

    pads = False
    format = None

    @staticmethod
    def pack(table: Any, length: int) -> Any:
        from itertools import chain

        tokens = list(chain(*table["tokens"]))
        return {"tokens": [tokens[at : at + length] for at in range(0, len(tokens) // length * length, length)]}

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None if case.length else "the same as with the Arrow format"

    def finish(self, batch: Any) -> Batch:
        return {"tokens": torch.tensor(batch["tokens"], dtype=torch.int32)}


def _documents(case: Case) -> Any:
    import datasets

    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0

    def stream(files: list[str]) -> Any:
        found: Any = datasets.load_dataset(
            "parquet", data_files=files, split="train", streaming=True, columns=["tokens"]
        )
        return found.shuffle(seed=case.seed) if case.shuffle else found

    if case.sources < 2:
        return stream([str(path) for path in case.files])
    mixed = sources(case)
    return datasets.interleave_datasets(
        [stream([str(source.file)]) for source in mixed],
        probabilities=[source.weight for source in mixed],
        seed=case.seed,
        stopping_strategy="all_exhausted",
    )
