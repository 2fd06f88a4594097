"""What does a user swap in?  `LakeDataset`, a torch IterableDataset over a table.

Iterated in the main process, or by a `lakeckpt.LakeLoader`, it keeps one reader state for the whole job. Inside of the
workers of somebody else's DataLoader it reads what is theirs (`lakeckpt.data.worker_turns`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from lakeckpt.core.ends import Tail
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import Identity
from lakeckpt.data.ahead import Ahead
from lakeckpt.data.arguments import chosen_columns, flag, one_of, optional, positive, whole
from lakeckpt.data.carried_rows import CarriedRows
from lakeckpt.data.dealers import check_dealers
from lakeckpt.data.deliveries import Deliveries
from lakeckpt.data.epoch_file import EpochFile
from lakeckpt.data.identity import state_of_job
from lakeckpt.data.progress import Progress
from lakeckpt.data.skip_warning import skips_bad_row_groups, warn_of_skips
from lakeckpt.data.source import BatchSource, Output, items_of
from lakeckpt.data.topology import check_topology, resolve_topology
from lakeckpt.data.transform import Transform, bind_transform
from lakeckpt.data.versions import Pinning, Versions, check_moves
from lakeckpt.data.worker_place import WORKER_FORMAT
from lakeckpt.data.worker_turns import WorkerTurns
from lakeckpt.errors import ConfigError, StateUnavailable
from lakeckpt.lake.filters import Filters, RowFilter
from lakeckpt.lake.selection import RowSelection
from lakeckpt.lake.table import Table, open_table

__all__ = ["DEFAULT_BLOCK_SIZE", "DEFAULT_WINDOW", "LakeDataset"]

DEFAULT_BLOCK_SIZE = 1024
"""Rows that are read per visit to a lane in row-wise use."""

DEFAULT_WINDOW = 4
"""Row groups whose rows are permuted together."""


class LakeDataset(IterableDataset[Any]):
    """Rows of a table in a pure, deterministic order, micro-batch by micro-batch.

    Args:
        table: a `lakeckpt.Table`, or what `lakeckpt.open_table` takes.
        batch_size: rows per micro-batch; None yields single rows, for a DataLoader that batches them itself.
        columns: names of the columns to read, in the order wanted; None: all.
        filters: which rows to read: a pyarrow expression, ``[("a", ">", 3), ("b", "in", [...])]`` (all must hold), or a
            list of such lists (one must). Rows stay where it is true, and go where it is false or null. They are
            counted once, row group by row group, before the first iteration; positions count those that stay.
        shuffle: whether to permute row groups, and rows inside of windows, anew for every epoch.
        shuffle_window: row groups whose rows are permuted together. All lanes' windows are in memory at once.
        seed: any integer of 64 bits.
        num_lanes: lanes of an epoch (rounded up to a multiple of the ranks); None: ranks times max(1, workers) at the
            first start, then as the state has it. Micro-batches are the same for all numbers of ranks that divide it.
        tail: ``"short"``: every row counts, last micro-batches of a lane are smaller, every rank has the same number of
            steps. ``"drop"``: only full micro-batches (row-wise: ranks get equally many rows); the rest is dropped.
        endless: one iteration that never ends, over epoch borders, always full micro-batches.
        transform: called with each `Batch` (row-wise: each row; ``output="arrow"``: each pyarrow.Table) where it is
            read, in a worker if there are any; with a `lakeckpt.TransformContext` as well if it takes two arguments.
            It must keep nothing between calls: rows that it holds back for a later call count as consumed, and are lost
            when a run is restored. A warning says once where it returns another number of rows than it got.
        output: ``"torch"`` (tensors), ``"numpy"`` (arrays) or ``"arrow"`` (pyarrow.Table). Columns of varying length
            are `lakeckpt.Ragged`.
        nulls: ``"error"`` raises NullValueError on a null; ``"mask"`` puts a bool column ``<name>.is_null`` beside
            every nullable column. A null is never a silent zero.
        jagged: give lists of numbers as jagged nested tensors (torch output only).
        rank, world_size: the data-parallel rank and size; both or neither.
        dp_group: the data-parallel ProcessGroup or DeviceMesh, if it is not the default group.
        on_bad_row_group: ``"raise"`` raises DataFileDamaged where a row group cannot be decoded; ``"skip"`` goes on
            without its rows, as ``batch.receipt.skips`` and checkpoints then tell. Not for single rows.
        block_size: row-wise use: rows read per visit to a lane, so that decoding stays sequential.
        accept_changes: differences between a loaded state and this dataset to accept, of ``table`` (another listing of
            equally many rows), ``selection``, ``tail``.
        on_new_version: ``"keep"``: the version of the table that the dataset or its state names is read for ever.
            ``"next_epoch"``: each epoch is of the version that is the newest when it begins, on all ranks.
        on_version_gone: what restoring does in the midst of an epoch whose version is gone or was written again.
            ``"raise"``, or ``"next_epoch"``: give the rest of it up (`lakeckpt audit` says so) and begin the next one.
        storage_options: passed to the store, where ``table`` is not a `lakeckpt.Table`.
        progress: called as ``progress(row groups done, row groups)`` while the rows that a filter keeps are counted.
        memory_limit_bytes: what windows read ahead may take together with open ones, in each process (None: as many are
            read ahead as are open, two at least), and what loader workers delivered and the loop holds (None: 32 MiB
            each). The window that each lane is in is held whatever the limit: fewer lanes or a smaller
            ``shuffle_window`` take less. A quarter is for bytes fetched ahead from a store (at most 256 MiB).

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
        shuffle_window: int = DEFAULT_WINDOW,
        seed: int = 0,
        num_lanes: int | None = None,
        tail: Literal["short", "drop"] = "short",
        endless: bool = False,
        transform: Transform | None = None,
        output: Output = "torch",
        nulls: Literal["error", "mask"] = "error",
        jagged: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        dp_group: Any = None,
        on_bad_row_group: Literal["raise", "skip"] = "raise",
        block_size: int = DEFAULT_BLOCK_SIZE,
        accept_changes: Collection[str] = (),
        on_new_version: Literal["keep", "next_epoch"] = "keep",
        on_version_gone: Literal["raise", "next_epoch"] = "raise",
        storage_options: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        super().__init__()
        batch_size, num_lanes = optional("batch_size", batch_size), optional("num_lanes", num_lanes)
        block_size = positive("block_size", block_size)
        shuffle_window = positive("shuffle_window", shuffle_window)
        one_of("tail", tail, ("short", "drop"))
        one_of("output", output, ("torch", "numpy", "arrow"))
        one_of("nulls", nulls, ("error", "mask"))
        skips_bad = skips_bad_row_groups(on_bad_row_group, batch_size)
        if flag("jagged", jagged) and output != "torch":
            raise ConfigError(f'jagged=True gives nested tensors and needs output="torch", got output={output!r}')
        table = table if isinstance(table, Table) else open_table(table, storage_options=storage_options)
        check_moves(table, on_new_version=on_new_version, on_version_gone=on_version_gone, endless=endless)
        self.batch_size = batch_size
        self.columns = chosen_columns(table.schema, columns)
        self.row_wise = batch_size is None
        self.output: Output = output
        self.nulls: Literal["error", "mask"] = nulls
        self.has_transform = transform is not None
        self.block_size = block_size if batch_size is None else batch_size
        self._explicit_rank = check_topology(rank, world_size)
        self._dp_group = dp_group
        self._pickled_topology: tuple[int, int] | None = None
        try:
            window = shuffle_window if flag("shuffle", shuffle) else 1
            spec = OrderSpec(seed=whole("seed", seed), shuffle=shuffle, window=window)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if flag("endless", endless) and not table.num_rows:
            raise ConfigError("endless=True needs a table with at least one row, and this one has none")
        kind: Tail = tail
        if self.row_wise and not endless:
            kind = "even" if tail == "drop" else "rows"
        pinning = Pinning(
            columns=self.columns,
            nulls=None if output == "arrow" else nulls,
            filters=filters,
            counting=progress,
            spec=spec,
            tail=kind,
            endless=endless,
        )
        pinned = pinning.pin(table)
        self._source = BatchSource(
            table,
            columns=self.columns,
            spec=spec,
            output=output,
            nulls=nulls,
            jagged=jagged,
            transform=bind_transform(transform),
            row_wise=self.row_wise,
            selecting=pinned.selecting,
            skips_bad=skips_bad,
            memory_limit_bytes=optional("memory_limit_bytes", memory_limit_bytes),
        )
        self._progress = Progress(
            pinned.identity,
            batch_size=self.block_size,
            num_lanes=num_lanes,
            row_wise=self.row_wise,
            accept_changes=accept_changes,
            moves=on_new_version == "next_epoch",
        )
        self._versions = Versions(
            pinning,
            pinned,
            self._source,
            self._progress,
            on_new_version=on_new_version,
            on_version_gone=on_version_gone,
        )
        self._epochs = EpochFile()
        self._carried = CarriedRows(looks=self.has_transform and not self.row_wise)
        self._turns = WorkerTurns(self._source, self._progress, self._carried, row_wise=self.row_wise)
        self._read_ahead = ""

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned can ask neither torch.distributed nor the group, so it is told.
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
        """(data-parallel rank, number of data-parallel ranks); ConfigError where it cannot be known."""
        if get_worker_info() is not None and self._pickled_topology is not None:
            return self._pickled_topology
        return resolve_topology(self._explicit_rank, self._dp_group)

    @property
    def table(self) -> Table:
        """The table, at the version that is read."""
        return self._versions.at_hand.table

    @property
    def identity(self) -> Identity:
        """What the order of rows is a function of."""
        return self._progress.identity

    @property
    def deliveries(self) -> Deliveries:
        """What was given to whoever iterates it in this process, for checkpoint managers."""
        return self._progress.deliveries

    @property
    def epoch(self) -> int:
        """The epoch at hand; where worker processes of somebody else's DataLoader read, the one that they read last."""
        read = self._epochs.epoch(self.topology[0])
        return self._progress.epoch if read is None else read

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one at hand, from its start; nothing happens if it is already, even in its middle.

        Where worker processes of somebody else's DataLoader read, their next iteration begins at the start of
        ``epoch``.
        """
        epoch = whole("epoch", epoch)
        if epoch != self._progress.epoch or self._epochs.epoch(self.topology[0]) is not None:
            self._go_to(epoch)

    def rewind(self) -> None:
        """Begin the epoch at hand again."""
        self._go_to(self.epoch)

    def _go_to(self, epoch: int) -> None:
        self._progress.begin_epoch(epoch)
        self._epochs.go_to(self.topology[0], epoch, None)

    @property
    def row_filter(self) -> RowFilter | None:
        """The filter, as it was understood; None: every row is read."""
        return self._versions.at_hand.row_filter

    @property
    def selection(self) -> RowSelection | None:
        """The rows that the filter keeps of each row group; None without a filter. Counted now, if not before.

        The ranks of a job share the counting, whichever of them ask and whenever.
        """
        return self._versions.at_hand.selection

    def offer_selection(self, found: RowSelection) -> bool:
        """Take a selection that was saved for counted; tells whether it was needed, and is of this table and filter."""
        return self._versions.at_hand.offer(found)

    # --- iteration

    def move(self) -> None:
        """With ``on_new_version="next_epoch"``, where an epoch begins: go on with the newest version; collective.

        Whoever iterates the dataset does it.
        """
        self._versions.move(explicit=self._explicit_rank, dp_group=self._dp_group)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        rank, world_size = self.topology
        self._read_ahead = check_dealers((rank, world_size), at_start=self._progress.at_start)
        if worker is not None:
            self._versions.check_worker()
            return self._turns.iterate(
                self._epochs,
                worker.seed - worker.id,
                worker=worker.id,
                workers=worker.num_workers,
                rank=rank,
                world_size=world_size,
            )
        self._progress.turn(rank)
        self.move()
        self._progress.settle(world_size, 0)
        # Now, not when the first item is asked for: what changes the place in between puts this iterator out of date.
        return self._iterate(rank, self._progress.begin_iteration())

    def _iterate(self, rank: int, iteration: int) -> Iterator[Any]:
        progress = self._progress
        progress.check(iteration)
        step, skip = progress.state.step, progress.state.row
        for dealt, found in Ahead(self._source, progress.assignments(rank)):
            self._carried.check(found, dealt)
            for item, receipt in items_of(found, dealt, self.row_wise, skip):
                progress.check(iteration)
                if receipt.skips:
                    warn_of_skips(receipt, progress.skips)
                progress.delivered(receipt)
                yield item
            step, skip = dealt.step + 1, 0
            progress.check(iteration)
        progress.end(step)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the reader state of all that was yielded (plain types).

        In a worker of somebody else's DataLoader (torchdata's StatefulDataLoader asks there) it is that worker's part.
        Raises StateUnavailable in the main process where workers have read ahead: what the loop received is not known
        there. Use `lakeckpt.LakeLoader`, or torchdata's StatefulDataLoader.
        """
        if get_worker_info() is not None:
            return self._turns.state_dict()
        rank, world_size = self.topology
        if self._read_ahead:
            raise StateUnavailable(
                f"this dataset is read by accelerate's {self._read_ahead}, which is a batch ahead of the loop: what "
                "the loop received is not known here. Use lakeckpt.LakeLoader(dataset) with accelerator.prepare, and "
                "call state_dict() of the loader."
            )
        if self._epochs.epoch(rank) is not None:
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
        """Go on from ``state`` at the next iteration; StateError, without a change, where it does not fit."""
        if isinstance(state, Mapping) and state.get("format") == WORKER_FORMAT:
            self._turns.load(state)
            return
        self._progress.load(state_of_job(state))
        self._turns.load(None)
        self._read_ahead = ""
        self._epochs.go_to(self.topology[0], self._progress.epoch, dict(state))

    def __len__(self) -> int:
        """Return the number of items of this rank in the epoch at hand: micro-batches, or rows in row-wise use.

        `TypeError` for an endless stream, and on one of several ranks while the number of lanes is not known.
        """
        rank, world_size = self.topology
        if self._progress.identity.endless:
            raise TypeError("an endless stream has no length")
        if world_size > 1 and not self._progress.knows_lanes(world_size) and not self._epochs.has_lanes(rank):
            raise TypeError(
                "how many micro-batches a rank gets depends on the number of lanes, which ranks must have the same: "
                "before the first iteration it is not known how many workers there will be. Give LakeDataset num_lanes="
                ", a multiple of ranks times workers, or take the length of a LakeLoader, or after iterating began"
            )
        state = self._progress.settled(world_size, 0)
        if state.segment.world_size == world_size:  # else the end of an epoch, which other ranks came to
            lanes = self._epochs.agree_lanes(rank, state.segment.num_lanes)
            state = self._progress.settled(world_size, 0, num_lanes=lanes)
        if not self.row_wise:
            steps = Plan(state).steps
            assert steps is not None
            return steps
        rows, lanes = self._progress.identity.rows, state.segment.num_lanes
        if self._progress.identity.tail == "even":
            return rows // lanes * (lanes // world_size)
        return rows // world_size + (rank < rows % world_size)
