"""This module does two tasks of a measured process: `flow` reads for some seconds, `tally` counts an epoch's tokens.

Both read packed sequences, or rows of documents, or mixtures of them. `flow` counts tokens by the shapes of the
batches; `tally` counts how often each token value came, beside how often the table has it, so that a lost token and
another that came twice do not cancel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.readers.case import Case
from benchmarks.readers.reader import Batch, Reader

__all__ = ["StreamReader", "flow", "tally", "tokens_of"]

Clock = Callable[[], float]
COLUMN = "tokens"
VALUES = 50_000
"""Tokens of the data set are smaller."""


class StreamReader(Reader, Protocol):
    """A `Reader` whose batches have the column ``tokens``: shape (batch, length); `Ragged` where nothing is packed."""

    pads: ClassVar[bool]
    """Whether there is padding in the midst of an epoch, so that a rate has to be computed by the mask."""

    @staticmethod
    def mask(batch: Batch) -> torch.Tensor | None:
        """Which of ``tokens`` are the table's and no padding, bool, of the same shape; None: all are."""
        ...


def tokens_of(batch: Batch) -> torch.Tensor:
    """Return all tokens of a batch, with padding."""
    column: Any = batch[COLUMN]
    return column.values if hasattr(column, "offsets") else column


def flow(
    make: Callable[[], StreamReader],
    seconds: float,
    *,
    at_least: int = 0,
    clock: Clock = time.perf_counter,
    processor: Clock = time.process_time,
) -> dict[str, Any]:
    """Read for ``seconds`` after the first batch, and until ``at_least`` tokens have come, over the ends of epochs.

    ``tokens_per_s`` is of what came after the first batch, by the time that it took, ``tokens_per_processor_s`` by the
    processor time of all threads, which depends less on what else the machine does. ``peak_bytes`` is the peak resident
    memory, ``start_bytes`` what was resident before the reader was made.
    """
    start_bytes = _memory("VmRSS")
    begin = clock()
    reader, tokens, first_tokens, first, now, used = make(), 0, 0, 0.0, 0.0, 0.0
    while not first or now - first < seconds or tokens < at_least:
        before = tokens
        for batch in reader.batches():
            now = clock()
            mask = reader.mask(batch) if reader.pads else None
            tokens += tokens_of(batch).numel() if mask is None else int(mask.sum())
            if not first:
                first, first_tokens, used = now, tokens, processor()
            elif now - first >= seconds and tokens >= at_least:
                break
        if tokens == before:
            raise ValueError("an epoch without a token")
    used = max(processor() - used, 1e-9)
    return {
        "tokens": tokens,
        "first_batch_s": first - begin,
        "seconds": now - first,
        "tokens_per_s": (tokens - first_tokens) / (now - first),
        "tokens_per_processor_s": (tokens - first_tokens) / used,
        "start_bytes": start_bytes,
        "peak_bytes": _memory("VmHWM"),
    }


def tally(make: Callable[[], StreamReader], case: Case) -> dict[str, Any]:
    """Read one epoch, and count the tokens that were ``delivered``, ``lost`` and ``repeated``, by their values."""
    expected, found = _of_table(case), np.zeros(VALUES, np.int64)
    reader = make()
    for batch in reader.batches():
        tokens, mask = tokens_of(batch), reader.mask(batch)
        found += np.bincount((tokens if mask is None else tokens[mask]).numpy().reshape(-1), minlength=VALUES)
    return {
        "delivered": int(found.sum()),
        "lost": int(np.maximum(expected - found, 0).sum()),
        "repeated": int(np.maximum(found - expected, 0).sum()),
    }


def _of_table(case: Case) -> np.ndarray[Any, Any]:
    found = np.zeros(VALUES, np.int64)
    for path in case.files:
        for chunk in pq.read_table(path, columns=[COLUMN])[COLUMN].chunks:
            found += np.bincount(chunk.flatten().to_numpy(), minlength=VALUES)
    return found


def _memory(field: str) -> int:
    """A field of the process's status, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    raise ValueError(f"/proc/self/status has no {field}")
