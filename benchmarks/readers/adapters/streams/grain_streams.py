"""This module measures grain: documents from its ParquetIterDataset, mixed by weights, packed, and batched.

A source is a MapDataset of paths, shuffled and repeated there, interleaved, with a window shuffle of 1,000 documents,
as `benchmarks.readers.adapters.grain_parquet` has it. ``IterDataset.mix`` mixes documents, and then
``ConcatThenSplitIterDataset`` concatenates and cuts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.readers.adapters.grain_parquet import WINDOW
from benchmarks.readers.adapters.grain_parquet import Grain as Rows
from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, NoState, as_ragged
from benchmarks.readers.streams.sources import sources


class Grain:
    """``IterDataset.mix``, ``ConcatThenSplitIterDataset`` and ``batch``."""

    modules = ("grain", "grain.experimental", "pyarrow.parquet", "torch")
    pads = False

    def __init__(self, case: Case) -> None:
        import grain

        self._case = case
        if case.sources > 1:
            mixed = sources(case)
            documents = [_documents(case, [source.file]) for source in mixed]
            found = grain.IterDataset.mix(documents, [source.weight for source in mixed])
        else:
            found = _documents(case, case.files)
        if case.length:
            found = grain.experimental.ConcatThenSplitIterDataset(found, length_struct={"tokens": case.length})
            self._dataset = found.batch(case.batch_size)
        else:
            self._dataset = found.batch(case.batch_size, batch_fn=list)

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    prepare = staticmethod(Rows.prepare)

    @staticmethod
    def mask(batch: Batch) -> torch.Tensor | None:
        found: Any = batch.get("tokens_segment_ids")
        return None if found is None else found > 0

    def batches(self) -> Iterator[Batch]:
        iterator = iter(self._dataset)
        try:
            for batch in iterator:
                if self._case.length:
                    yield {name: torch.from_numpy(column) for name, column in batch.items()}
                else:
                    yield {"tokens": as_ragged([row["tokens"] for row in batch])}
        finally:
            if hasattr(iterator, "close"):
                iterator.close()

    def state(self) -> Any:
        raise NoState("not measured here")

    def load(self, state: Any) -> None:
        raise NoState("not measured here")


def _documents(case: Case, files: Sequence[Path]) -> Any:
    import grain

    paths: Any = grain.MapDataset.source([str(path) for path in files])
    if case.shuffle:
        paths = paths.shuffle(seed=case.seed)
    if case.sources:
        paths = paths.repeat()
    rows: Any = grain.experimental.InterleaveIterDataset(
        paths.map(grain.experimental.ParquetIterDataset), cycle_length=min(4, len(files))
    )
    if case.shuffle:
        rows = grain.experimental.WindowShuffleIterDataset(rows, window_size=WINDOW, seed=case.seed)
    return rows.map(_tokens)


def _tokens(row: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {"tokens": row["tokens"]}
