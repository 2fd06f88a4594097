"""This module counts what one loader delivers, and tells `lakeckpt.metrics` what is known of the loader when it looks.

`Counting` adds to numbers on the thread that iterates. `look` runs on the thread that reads metrics: it changes nothing
of the loader, and asks for nothing that would have to be counted first. The module starts no threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.counters import READERS, Facts, ReaderCounters
from lakeckpt.data.dataset.base_dataset import BaseDataset
from lakeckpt.lake.table.index import TableIndex

__all__ = ["Counting", "look"]

_UNNAMED = "loader"


class Counting:
    """The counters of one loader, and what it reads at the moment. A copy of the loader has counters of its own."""

    def __init__(self) -> None:
        self.counters = ReaderCounters(_UNNAMED)
        self.dataset: BaseDataset | None = None
        """The dataset of the loader; None before its first iteration."""
        self._reading: weakref.ref[Any] | None = None

    def begin(self, dataset: BaseDataset) -> ReaderCounters:
        """Return the counters for an iteration over ``dataset`` that begins."""
        self.counters.name, self.counters.rank = _name_of(dataset), dataset.topology[0]
        if self.dataset is None:
            READERS.follow(self, self.counters, look)
        self.dataset = dataset
        return self.counters

    def reads(self, reading: Any) -> Any:
        """Note that batches come from ``reading``, which may have a property ``ready``, and return it."""
        self._reading = weakref.ref(reading)
        return reading

    @property
    def ready(self) -> int | None:
        """Micro-batches that would come without a wait."""
        reading = None if self._reading is None else self._reading()
        return getattr(reading, "ready", None)


def look(counting: Counting) -> Facts:
    """Return what is known now of the loader that ``counting`` counts for. Any thread may call it."""
    dataset = counting.dataset
    assert dataset is not None
    progress, name = dataset._progress, _name_of(dataset)
    state = progress.runs.glance()
    epochs: dict[str, float] = {}
    skipped: dict[tuple[str, str], int] = {}
    for number, (source, one) in enumerate(dataset._tables.items()):
        reader = f"{name}.{source}" if source else name
        seen = state if state is None or not source else state.of(number)
        epochs[reader] = float(progress.epoch) if seen is None or progress.over else _epochs(seen)
        skipped |= {(reader, reason): rows for reason, rows in _skipped(seen, one.table.index)}
    return Facts(name=name, ready=counting.ready, epochs=epochs, skipped=skipped)


def _name_of(dataset: BaseDataset) -> str:
    return dataset._progress.deliveries.name or _UNNAMED


def _epochs(state: State) -> float:
    """Return how many epochs the job has consumed: 2.25 is a quarter of the third. Whole epochs, if each rank knows its
    own lanes alone."""
    if state.held is not None:
        return float(state.epoch)
    rest = Plan(state).rest(state.step)
    left = sum(one.positions.size / state.rows_of(one.epoch) for one in rest.begun if one.positions)
    return rest.next_epoch - left


def _skipped(state: State | None, index: TableIndex) -> Iterator[tuple[str, int]]:
    """Yield (reason, rows) for the rows of the table version that an epoch leaves out."""
    if index.excluded:
        yield "excluded", sum(_existing(index, group) for group in index.excluded)
    if state is None:
        return
    identity = state.identity
    if identity.selection and not identity.tokens:
        yield "filtered", index.num_rows - identity.rows
    if identity.tail == "drop" and (steps := Plan(state).steps) is not None:
        yield "dropped", Plan(state).rest(steps).of(state.epoch, identity.rows).size


def _existing(index: TableIndex, group: int) -> int:
    """Return the rows of an excluded row group that the version does not delete."""
    start, rows = index.stored_start(group), int(index.stored_rows[group])
    surviving = index.deletes.surviving(index.group(group)[0], start, start + rows)
    return rows if surviving is None else int(surviving.sum())
