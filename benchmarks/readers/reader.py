"""What must a reader do to be measured?  Deliver batches of tensors, and say and take back its state: `Reader`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from benchmarks.readers.case import Case

__all__ = ["Batch", "NoState", "Ragged", "Reader", "as_ragged"]


class Ragged(NamedTuple):
    """A column whose rows differ in length: row i is ``values[offsets[i]:offsets[i + 1]]``; offsets are int64."""

    values: torch.Tensor
    offsets: torch.Tensor


Batch = Mapping[str, "torch.Tensor | Ragged"]
"""Column name to tensor. Every reader delivers the same: fixed-width columns as one tensor with a row per row of the
batch, lists and bytes as `Ragged`, and the column ``row`` (int64), by which rows are counted."""


class NoState(Exception):
    """The reader cannot save or load where it is; the message says why, for the table."""


class Reader(Protocol):
    """One reader at one place of one job, made by ``Reader(case)`` in a process of its own.

    The class is importable without the package that it measures; ``modules`` are imported before any clock is started.
    Batches are the caller's until the next one is asked for. Everything may raise what the measured package raises:
    it is shown in the table in full.
    """

    modules: ClassVar[tuple[str, ...]]
    """What to import before the clock starts."""

    def __init__(self, case: Case) -> None: ...

    @staticmethod
    def refuses(case: Case) -> str | None:
        """Why this reader cannot do ``case`` by its nature; None: it can."""
        ...

    @staticmethod
    def prepare(case: Case) -> None:
        """Do once, before any clock, what a user does once: convert the data set, start a cluster."""
        ...

    def batches(self) -> Iterator[Batch]:
        """One epoch; from the place that was loaded, if one was. Asked again: the next epoch."""
        ...

    def state(self) -> Any:
        """What a job would save after the batch that was delivered last; raises `NoState`."""
        ...

    def load(self, state: Any) -> None:
        """Go on from ``state`` at the next `batches`; raises `NoState`."""
        ...


def as_ragged(rows: list[Any]) -> Ragged:
    """Lay rows of numbers (tensors or arrays) or bytes after one another: what a collate function must do with them."""
    import numpy as np

    arrays = [np.frombuffer(row, np.uint8) if isinstance(row, bytes) else np.asarray(row) for row in rows]
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    return Ragged(torch.from_numpy(np.concatenate(arrays)), torch.from_numpy(offsets))
