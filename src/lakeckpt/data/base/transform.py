"""This module calls a user's transform with reproducible randomness, and warns if it seems to keep rows back.

A transform runs where the batch is read (in a loader worker, if there are any). Random numbers drawn from a process's
own streams would depend on the workers and on where a run was resumed; those of a `TransformContext` depend on the seed
and on the rows alone.

A packer that holds back the rows that do not fill a sequence yet loses them at a restart: the receipt of their
micro-batch says that they were delivered. `CarriedRows` compares the number of rows that a transform got with the
number that it returned. It cannot tell a transform that keeps rows from one that drops or multiplies them within its
call, and it does not see one that happens to return as many rows as it got. The module starts no threads.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from lakeckpt.core.hashing import derive_key, hash64
from lakeckpt.core.receipts import Receipt
from lakeckpt.errors import ConfigError
from lakeckpt.reading.columns.ragged import Ragged

__all__ = ["CarriedRows", "Transform", "TransformContext", "bind_transform", "leading_sizes", "maker_of"]

Transform = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformContext:
    """Reproducible randomness for one micro-batch; if rows are read one by one, for one row."""

    seed: int
    """The dataset's seed."""
    receipt: Receipt
    """The receipt of the micro-batch."""

    def generator(self) -> torch.Generator:
        """Return a new torch generator (CPU), seeded by (seed, epoch, micro-batch)."""
        generator = torch.Generator()
        generator.manual_seed(self._word() >> 1)
        return generator

    def numpy_generator(self) -> np.random.Generator:
        """Return a new numpy generator, seeded by (seed, epoch, micro-batch)."""
        return np.random.default_rng(self._word())

    @property
    def row_seeds(self) -> npt.NDArray[np.uint64]:
        """A seed for each row, from (seed, epoch, position) alone: the same after any re-cut. uint64, shape (rows,)."""
        seeds = [
            hash64(derive_key("row seeds", self.seed, span.epoch), np.arange(span.start, span.stop, dtype=np.uint64))
            for span in self.receipt.spans
        ]
        return np.concatenate(seeds) if seeds else np.zeros(0, np.uint64)

    def _word(self) -> int:
        return derive_key("micro-batch", self.seed, self.receipt.epoch, self.receipt.micro_batch)[0]


def bind_transform(transform: Transform | None) -> Callable[[Any, TransformContext], Any] | None:
    """Return ``transform`` as a function of (batch, context), also if it takes no context.

    It gets the context if it takes a second argument named ``context``, or needs two positional ones.
    """
    if transform is None:
        return None
    if not callable(transform):
        raise ConfigError(f"transform must be callable, got {type(transform).__name__}")
    return _Bound(transform, _way_of(transform))


def _way_of(transform: Transform) -> str:
    """Return how the transform takes the context: "named", "second", or "" if it does not."""
    try:
        parameters = list(inspect.signature(transform).parameters.values())
    except (TypeError, ValueError):  # a builtin that does not say: called with the batch alone
        return ""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(p.name == "context" and p.kind in named for p in parameters[1:]):
        return "named"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return "second" if len([p for p in positional if p.default is p.empty]) >= 2 else ""


def maker_of(transform: Callable[..., Any]) -> str:
    """Return the name of a transform, which is a part of every state: module (if it has one) and qualified name.

    >>> maker_of(functools.partial(leading_sizes, {}))
    'lakeckpt.data.base.transform.leading_sizes'
    """
    while isinstance(transform, functools.partial | _Bound):
        transform = transform.func if isinstance(transform, functools.partial) else transform.transform
    named = transform if hasattr(transform, "__qualname__") else type(transform)
    return ".".join(part for part in (named.__module__, named.__qualname__) if part)


@dataclass(frozen=True, slots=True)
class _Bound:
    """A function of (batch, context), picklable if ``transform`` is."""

    transform: Transform
    way: str

    def __call__(self, batch: Any, context: TransformContext) -> Any:
        if self.way == "named":
            return self.transform(batch, context=context)
        return self.transform(batch, context) if self.way else self.transform(batch)


class CarriedRows:
    """Looks at what the transform of one dataset returned, until it has warned. ``looks``: whether there is anything to
    look at, which is a transform of micro-batches."""

    def __init__(self, *, looks: bool) -> None:
        self._looks = looks

    def check(self, found: Any, receipt: Receipt) -> None:
        """Warn if ``found``, which the transform made of the rows of ``receipt``, has another number of rows."""
        if not self._looks:
            return
        rows = receipt.rows
        sizes = leading_sizes(found)
        if not sizes or rows in sizes:
            return
        self._looks = False
        shown = ", ".join(map(str, sorted(sizes)[:3]))
        warnings.warn(
            f"the transform= of a LakeDataset got {rows} rows and returned {shown} (epoch {receipt.epoch}, step "
            f"{receipt.step} of rank {receipt.rank}). A transform must keep nothing between calls: rows that it holds "
            "back for a later call count as consumed, no checkpoint has them, and a restored run never sees them. "
            "Pack within one call. If the transform keeps nothing (it drops rows or cuts them up within one call), "
            "ignore this; filters= is the exact way to drop rows. This warning comes once.",
            UserWarning,
            stacklevel=4,
        )


def leading_sizes(found: Any) -> set[int]:
    """Return the numbers of rows that ``found`` may have: the sizes of the first dimensions of its columns.

    Columns are the values of a mapping and the elements of a tuple. A list is rows, or columns if its elements are
    tensors or arrays: both are returned. For other objects the set is empty.
    """
    if isinstance(found, Mapping | tuple):
        columns = found.values() if isinstance(found, Mapping) else found
        return set().union(*(_size(one) for one in columns))
    if isinstance(found, list):
        return _size(found).union(*(_size(one) for one in found if isinstance(one, torch.Tensor | np.ndarray)))
    return _size(found)


def _size(column: Any) -> set[int]:
    if isinstance(column, torch.Tensor):
        return {column.size(0)} if column.dim() else set()
    if isinstance(column, np.ndarray):
        return {column.shape[0]} if column.ndim else set()
    if isinstance(column, pa.Table | pa.RecordBatch):
        return {column.num_rows}
    if isinstance(column, Mapping | tuple):
        return leading_sizes(column)
    return {len(column)} if isinstance(column, list | Ragged) else set()
