"""This module defines what a dataset of one table and a mixture of several have in common.

A `BaseDataset` belongs to a rank. It has one place (`lakeckpt.data.position.progress.Progress`) and one source of
batches, and is iterated in the main process or by a `lakeckpt.LakeLoader`. It starts no threads itself: the source
does, for each iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from lakeckpt.data.base.ahead import Ahead
from lakeckpt.data.base.options import Follow
from lakeckpt.data.base.source import Items, Output, gives
from lakeckpt.data.base.topology import resolve_topology
from lakeckpt.data.base.transform import CarriedRows
from lakeckpt.data.dataset.frameworks import check_dealers
from lakeckpt.data.position.progress import Progress
from lakeckpt.data.position.reader import TableReader
from lakeckpt.errors import ConfigError

__all__ = ["BaseDataset", "shown_dataset", "shown_loader"]


class BaseDataset(IterableDataset[Any]):
    """The base of all that a `lakeckpt.LakeLoader` reads."""

    batch_size: int | None
    """Rows of a micro-batch; None: single rows."""
    output: Output
    row_wise, yields_many, has_transform = False, False, False
    follow: Follow | None = None
    """How a table is followed; None: it is not."""
    _progress: Progress
    _source: Any
    _tables: Mapping[str, TableReader]
    """What reads each table, by the names of the sources of a mixture; "": the only one."""
    _carried: CarriedRows
    _explicit_rank: tuple[int, int] | None = None
    _dp_group: Any = None
    _pickled_topology: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return shown_dataset(self)

    @property
    def _version(self) -> str:
        """The digests of the versions of the tables that are read."""
        return " ".join(
            digest for one in self._tables.values() for digest in (one.table.index.digest, *one.source.earlier)
        )

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned can ask neither torch.distributed nor the group: it gets the answer.
        state = dict(self.__dict__)
        if get_worker_info() is None:
            state["_pickled_topology"] = self.topology
            check_dealers(self.topology)  # of workers that are spawned
            if self._dp_group is not None:
                state["_explicit_rank"] = self.topology
        state["_dp_group"] = None
        return state

    @property
    def topology(self) -> tuple[int, int]:
        """(data-parallel rank, number of data-parallel ranks); ConfigError if it cannot be known."""
        if get_worker_info() is not None and self._pickled_topology is not None:
            return self._pickled_topology
        return resolve_topology(self._explicit_rank, self._dp_group)

    @property
    def epoch(self) -> int:
        """The current epoch; 0 if the stream counts its epochs itself."""
        return self._progress.epoch

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"a dataset of lakeckpt has no item {index!r}: its rows come in the order of an epoch. Iterate it, or read "
            "it with lakeckpt.LakeLoader(dataset), which gives one batch after another and can be resumed"
        )

    # --- iteration in this process

    def _move(self) -> None:
        """Go on with the newest version of a table when an epoch begins."""

    def _through(self, first: Generator[Any], more: Callable[[], Generator[Any]]) -> Generator[Any]:
        """Return the items of ``first``, and of what comes after it if the table is followed."""
        return first

    def _read_here(self) -> Iterator[Any]:
        """Return an iterator over what is left of the epoch, read in this process."""
        rank, world_size = self.topology
        self._progress.turn(rank)
        self._move()
        self._progress.settle(world_size, 0)
        # Now, not when the first item is asked for: what changes the place in between puts this iterator out of date.
        iteration = self._progress.begin_iteration()
        return Items(self._through(self._iterate(rank, iteration), lambda: self._iterate(rank, iteration)))

    def _reading(self, rank: int) -> Iterator[Any]:
        """Return (receipt, batch) of each step of ``rank`` that is left of the epoch."""
        return self._completed(Ahead(self._source, self._progress.stretches(), rank, row_wise=self.row_wise))

    def _completed(self, found: Iterator[Any]) -> Iterator[Any]:
        """Return ``found``, (receipt, batch) of each step, with the receipts as they are known after reading."""
        return found

    def _iterate(self, rank: int, iteration: int) -> Generator[Any]:
        progress = self._progress
        progress.check(iteration)
        step = progress.state.step
        progress.deliveries.waits()
        for dealt, found in self._reading(rank):
            self._carried.check(found, dealt)
            if gives(dealt, self.row_wise):
                progress.check(iteration)
                progress.delivered(dealt)
                yield found
                progress.deliveries.waits()
            step = dealt.step + 1
            progress.check(iteration)
        progress.end(step)


def shown_dataset(dataset: Any) -> str:
    """Return the repr of a dataset: table, what is read of it, batch size, ranks and place.

    A mixture shows its sources, and each of these its table. It reads nothing and never raises: what is not known yet
    is not shown.
    """
    parts = [f"batch_size={dataset.batch_size}", _ranks(dataset), _place(dataset)]
    tables = {name: _what(one) for name, one in dataset._tables.items()}
    shown = tables[""] if "" in tables else f"{{{', '.join(f'{name!r}: {one}' for name, one in tables.items())}}}"
    return f"{type(dataset).__name__}({shown}, {', '.join(parts)})"


def shown_loader(loader: Any) -> str:
    """Return the repr of a loader."""
    restarts = ", restart=True" if loader._restarts is not None else ""
    return f"{type(loader).__name__}({shown_dataset(loader.dataset)}, num_workers={loader.num_workers}{restarts})"


def _what(reader: TableReader) -> str:
    """Return the table that is read, and how its rows become sequences."""
    maker = getattr(reader.source, "maker", None)
    packing = reader.packing if maker is None else maker if maker.length else None
    uri = repr(reader.table.uri)
    return uri if packing is None else f"{uri} in sequences of {packing.length} tokens"


def _ranks(dataset: Any) -> str:
    try:
        rank, world_size = dataset.topology
    except ConfigError:
        return "rank not known yet"
    return f"rank {rank} of {world_size}"


def _place(dataset: Any) -> str:
    """Return the step (of an endless stream or a mixture), or the epoch and the step that come next."""
    progress = dataset._progress
    if not progress.begun:
        return f"epoch {progress.epoch}, not begun"
    state = progress.state
    return f"step {state.step}" if progress.is_endless else f"epoch {state.epoch}, step {state.step}"
