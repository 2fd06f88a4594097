"""This module gives a checkpoint manager what it asks of a `LakeLoader`, apart from the loader's public methods.

A `LoaderReader` is the ``_reader`` of a loader, and has all protocols of `lakeckpt.tracking.readers`. A manager calls
it on the training thread only. It starts no threads itself; `start` has the loader begin to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lakeckpt.core.consumption import between
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import State
from lakeckpt.data.flows.calls import maker_of
from lakeckpt.data.place.deliveries import Deliveries
from lakeckpt.data.place.identity import Pinned
from lakeckpt.data.place.mixed import MixedProgress
from lakeckpt.data.place.progress import Progress
from lakeckpt.data.place.versions import Fit
from lakeckpt.data.topology import check_topology
from lakeckpt.errors import StateMismatch
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.filters.row_filter import RowFilter
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.packed.packing import Packing

if TYPE_CHECKING:
    from lakeckpt.data.dataset import LakeDataset
    from lakeckpt.data.loader import LakeLoader

__all__ = ["LoaderReader", "SourceReader", "sources_of"]


class LoaderReader:
    """The side of ``loader`` that checkpoint managers see; ``dataset`` is what it reads."""

    suffix = ""
    """What a manager adds to the loader's name."""

    def __init__(self, loader: LakeLoader, dataset: LakeDataset) -> None:
        self._loader, self._dataset = loader, dataset
        self._progress: Progress = dataset._progress

    # --- as the loader has it

    @property
    def table(self) -> Table:
        """The table, at the version that is read."""
        return self._dataset.table

    @property
    def row_filter(self) -> RowFilter | None:
        """The filter; None: every row is read."""
        return self._dataset.row_filter

    @property
    def packing(self) -> Packing | None:
        """How documents are packed; None: rows are read."""
        return self._dataset.packing

    @property
    def num_workers(self) -> int:
        """The number of worker processes that the loader starts."""
        return self._loader.num_workers

    @property
    def receipt_column(self) -> str | None:
        """The name under which each batch holds its number."""
        return self._loader.receipt_column

    @property
    def last_receipt(self) -> Receipt | None:
        """The receipt of what the loop received last."""
        return self._loader.last_receipt

    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        """See `LakeLoader.state_dict`."""
        return self._loader.state_dict(at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LakeLoader.load_state_dict`."""
        self._loader.load_state_dict(state)

    # --- for managers alone

    @property
    def facts(self) -> dict[str, str]:
        """What the script gave, for the lines in which a restart says what differs."""
        dataset = self._dataset
        found = {"batch size": str(dataset.batch_size), "workers": str(self.num_workers)}
        maker = getattr(dataset._source, "maker", None)
        if maker is not None and maker.name and maker.length:
            found["tokenizer"] = f"{maker.name} {maker.fingerprint}".rstrip()
        else:
            transform: Any = dataset._source.transform
            found["transform"] = "none" if transform is None else maker_of(getattr(transform, "transform", transform))
        return found

    @property
    def topology(self) -> tuple[int, int]:
        """(data-parallel rank, number of data-parallel ranks)."""
        return self._loader.topology

    @property
    def last_of_loader(self) -> Any:
        """The receipt of the loader's last batch; of a mixture, that of the whole micro-batch."""
        return self._loader.last_receipt

    @property
    def has_explicit_rank(self) -> bool:
        """Whether the user gave ``rank=`` and ``world_size=``, so that no group says which ranks read the same rows."""
        return self._dataset._explicit_rank is not None

    def start(self) -> None:
        """Begin to read what the next iteration will deliver.

        It does not wait, and raises nothing that reading raises: the iteration will. What was begun is dropped where
        the place changes before the next iteration.
        """
        self._loader._start()

    @property
    def deliveries(self) -> Deliveries:
        """Counts what the loop was given since the last step."""
        return self._progress.deliveries

    def receipt_of(self, number: int) -> Receipt:
        """Return the receipt of the batch that held ``number`` in its ``receipt_column``.

        Raises StateUnavailable where no such batch was delivered since the last checkpoint.
        """
        self._loader._settle()
        return self._progress.runs.numbered(number, self._loader.topology[0])

    def mark(self, at: Receipt | None = None) -> None:
        """Forget what was consumed up to ``at``: a checkpoint has recorded it."""
        self._loader._settle()
        self._progress.runs.mark(at)

    def stretches(self, at: Receipt | None = None) -> list[tuple[State, State]]:
        """Return what was consumed since the mark up to ``at``, as (from, to) pairs of states of one epoch each."""
        self._loader._settle()
        return self._progress.runs.stretches(at)

    def offer_selection(self, found: RowSelection) -> bool:
        """Take a saved selection instead of counting; return whether it was needed, and fits table and filter."""
        return self._dataset._versions.at_hand.offer(found)

    # --- for integrations in which the ranks change while the job runs

    @property
    def epoch_of_next(self) -> int:
        """The epoch of the next batch, also where the loop has yet to see the end of the epoch before it."""
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
        """Go on from ``state``, to which other processes came from the place at hand. What they consumed counts as
        delivered here, where ``state`` follows from this place. Raises as `load_state_dict`."""
        self._loader._settle()
        before, after = self._progress.state, self._progress.read(state)
        self.load_state_dict(state)
        try:
            done = between(before, after)
        except StateMismatch:
            return  # it is of another history: the ledger shows the gap
        self._progress.runs.add(done)

    # --- for managers of tables that have versions

    @property
    def versions(self) -> list[Pinned]:
        """The table versions that something was read of since the last checkpoint, and the one at hand."""
        return self._dataset._versions.read

    def fit(self, state: Mapping[str, Any], saved: Callable[[str], TableIndex | None], *, look: bool) -> Fit:
        """See `lakeckpt.data.place.versions.Versions.fit`."""
        return self._dataset._versions.fit(self._progress.read(state), saved, look=look)

    def repin(self, index: TableIndex) -> Callable[[], None]:
        """Read the table version that ``index`` pins; a state is loaded next. Return a function that undoes it."""
        return self._dataset._versions.repin(index)

    def next_epoch(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the start of the epoch after that of ``state``, at the version at hand."""
        return self._progress.following(self._progress.read(state)).to_plain()


class SourceReader(LoaderReader):
    """The side of one source of a mixture, number ``source`` of the ``dataset`` that ``loader`` reads."""

    def __init__(self, loader: LakeLoader, dataset: LakeDataset, source: int, suffix: str) -> None:
        super().__init__(loader, dataset)
        self._source, self.suffix = source, suffix

    @property
    def _mixed(self) -> MixedProgress:
        found: Any = self._loader._progress
        assert isinstance(found, MixedProgress)
        return found

    @property
    def facts(self) -> dict[str, str]:
        """What the script gave to the mixture, and the transform of this source."""
        mixing, loader = self._mixed.mixing, self._loader
        return {
            "batch size": str(loader.dataset.batch_size),
            "workers": str(self.num_workers),
            "weights": _named(mixing.names, mixing.weights),
            "schedule": str([(step, _named(mixing.names, weights)) for step, weights in mixing.schedule]),
            f"transform of {self.suffix[1:]!r}": super().facts["transform"],
        }

    @property
    def weights(self) -> str:
        """The weights with which the mixture goes on; the script's where it has no place yet, or a new source."""
        mixing = self._mixed.mixing
        share = self._progress.state.segment.share if self._progress.begun else None
        if share is None or len(share.weights) != len(mixing.names):
            return _named(mixing.names, mixing.weights)
        return _named(mixing.names, share.weights)

    @property
    def last_receipt(self) -> Receipt | None:
        """What the source gave to the micro-batch that the loop received last."""
        return self._mixed.receipt_of(self._source)

    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        """Return the state of the source, of all that the loop has received, or of all up to ``at``."""
        if not self._progress.begun:  # else a restore may have loaded the states of some sources, and not yet of all
            self._loader._settle()
        return self._progress.at(at).to_plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state`` at the next iteration, if the other sources go on from there, too."""
        self._mixed.load_source(self._source, State.from_plain(state))
        self._mixed.changed()
        self._loader._early = None

    def start(self) -> None:
        """Begin to read, once a restore has loaded the states of all sources."""
        if self._mixed.is_together:
            super().start()

    def repin(self, index: TableIndex) -> Callable[[], None]:
        """See `LoaderReader.repin`."""
        undo = super().repin(index)
        self._mixed.changed()
        return undo


def _named(names: tuple[str, ...], weights: tuple[int, ...]) -> str:
    """Return the weights by names, for people and to be compared."""
    total = sum(weights)
    return ", ".join(f"{name} {weight / total:.4g}" for name, weight in zip(names, weights, strict=True))


def sources_of(loader: LakeLoader, sources: Mapping[str, LakeDataset]) -> dict[str, LoaderReader]:
    """Return the readers of the ``sources`` of the mixture that ``loader`` reads, by what is added to its name."""
    every = enumerate(sources.items())
    return {f".{name}": SourceReader(loader, one, number, f".{name}") for number, (name, one) in every}
