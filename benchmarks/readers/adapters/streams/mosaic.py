"""This module measures MosaicML streaming over MDS shards, in one of which lie the rows of one Parquet file.

`Sequences` is its usual way: the documents are concatenated and cut when they are converted (``ConcatTokensDataset`` of
LLM Foundry), so that reading is reading rows; the rest of each table is dropped. `Documents` does what the others do:
documents are converted, and a generator over StreamingDataset concatenates and cuts what it delivers. A mixture is a
list of ``Stream(proportion=…)``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.readers.adapters import mosaic  # it stands in for torchvision, before streaming is imported
from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, NoState, as_ragged
from benchmarks.readers.streams.sources import sources


class Documents:
    """Documents in MDS; sequences are cut as they are read."""

    modules = mosaic.Mosaic.modules
    pads = False

    def __init__(self, case: Case) -> None:
        from streaming import Stream, StreamingDataset

        folder = self.folder(case)
        if case.sources > 1:
            streams = [Stream(local=str(folder / s.file.stem), proportion=s.weight) for s in sources(case)]
        else:
            streams = [Stream(local=str(folder / path.stem)) for path in case.files]
        self._case = case
        self._dataset: Any = StreamingDataset(
            streams=streams, batch_size=case.batch_size, shuffle=case.shuffle, shuffle_seed=case.seed
        )

    @staticmethod
    def folder(case: Case) -> Path:
        """Where the documents lie in MDS: a folder for each file."""
        return case.converted("documents.mds")

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None

    @classmethod
    def prepare(cls, case: Case) -> None:
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        folder = cls.folder(case)
        if not folder.exists():
            new = folder.with_name(folder.name + ".new")
            shutil.rmtree(new, ignore_errors=True)
            for path in case.files:
                _convert(cls.rows(case, path), new / path.stem)
            new.rename(folder)

    @staticmethod
    def rows(case: Case, path: Path) -> Iterator[np.ndarray[Any, Any]]:
        """What is converted of one Parquet file: its documents."""
        import pyarrow.parquet as pq

        for part in pq.ParquetFile(path).iter_batches(1024, columns=["tokens"]):
            yield from part.column(0).to_numpy(zero_copy_only=False)

    @staticmethod
    def mask(batch: Batch) -> torch.Tensor | None:
        found: Any = batch.get("mask")
        return found

    def batches(self) -> Iterator[Batch]:
        rows = (row["tokens"] for row in self._dataset)
        if self._case.length:
            return _packed(rows, self._case.length, self._case.batch_size)
        return ({"tokens": as_ragged(some)} for some in _batched(rows, self._case.batch_size))

    def state(self) -> Any:
        raise NoState("not measured here")

    def load(self, state: Any) -> None:
        raise NoState("not measured here")


class Sequences(Documents):
    """Sequences in MDS."""

    @staticmethod
    def folder(case: Case) -> Path:
        return case.converted(f"sequences-{case.length}.mds")

    @staticmethod
    def refuses(case: Case) -> str | None:
        return None if case.length else "it holds sequences only"

    @staticmethod
    def rows(case: Case, path: Path) -> Iterator[np.ndarray[Any, Any]]:
        rest = np.empty(0, np.int32)
        for part in Documents.rows(case, path):
            rest = np.concatenate([rest, part])
            while len(rest) >= case.length:
                yield rest[: case.length]
                rest = rest[case.length :]

    def batches(self) -> Iterator[Batch]:
        rows = (row["tokens"] for row in self._dataset)
        return ({"tokens": torch.from_numpy(np.stack(some))} for some in _batched(rows, self._case.batch_size))


def _convert(rows: Iterator[np.ndarray[Any, Any]], folder: Path) -> None:
    import streaming

    with streaming.MDSWriter(out=str(folder), columns={"tokens": "ndarray:int32"}, size_limit="64mb") as writer:
        for row in rows:
            writer.write({"tokens": row})


def _batched(rows: Iterator[Any], size: int) -> Iterator[list[Any]]:
    found = []
    for row in rows:
        found.append(row)
        if len(found) == size:
            yield found
            found = []
    if found:
        yield found


def _packed(rows: Iterator[np.ndarray[Any, Any]], length: int, batch_size: int) -> Iterator[Batch]:
    """Concatenate documents until they fill a batch, and cut it; the last batch is padded to whole sequences."""
    size, held, count = length * batch_size, list[np.ndarray[Any, Any]](), 0
    for row in rows:
        held.append(row)
        count += len(row)
        if count >= size:
            whole = np.concatenate(held)
            yield {"tokens": torch.from_numpy(whole[:size].reshape(-1, length))}
            held, count = [whole[size:]], count - size
    if count:
        padded = np.zeros(-(-count // length) * length, np.int32)
        padded[:count] = np.concatenate(held)
        mask = torch.arange(len(padded)) < count
        yield {"tokens": torch.from_numpy(padded.reshape(-1, length)), "mask": mask.reshape(-1, length)}
