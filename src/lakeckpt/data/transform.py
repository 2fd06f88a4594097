"""What does a user's transform get besides its batch?  Randomness that a resumed run gives again.

A transform runs where the batch is read (in a loader worker, if there are any). Random numbers drawn from a process's
own streams would depend on the workers and on where a run was resumed; those of a `TransformContext` depend on the seed
and on the rows alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lakeckpt.core.hashing import derive_key, hash64
from lakeckpt.core.receipts import Receipt
from lakeckpt.errors import ConfigError

__all__ = ["Transform", "TransformContext", "bind_transform"]

Transform = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformContext:
    """Reproducible randomness for one micro-batch, or (row-wise use) for one row of it."""

    seed: int
    """The dataset's seed."""
    receipt: Receipt
    """Of the micro-batch."""
    row: int | None = None
    """In row-wise use: which row of the micro-batch this is."""

    def generator(self) -> torch.Generator:
        """Return a new torch generator (CPU), seeded by (seed, epoch, micro-batch[, row])."""
        generator = torch.Generator()
        generator.manual_seed(self._word() >> 1)
        return generator

    def numpy_generator(self) -> np.random.Generator:
        """Return a new numpy generator, seeded by (seed, epoch, micro-batch[, row])."""
        return np.random.default_rng(self._word())

    @property
    def row_seeds(self) -> npt.NDArray[np.uint64]:
        """A seed for each row, from (seed, epoch, position) alone: the same after any re-cut. uint64, shape (rows,)."""
        seeds = [
            hash64(derive_key("row seeds", self.seed, span.epoch), np.arange(span.start, span.stop, dtype=np.uint64))
            for span in self.receipt.spans
        ]
        every = np.concatenate(seeds) if seeds else np.zeros(0, np.uint64)
        return every if self.row is None else every[self.row : self.row + 1]

    def _word(self) -> int:
        row = -1 if self.row is None else self.row
        return derive_key("micro-batch", self.seed, self.receipt.epoch, self.receipt.micro_batch, row)[0]


def bind_transform(transform: Transform | None) -> Callable[[Any, TransformContext], Any] | None:
    """Return ``transform`` as a function of (batch, context), whether or not it asks for the context.

    It gets the context if it takes a second argument named ``context``, or needs two positional ones.
    """
    if transform is None:
        return None
    if not callable(transform):
        raise ConfigError(f"transform must be callable, got {type(transform).__name__}")
    try:
        parameters = list(inspect.signature(transform).parameters.values())
    except (TypeError, ValueError):  # a builtin that does not say: called with the batch alone
        return _WithoutContext(transform)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(p.name == "context" and p.kind in named for p in parameters[1:]):
        return _WithNamedContext(transform)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    return _WithContext(transform) if len(required) >= 2 else _WithoutContext(transform)


@dataclass(frozen=True, slots=True)
class _WithContext:
    transform: Transform

    def __call__(self, batch: Any, context: TransformContext) -> Any:
        return self.transform(batch, context)


@dataclass(frozen=True, slots=True)
class _WithNamedContext:
    transform: Transform

    def __call__(self, batch: Any, context: TransformContext) -> Any:
        return self.transform(batch, context=context)


@dataclass(frozen=True, slots=True)
class _WithoutContext:
    transform: Transform

    def __call__(self, batch: Any, context: TransformContext) -> Any:
        return self.transform(batch)
