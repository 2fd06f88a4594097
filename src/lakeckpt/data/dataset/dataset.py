"""This module defines `LakeDataset`, a torch IterableDataset over a table.

Iterated in the main process, or by a `lakeckpt.LakeLoader`, the dataset keeps one reader state for the whole job. In
the workers of another DataLoader it reads the part that is theirs (`lakeckpt.data.dataset.foreign_workers`). It starts
no threads itself: the source does, for each iteration.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch.utils.data import get_worker_info

from lakeckpt.core.identity import Identity
from lakeckpt.core.order import OrderSpec, Tail
from lakeckpt.core.plan import Plan
from lakeckpt.data.base.identity import Pinned
from lakeckpt.data.base.options import Follow, ReadOptions, flag, following, integer, one_of, optional, positive
from lakeckpt.data.base.source import Items, Output
from lakeckpt.data.base.topology import check_topology
from lakeckpt.data.base.transform import CarriedRows, Transform, bind_transform
from lakeckpt.data.dataset.base_dataset import BaseDataset
from lakeckpt.data.dataset.foreign_workers import WORKER_FORMAT, SharedEpoch, WorkerTurns
from lakeckpt.data.dataset.frameworks import check_dealers, check_not_sampled
from lakeckpt.data.dataset.source_kinds import check_flow, check_no_workers, feed_of, source_of
from lakeckpt.data.position.already_read import Consumed, rest_of_first_epoch
from lakeckpt.data.position.orders import Orders
from lakeckpt.data.position.progress import Progress
from lakeckpt.data.position.reader import TableReader
from lakeckpt.data.position.versions import Versions, check_moves
from lakeckpt.errors import ConfigError, StateUnavailable
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.filters.row_filter import Filters, RowFilter
from lakeckpt.reading.filters.selection import RowSelection
from lakeckpt.reading.packed.packing import Packing
from lakeckpt.reading.windows.decode import select_columns

__all__ = ["LakeDataset"]

_DEFAULT_WINDOW = 4
"""Row groups whose rows are permuted together."""


class LakeDataset(BaseDataset):
    """Rows of a table in a pure, deterministic order, micro-batch by micro-batch.

    Args:
        table: a `lakeckpt.Table`, or what `lakeckpt.open_table` takes.
        batch_size: rows per micro-batch; None yields single rows, for a DataLoader that batches them itself.
        columns: names of the columns to read, in the order wanted; None: all.
        filters: which rows to read: a pyarrow expression, ``[("a", ">", 3), ("b", "in", [...])]`` (all must hold), or a
            list of such lists (one must). Rows stay if it is true, and go if it is false or null. They are
            counted once, row group by row group, before the first iteration; positions count those that stay.
        shuffle: permute row groups, and rows inside of windows, anew for every epoch.
        shuffle_window: row groups whose rows are permuted together. All lanes' windows are in memory at once.
        seed: any integer of 64 bits.
        drop_last: deliver full micro-batches only, and drop the rows that fill none (row-wise: ranks get equally
            many rows). False: every row counts; the last micro-batches of a lane are smaller, and every rank has the
            same number of steps.
        endless: one iteration that never ends, over epoch borders, always full micro-batches.
        transform: called with each `Batch` (row-wise: each row; ``output="arrow"``: each pyarrow.Table) where it is
            read, in a worker if there are any; with a `lakeckpt.TransformContext` as well if it takes two arguments.
            It must keep nothing between calls: rows that it holds back for a later call count as consumed, and are lost
            when a run is restored. A warning says so, once, if it returns another number of rows than it got.
        rows: ``"many"``: the transform is called with one row, a dict, and yields (or returns an iterable of) any
            number of rows, the same whenever it gets the same row. Micro-batches are ``batch_size`` of these rows, with
            numbers, tensors and arrays stacked and texts in a list. The state of one of several ranks is its part then:
            see `lakeckpt.merge_states`. None: as above.
        output: ``"torch"`` (tensors), ``"numpy"`` (arrays) or ``"arrow"`` (pyarrow.Table). A text column is a
            ``list[str]``; other columns of varying length are `lakeckpt.Ragged`.
        rank, world_size: the data-parallel rank and size; both or neither.
        dp_group: the data-parallel ProcessGroup or DeviceMesh, if it is not the default group.
        storage_options, filesystem: as for `lakeckpt.open_table`, if ``table`` is not a `lakeckpt.Table`.
        consumed: rows that another system has trained on already, as ``{file: [(start, stop), …]}`` (rows of a file,
            counted from its first one) or as ``(name of a key column, values)``. The first epoch consists of the other
            rows; later epochs have all rows. Give it as long as the first epoch lasts, after restarts, too.
        follow: read a table that is appended to, in one iteration: rows of files that are added come after the rows
            that were there, each once, in full micro-batches. True, or a `lakeckpt.Follow` that says how to wait.
        options: a `lakeckpt.ReadOptions`: lanes, nulls, table versions, memory and what else few users need.

    Raises ConfigError and SchemaError for arguments that cannot be; nothing is read before the first iteration (or
    before `selection` is asked for, or a state).
    """

    def __init__(
        self,
        table: Table | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        batch_size: int | None,
        columns: Sequence[str] | None = None,
        filters: Filters | None = None,
        shuffle: bool = False,
        shuffle_window: int = _DEFAULT_WINDOW,
        seed: int = 0,
        drop_last: bool = False,
        endless: bool = False,
        transform: Transform | None = None,
        rows: Literal["many"] | None = None,
        output: Output = "torch",
        rank: int | None = None,
        world_size: int | None = None,
        dp_group: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
        consumed: Consumed | None = None,
        follow: bool | Follow = False,
        options: ReadOptions | None = None,
    ) -> None:
        super().__init__()
        batch_size, shuffle_window = optional("batch_size", batch_size), positive("shuffle_window", shuffle_window)
        one_of("output", output, ("torch", "numpy", "arrow"))
        self.options = _checked(options)
        if not isinstance(table, Table):
            table = open_table(table, storage_options=storage_options, filesystem=filesystem)
        elif storage_options is not None or filesystem is not None:
            raise ConfigError("storage_options= and filesystem= go to open_table, and this table is open already")
        self.follow = following(follow, row_wise=batch_size is None, others=(endless, drop_last, consumed is not None))
        """How the table is followed; None: it is not."""
        check_moves(table, self.options, endless=endless, follows=self.follow is not None)
        self.batch_size = batch_size
        self.columns = None if columns is None else select_columns(table.schema, columns).names
        self.row_wise = batch_size is None
        self.output: Output = output
        self.has_transform = transform is not None
        self.yields_many = rows is not None
        self._explicit_rank = check_topology(rank, world_size)
        self._dp_group = dp_group
        try:
            window = shuffle_window if flag("shuffle", shuffle) else 1
            spec = OrderSpec(seed=integer("seed", seed), shuffle=shuffle, window=window)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if flag("endless", endless) and not table.num_rows:
            raise ConfigError("endless=True needs a table with at least one row, and this one has none")
        if consumed is not None:
            if endless:
                raise ConfigError("consumed= names rows of the first epoch, and an endless stream has no epochs")
            table = rest_of_first_epoch(table, consumed)
        if self.yields_many:
            check_flow(self, self.options, rows, endless=endless, drops=drop_last, begun=consumed is not None)
        kind: Tail = "drop" if flag("drop_last", drop_last) else "short" if self.follow is None else "carry"
        pinned = Pinned(
            table=table,
            columns=self.columns,
            nulls=None if output == "arrow" else self.options.nulls,
            filters=filters,
            spec=spec,
            tail=kind,
            endless=endless,
        )
        self._read(pinned, bind_transform(transform))

    def _read(self, pinned: Pinned, transform: Any) -> None:
        """Begin to read ``pinned`` from its start."""
        options = self.options
        self._source, size = source_of(self, options, pinned, transform)
        self._progress = Progress(
            Orders([pinned], accepted=[options.accept_changes], describes=[self._source.describe]),
            batch_size=size,
            num_lanes=options.num_lanes,
            row_wise=self.row_wise,
            moves=options.on_new_version == "next_epoch",
            follows=self.follow is not None,
        )
        self._versions = Versions(pinned, self._source, self._progress, self.options, follow=self.follow)
        self._tables = {"": TableReader(self._versions)}
        if pinned.table.index.rest is not None:
            self._versions.read_rest()
        self._shared = SharedEpoch()
        self._carried = CarriedRows(looks=self.has_transform and not (self.row_wise or self.yields_many))
        self._turns = WorkerTurns(self._source, self._progress, self._carried, row_wise=self.row_wise)
        self._read_ahead = ""

    def _check_not_followed(self) -> None:
        if self.follow is not None:
            raise ConfigError("a table that is followed can be neither packed nor mixed: leave follow= out")

    def _remade(self, pinned: Pinned, transform: Any, *, many: str = "") -> LakeDataset:
        """Return a dataset that reads ``pinned`` from its start, as this one does otherwise.

        ``many`` is what the user wrote, by which a row yields any number of rows; empty: it yields one. Raises
        `ConfigError` if the arguments of this dataset do not go with that.
        """
        made = object.__new__(LakeDataset)
        made.__dict__.update(self.__dict__)
        made.columns = pinned.columns
        if many:
            made.has_transform = made.yields_many = True
            drops, begun = pinned.tail == "drop", pinned.table.index.rest is not None
            check_flow(made, self.options, "many", endless=pinned.endless, drops=drops, begun=begun, name=many)
        made._read(pinned, transform)
        return made

    @property
    def packing(self) -> Packing | None:
        """How documents are packed into sequences (`lakeckpt.pack`); None: rows are read."""
        return self._versions.at_hand.packing

    @property
    def table(self) -> Table:
        """The table, at the version that is read."""
        return self._versions.at_hand.table

    @property
    def identity(self) -> Identity:
        """The identity of the order of rows: all that the order is a function of."""
        return self._progress.identity

    @property
    def epoch(self) -> int:
        """The current epoch; if worker processes of another DataLoader read, the epoch that they read."""
        read = self._shared.epoch if self._shared.has_begun else None
        return self._progress.epoch if read is None else read

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the current one, from its start; nothing happens if it is already, even in its middle.

        If worker processes of another DataLoader read, each of their iterations is of the epoch that was set last:
        call it before each.
        """
        epoch = integer("epoch", epoch)
        if epoch != self._progress.epoch or self._shared.has_begun:
            self._go_to(epoch)

    def rewind(self) -> None:
        """Begin the current epoch again."""
        self._go_to(self.epoch)

    def _go_to(self, epoch: int) -> None:
        self._progress.begin_epoch(epoch)
        self._shared.go_to(epoch)

    @property
    def row_filter(self) -> RowFilter | None:
        """The filter, as it was understood; None: every row is read."""
        return self._versions.at_hand.row_filter

    @property
    def selection(self) -> RowSelection | None:
        """The rows that the filter keeps of each row group, or the tokens that are packed; None without either. Counted
        now, if not before.

        The first rank of a job that asks counts, and the others wait for its counts.
        """
        return self._versions.at_hand.selection

    # --- iteration

    def _move(self) -> None:
        """Go on with the newest version when an epoch begins (``on_new_version="next_epoch"``); collective."""
        self._versions.move(explicit=self._explicit_rank, dp_group=self._dp_group)

    def _through(self, first: Generator[Any], more: Callable[[], Generator[Any]]) -> Generator[Any]:
        """Return the items of the current tranche, ``first``, and of each later one, as ``more`` delivers it.

        Between two tranches, all ranks wait until there is another one; after the last rows that fill no step, they
        look once.
        """
        return first if self.follow is None else self._tranches(first, more)

    def _tranches(self, first: Iterator[Any], more: Callable[[], Iterator[Any]]) -> Generator[Any]:
        yield from first
        waits = True
        while self._versions.go_over(waits=waits, explicit=self._explicit_rank, dp_group=self._dp_group):
            yield from more()
            waits = self._progress.identity.tail != "short"
        self._progress.deliveries.end()

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        rank, world_size = self.topology
        self._read_ahead = check_dealers((rank, world_size), at_start=self._progress.at_start)
        if worker is not None:
            self._versions.check_worker()
            check_no_workers(self.yields_many)
            return Items(
                self._turns.iterate(
                    self._shared,
                    worker.seed - worker.id,
                    worker=worker.id,
                    workers=worker.num_workers,
                    rank=rank,
                    world_size=world_size,
                )
            )
        return self._read_here()

    def _reading(self, rank: int) -> Iterator[Any]:
        feed = feed_of(self._source, self._progress, rank)
        return super()._reading(rank) if feed is None else feed.in_process()

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the reader state of all that was yielded (plain types).

        In a worker of another DataLoader (torchdata's StatefulDataLoader asks there) it is that worker's part.
        Raises StateUnavailable in the main process if workers have read ahead: what the loop received is not known
        there. Use `lakeckpt.LakeLoader`, or torchdata's StatefulDataLoader.
        """
        if get_worker_info() is not None:
            return self._turns.state_dict()
        _, world_size = self.topology
        if self._read_ahead:
            raise StateUnavailable(
                f"this dataset is read by accelerate's {self._read_ahead}, which is a batch ahead of the loop: what "
                "the loop received is not known here. Use lakeckpt.LakeLoader(dataset) with accelerator.prepare, and "
                "call state_dict() of the loader."
            )
        if self._shared.has_begun:
            raise StateUnavailable(
                "this dataset is read by worker processes of a torch DataLoader, which read ahead of the loop: the "
                "main process does not know what the loop received. Use lakeckpt.LakeLoader(dataset, num_workers=…) or "
                "torchdata's StatefulDataLoader, and call state_dict() of the loader."
            )
        if not self._progress.begun:
            return self._progress.settled(world_size, 0).to_plain()
        self._progress.settle(world_size, 0)
        return self._progress.state.to_plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state`` at the next iteration; StateError, without a change, if it does not fit."""
        if isinstance(state, Mapping) and state.get("format") == WORKER_FORMAT:
            self._turns.load(state)
            return
        found = self._progress.read(state)
        self._progress.load(found)
        self._read_ahead = ""
        at_end = found.held is None and Plan(found).at_end
        self._shared.go_to(found.epoch + at_end, inside=not (at_end or self._progress.at_start))

    def __len__(self) -> int:
        """Return the number of items of this rank in the current epoch: micro-batches, or rows in row-wise use.

        `TypeError` for an endless stream, and on one of several ranks while the number of lanes is not known.
        """
        check_not_sampled()
        rank, world_size = self.topology
        if self._progress.identity.endless or self.follow is not None:
            raise TypeError("an endless stream has no length")
        if self.yields_many:
            raise TypeError("how many micro-batches there are depends on what the transform yields, and is not known")
        state = self._progress.settled(world_size, 0)
        if state.segment.world_size == world_size:  # else the end of an epoch, which other ranks came to
            if world_size > 1 and not self._progress.knows_lanes(world_size) and not self._shared.has_lanes:
                raise TypeError(
                    "how many micro-batches a rank gets depends on the number of lanes, which ranks must have the "
                    "same: before the first iteration it is not known how many workers there will be. Give "
                    "options=ReadOptions(num_lanes=…), a multiple of ranks times workers, or take the length of a "
                    "LakeLoader, or ask after iterating began"
                )
            lanes = self._shared.agree_lanes(state.segment.num_lanes)
            state = self._progress.settled(world_size, 0, num_lanes=lanes)
        plan = Plan(state)
        assert plan.steps is not None
        last, rank = plan.steps - 1, min(rank, state.segment.world_size - 1)
        return plan.steps - (self.row_wise and last >= 0 and not plan.assignment(last, rank).receipt.rows)


def _checked(options: ReadOptions | None) -> ReadOptions:
    if options is None:
        return ReadOptions()
    if not isinstance(options, ReadOptions):
        raise ConfigError(f"options= takes a lakeckpt.ReadOptions, got {type(options).__name__}")
    return options
