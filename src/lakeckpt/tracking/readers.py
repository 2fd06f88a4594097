"""This module defines what a checkpoint manager asks of a reader that can say what was consumed.

Anything with ``state_dict`` and ``load_state_dict`` can be checkpointed. What also has the three other members of
`TrackedReader` is a tracked reader: its state is taken as of a receipt, must agree on all ranks, and its consumption
enters the ledger. A `lakeckpt.LakeLoader` has these members on an object of its own, its ``_reader`` (`reader_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from lakeckpt.core.read_ahead import Given
from lakeckpt.core.state import State
from lakeckpt.core.streams.mixed_batches import AnyReceipt

__all__ = [
    "Delivered",
    "DeliveringReader",
    "StartingReader",
    "TrackedReader",
    "VersionedReader",
    "index_of",
    "reader_of",
    "selection_of",
    "tables_of",
    "versions_of",
]


@runtime_checkable
class TrackedReader(Protocol):
    """A reader of a whole job, as one rank sees it. Called by the training thread only; never communicates.

    The state is plain (JSON-able) and, in lockstep, the same on every rank. States and receipts are values: none is
    changed after it was handed out.
    """

    def state_dict(self, at: AnyReceipt | None = None) -> dict[str, Any]:
        """The state when all up to ``at`` had been consumed (None: all that was delivered)."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on from ``state`` at the next iteration. Raises `StateError` without a change if it does not fit."""
        ...

    @property
    def last_receipt(self) -> AnyReceipt | None:
        """The receipt of what was delivered last; None if nothing was since the state was loaded."""
        ...

    def mark(self, at: AnyReceipt | None = None) -> None:
        """Remember the frontier of ``at`` (None: of all that was delivered): a checkpoint has recorded it."""
        ...

    def stretches(self, at: AnyReceipt | None = None) -> Sequence[tuple[State, State]]:
        """What was consumed from the mark (or from where the state was loaded) up to ``at``, as pairs of states.

        Each pair is of one order and one epoch (or one endless stream), in the order of consumption.
        """
        ...


def reader_of(one: Any) -> Any:
    """Return the tracked reader that ``one`` keeps for managers, as a `lakeckpt.LakeLoader` does; else itself."""
    found = getattr(one, "_reader", None)
    return found if isinstance(found, TrackedReader) else one


def tables_of(readers: Mapping[str, Any]) -> dict[str, Any]:
    """Return what reads one table each, by name: each of ``readers``, or of a mixture its sources, as "name.source"."""
    found: dict[str, Any] = {}
    for name, one in readers.items():
        found |= {f"{name}.{source}": table for source, table in getattr(one, "tables", {"": one}).items()}
    return {name.removesuffix("."): one for name, one in found.items()}


@runtime_checkable
class StartingReader(Protocol):
    """A reader that can begin to read before it is iterated. Called by the training thread only."""

    @property
    def num_workers(self) -> int:
        """Worker processes that it would start."""
        ...

    def start(self) -> None:
        """Begin to read what the next iteration will deliver. Never waits."""
        ...


@runtime_checkable
class VersionedReader(Protocol):
    """What reads a table that has versions: a tracked reader, or a source of a mixture. Called by the training thread
    only."""

    @property
    def versions(self) -> Sequence[Any]:
        """The versions that something was read of since the mark, and the current one: each with ``table`` (with an
        ``index``) and ``selection`` (None: it has no filter)."""
        ...

    def fit(self, state: Mapping[str, Any], saved: Any, *, look: bool) -> Any:
        """How to go on from ``state``: ``index`` (of the version to `repin` to first; None: the current one does),
        ``excluding`` (what that index becomes with the row groups that are excluded now; None: it has the same ones),
        and ``skipped``: the reason for which the rest of its epoch is skipped; empty: it is not skipped.

        ``saved`` gives the index that was kept under a digest, or None. With ``look``, the files of the version are
        compared with the store. Raises a `TableError` if the version is needed and gone.
        """
        ...

    def repin(self, index: Any) -> Callable[[], None]:
        """Read the version that ``index`` pins; a state is loaded next. Returns what undoes it."""
        ...


def versions_of(reader: object) -> list[tuple[Any, Any | None]]:
    """(index, row selection or None) of each table version that ``reader`` reads; empty if it names none. A version
    has two selections if a filter chooses the documents that are packed."""
    if isinstance(reader, VersionedReader):
        return [(one.table.index, found) for one in reader.versions for found in one.selections]
    if (tables := getattr(reader, "tables", None)) is not None:
        return [one for table in tables.values() for one in versions_of(table)]
    index = index_of(reader)
    return [] if index is None else [(index, selection_of(reader))]


def selection_of(reader: object) -> Any | None:
    """The row selection of ``reader`` (with ``digest`` and ``dumps()``), counted if need be; None: it has no filter."""
    return getattr(reader, "selection", None) if getattr(reader, "row_filter", None) is not None else None


class Delivered(Protocol):
    """What a reader has delivered to the loop, counted from step to step."""

    def begin_run(self, name: str, /) -> int:
        """A manager tracks the reader as ``name``: what was delivered before is not of its run. Returns ``run``."""
        ...

    @property
    def run(self) -> int:
        """The number of managers that have tracked the reader."""
        ...

    def take(self) -> Given:
        """What was delivered since the last call; called by the thread that steps."""
        ...

    def check_stepped(self) -> None:
        """Warn if batches were delivered and no step was taken."""
        ...


@runtime_checkable
class DeliveringReader(Protocol):
    """A tracked reader that counts what it delivers, and numbers its batches. Of another one, nothing is suspected."""

    @property
    def deliveries(self) -> Delivered:
        """What it has delivered."""
        ...

    def receipt_of(self, number: int, /) -> AnyReceipt:
        """The receipt of a recent batch by its `Receipt.number`; raises `StateError` if it is none."""
        ...


def index_of(reader: object) -> Any | None:
    """The footer index of the table that ``reader`` reads (with ``digest`` and ``dumps()``), if it names one; of a
    mixture, that of its first source."""
    reader = next(iter(getattr(reader, "tables", {}).values()), reader)
    return getattr(getattr(reader, "table", None), "index", None)
