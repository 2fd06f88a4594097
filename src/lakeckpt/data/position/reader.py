"""This module gives a checkpoint manager what it asks of a `LakeLoader`, apart from the loader's public methods.

A `LoaderReader` is the ``_reader`` of a loader, and has the protocols of `lakeckpt.tracking.readers`; a `TableReader`
is each table that it reads. A manager calls them on the training thread only. They start no threads themselves; `start`
has the loader begin to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lakeckpt.core.consumption import between
from lakeckpt.core.state import State
from lakeckpt.core.streams.mixed_batches import AnyReceipt
from lakeckpt.data.base.identity import Pinned
from lakeckpt.data.base.source import BatchSource
from lakeckpt.data.base.topology import check_topology
from lakeckpt.data.base.transform import maker_of
from lakeckpt.data.position.deliveries import Deliveries
from lakeckpt.data.position.progress import Progress
from lakeckpt.data.position.versions import Fit, Saved, Versions
from lakeckpt.errors import StateMismatch
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.filters.row_filter import RowFilter
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.packed.packing import Packing

__all__ = ["LoaderReader", "TableReader"]


class TableReader:
    """The table that a loader reads, or the source ``name`` of a mixture, in its ``versions``."""

    def __init__(self, versions: Versions, name: str | None = None) -> None:
        self._versions, self._name = versions, name

    @property
    def source(self) -> BatchSource:
        """The source of its batches."""
        return self._versions.source

    @property
    def table(self) -> Table:
        """The table, at the version that is read."""
        return self._versions.at_hand.table

    @property
    def row_filter(self) -> RowFilter | None:
        """The filter; None: every row is read."""
        return self._versions.at_hand.row_filter

    @property
    def packing(self) -> Packing | None:
        """How documents are packed; None: rows are read."""
        return self._versions.at_hand.packing

    def offer_selection(self, found: RowSelection) -> bool:
        """Take a saved selection instead of counting; return whether it was needed, and fits table and filter."""
        return self._versions.at_hand.offer(found)

    @property
    def versions(self) -> list[Pinned]:
        """The table versions that something was read of since the last checkpoint, and the current one."""
        return self._versions.read

    def fit(self, state: Mapping[str, Any], saved: Saved, *, look: bool) -> Fit:
        """See `lakeckpt.data.position.versions.Versions.fit`."""
        found = State.from_plain(state)
        if found.mixing is None or self._name is None:
            return self._versions.fit(found, saved, look=look)
        if self._name not in found.mixing.names:
            return Fit()  # nothing of it was read
        return self._versions.fit(found.of(found.mixing.names.index(self._name)), saved, look=look)

    def repin(self, index: TableIndex) -> Callable[[], None]:
        """Read the table version that ``index`` pins; a state is loaded next. Return a function that undoes it."""
        return self._versions.repin(index)


class _Loader(Protocol):
    """A `LakeLoader`, as its reader sees it. The training thread alone calls it."""

    dataset: Any
    num_workers: int
    receipt_column: str | None

    @property
    def topology(self) -> tuple[int, int]: ...

    def state_dict(self, at: AnyReceipt | None = None) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def _settle(self) -> None:
        """Take the number of ranks and workers into the place, before the place is asked."""

    def _start(self) -> None:
        """Begin to read what the next iteration will deliver."""


class LoaderReader:
    """The side of ``loader`` that checkpoint managers see."""

    def __init__(self, loader: _Loader) -> None:
        self._loader, self._dataset = loader, loader.dataset
        self._progress: Progress = loader.dataset._progress
        self.tables: Mapping[str, TableReader] = loader.dataset._tables
        """What reads each table, by the names of the sources of a mixture; "": the only one."""

    @property
    def num_workers(self) -> int:
        """The number of worker processes that the loader starts."""
        return self._loader.num_workers

    @property
    def receipt_column(self) -> str | None:
        """The name under which each batch holds its number."""
        return self._loader.receipt_column

    @property
    def last_receipt(self) -> AnyReceipt | None:
        """The receipt of what the loop received last."""
        return self._progress.last_receipt

    def state_dict(self, at: AnyReceipt | None = None) -> dict[str, Any]:
        """See `LakeLoader.state_dict`."""
        return self._loader.state_dict(at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LakeLoader.load_state_dict`."""
        self._loader.load_state_dict(state)

    # --- for managers alone

    @property
    def topology(self) -> tuple[int, int]:
        """(data-parallel rank, number of data-parallel ranks)."""
        return self._loader.topology

    @property
    def batch_size(self) -> int | None:
        """Rows (or packed sequences) of a micro-batch; None: single rows."""
        found: int | None = self._dataset.batch_size
        return found

    @property
    def has_explicit_rank(self) -> bool:
        """True if the user gave ``rank=`` and ``world_size=``, so that no group says which ranks read the same rows."""
        return self._dataset._explicit_rank is not None

    def start(self) -> None:
        """Begin to read what the next iteration will deliver.

        It does not wait, and raises nothing that reading raises: the iteration will. Reading that was begun is dropped
        if the place changes before the next iteration.
        """
        self._loader._start()

    @property
    def deliveries(self) -> Deliveries:
        """Counts what the loop was given since the last step."""
        return self._progress.deliveries

    def receipt_of(self, number: int) -> AnyReceipt:
        """Return the receipt of the batch that held ``number`` in its ``receipt_column``.

        Raises StateUnavailable if no such batch was delivered since the last checkpoint.
        """
        self._loader._settle()
        return self._progress.runs.numbered(number, self._loader.topology[0])

    def mark(self, at: AnyReceipt | None = None) -> None:
        """Forget what was consumed up to ``at``: a checkpoint has recorded it."""
        self._loader._settle()
        self._progress.runs.mark(at)

    def stretches(self, at: AnyReceipt | None = None) -> list[tuple[State, State]]:
        """Return what was consumed since the mark up to ``at``, as (from, to) pairs of states of one epoch each."""
        self._loader._settle()
        return self._progress.runs.stretches(at)

    @property
    def facts(self) -> dict[str, str]:
        """The settings that the script gave, for the lines in which a restart says what differs."""
        found = {"batch size": str(self._dataset.batch_size), "workers": str(self.num_workers)}
        if (mixing := self._progress.mixing) is not None:
            found["weights"] = _named(mixing.names, mixing.weights)
            found["schedule"] = str([(step, _named(mixing.names, weights)) for step, weights in mixing.schedule])
        for name, one in self.tables.items():
            maker = getattr(one.source, "maker", None)
            if maker is not None and maker.name and maker.length:
                found["tokenizer"] = f"{maker.name} {maker.fingerprint}".rstrip()
            else:
                transform = one.source.transform
                made = "none" if transform is None else maker_of(transform)
                found[f"transform of {name!r}" if name else "transform"] = made
        return found

    @property
    def weights(self) -> str | None:
        """The weights with which a mixture goes on; the script's if it has no place yet, or a new source. None: this is
        no mixture."""
        mixing = self._progress.mixing
        return None if mixing is None else _named(mixing.names, self._progress.weights)

    def next_epoch(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the start of the epoch after that of ``state``, at the current version."""
        return self._progress.following(self._progress.read(state)).to_plain()

    # --- for integrations in which the ranks change while the job runs

    @property
    def epoch_of_next(self) -> int:
        """The epoch of the next batch, also if the loop has yet to see the end of the epoch before it."""
        self._loader._settle()
        progress = self._progress
        state = progress.state
        return state.epoch + (not progress.over and progress.steps == state.step)

    def deal_to(self, rank: int, world_size: int) -> None:
        """Read as ``rank`` of ``world_size`` from the next iteration on. Every rank goes on from an equal state."""
        self._dataset._explicit_rank = check_topology(rank, world_size)

    def remember(self) -> Callable[[], None]:
        """Return a function that takes back what is delivered from now on; iterations are out of date then."""
        return self._progress.remember()

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, to which other processes came from the current place. Rows that they consumed count as
        delivered here, if ``state`` follows from this place. Raises as `load_state_dict`."""
        self._loader._settle()
        before, after = self._progress.state, self._progress.read(state)
        self.load_state_dict(state)
        try:
            done = between(before, after)
        except StateMismatch:
            return  # it is of another history: the ledger shows the gap
        self._progress.runs.add(done)


def _named(names: tuple[str, ...], weights: tuple[int, ...]) -> str:
    """Return the weights by names, for people and to be compared."""
    total = sum(weights)
    return ", ".join(f"{name} {weight / total:.4g}" for name, weight in zip(names, weights, strict=True))
