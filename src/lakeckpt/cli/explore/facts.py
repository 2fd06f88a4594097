"""This module collects what the page of a run shows: plain values, from the log and the table indexes alone.

The size of the page is bounded: an epoch is a strip of `_CELLS` cells, and each cell names the attempt that consumed
most of its rows; and rows are named of the last steps only, up to `_MOST_RANGES` ranges of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.checkpoint.consumed.rows import RowOrder
from lakeckpt.checkpoint.consumed.source_records import readers_in
from lakeckpt.checkpoint.faults.records import faults_of, stalls_of
from lakeckpt.checkpoint.ledger.audit import audit_history, read_run
from lakeckpt.checkpoint.ledger.explain import explain_history
from lakeckpt.checkpoint.ledger.indexes import orders_of
from lakeckpt.checkpoint.ledger.verify import Kept
from lakeckpt.checkpoint.persist.history import History
from lakeckpt.cli.inspect import overview_of
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import LakeckptError
from lakeckpt.lake.storage.base import Storage

__all__ = ["facts_of"]

_CELLS = 240
_MOST_RANGES = 40_000
_NOBODY = -1


def facts_of(storage: Storage, place: str, *, newest_steps: int) -> dict[str, Any]:
    """Return the facts of the run at ``storage``, as JSON-able values. Raises `CheckpointNotFound` if there is none."""
    history = read_run(storage)
    orders = orders_of(storage, history)
    steps, why = _steps(history, orders, newest_steps)
    faults, account = faults_of(storage, history)
    return {
        "place": place,
        **overview_of(history, Kept(storage), newest=10**9),
        "audit": audit_history(history, orders).to_plain(),
        "restarts": list(_restarts(history)),
        "faults": [one.to_plain() for one in faults],
        "stalls": [stall.to_plain(path) for path, stall in stalls_of(storage)],
        "account": account.to_plain(),
        "waits": [] if history.tip is None else [asdict(one) for one in history.tip.waits],
        "epochs": _epochs(history),
        "steps": steps,
        "steps_end": why,
    }


def _restarts(history: History) -> Iterator[dict[str, Any]]:
    """Yield what each restart cost, as far as the log can tell: the time from the checkpoint that was restored to the
    end of the restore, and the steps of checkpoints that no longer count."""
    manifests = {one.slot: one for one in (*history.chain, *history.abandoned)}
    for restore in history.restores:
        source = manifests.get(-1 if restore.restored is None else restore.restored)
        if restore.attempt is None or source is None:
            continue
        before = [one for one in manifests.values() if one.slot < restore.slot]
        step = source.step if restore.captured is None else restore.captured.step
        newest = max(one.step for one in before if one.attempt == max(one.attempt for one in before))
        yield {
            "attempt": restore.attempt,
            "step": step,
            "steps_again": max(0, newest - step),
            "seconds": max(0.0, restore.created_s - source.created_s),
            "restored_s": restore.created_s,
            "from_memory": restore.captured is not None,
        }


def _epochs(history: History) -> dict[str, list[dict[str, Any]]]:
    """Return for each reader the strips of its epochs."""
    found: dict[str, dict[int, _Strip]] = {}
    for manifest in history.chain:
        for name, record in readers_in(manifest).items():
            strips = found.setdefault(name, {})
            for stretch in record.stretches:
                begin, attempt = stretch.begin, stretch.record.attempt
                attempt = manifest.attempt if attempt < 0 else attempt
                for epoch, positions in stretch.consumed.items():
                    strips.setdefault(epoch, _Strip(begin.rows_of(epoch))).add(positions, attempt)
    return {
        name: [{"epoch": epoch, **strip.to_plain()} for epoch, strip in sorted(strips.items())]
        for name, strips in sorted(found.items())
    }


class _Strip:
    """The positions of one epoch, in cells."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._bounds = np.linspace(0, rows, min(_CELLS, max(rows, 1)) + 1)
        self._by: dict[int, npt.NDArray[np.float64]] = {}
        self._done = 0

    def add(self, positions: Intervals, attempt: int) -> None:
        """Count ``positions``, which ``attempt`` consumed."""
        if not positions:
            return
        counts = np.concatenate([[0], np.cumsum(positions.stops - positions.starts)])
        edges = np.stack([positions.starts, positions.stops], axis=1).ravel()
        before = np.interp(self._bounds, edges, np.stack([counts[:-1], counts[1:]], axis=1).ravel())
        self._by[attempt] = self._by.get(attempt, 0.0) + np.diff(before)
        self._done += positions.size

    def to_plain(self) -> dict[str, Any]:
        """Return the cells, run-length coded: [attempt or -1, how many cells]."""
        attempts = np.array([_NOBODY, *self._by])
        shares = np.stack([np.zeros(len(self._bounds) - 1), *self._by.values()])
        names = attempts[shares.argmax(axis=0)]
        edges = np.flatnonzero(np.diff(names, prepend=names[0] - 1))
        lengths = np.diff(np.append(edges, len(names)))
        cells = [[int(names[edge]), int(length)] for edge, length in zip(edges, lengths, strict=True)]
        return {"rows": self.rows, "done": self._done, "cells": cells}


def _steps(history: History, orders: Mapping[str, RowOrder], newest: int) -> tuple[dict[str, Any], str]:
    """Return optimizer step → the rows of its ranks, for the last steps; and why there are no more, or empty."""
    tip = history.tip
    found: dict[str, Any] = {}
    ranges = 0
    for step in range(0 if tip is None else tip.step, 0, -1):
        if len(found) >= newest:
            return found, f"the page has the last {newest:,} steps (--steps)"
        try:
            explained = explain_history(history, orders, step)
        except LakeckptError as error:
            return found, str(error)
        found[str(step)] = explained.to_plain()
        every = [rows for reader in explained.readers for rank in reader.ranks for rows in rank.where]
        ranges += sum(len(one.rows) for one in every)
        if ranges > _MOST_RANGES:
            return found, f"the page has the last {len(found):,} steps: the rows of more would make it large"
    return found, ""
