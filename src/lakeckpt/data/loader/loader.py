"""This module defines `LakeLoader`: batches, receipts, and a state of what the training loop received.

The main process plans: it deals assignments to this rank's loader workers, and counts a batch when the loop gets it.
Workers (if any) only read. So the state is exact whatever has been read ahead, the order does not depend on the number
of workers, and a loader saved with four workers goes on with none.

Worker processes are those of a torch DataLoader inside (`lakeckpt.data.workers.pool`). A checkpoint manager sees a
loader by `lakeckpt.data.position.reader`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Never

import torch
from torch.utils.data import DataLoader

from lakeckpt.core.hashing import derive_key
from lakeckpt.core.identity import Identity
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.streams.mixed_batches import AnyReceipt
from lakeckpt.data.base.batch import Received, Stage, checked_number_column, numbered, pinned
from lakeckpt.data.base.options import check_only_reader, flag, integer, optional, refuse
from lakeckpt.data.base.source import Items, gives
from lakeckpt.data.dataset.base_dataset import BaseDataset, shown_loader
from lakeckpt.data.dataset.dataset import LakeDataset
from lakeckpt.data.dataset.frameworks import (
    EpochSetter,
    Prepared,
    check_counted,
    check_not_fetched_ahead,
    counts_steps,
    without_others,
)
from lakeckpt.data.dataset.source_kinds import feed_of
from lakeckpt.data.loader.counting import Counting
from lakeckpt.data.position.reader import LoaderReader
from lakeckpt.data.streams.mix import MixedDataset
from lakeckpt.data.workers.pool import Workers
from lakeckpt.data.workers.reader import Beginning
from lakeckpt.errors import ConfigError, StateUnavailable
from lakeckpt.lake.table.table import Table

__all__ = ["LakeLoader"]

_RESTARTS = "a LakeLoader with restart=True begins anew in each iteration: it has no state"


class LakeLoader(Prepared, DataLoader[Any]):
    """Iterates a `LakeDataset`, exactly: a torch DataLoader with ``state_dict`` and ``load_state_dict``.

    Args:
        dataset: what to read, which makes the micro-batches itself (so the loader's own ``batch_size`` is None).
        num_workers: worker processes. Decoding releases the GIL, so 0 is right unless a transform costs much Python.
        pin_memory: copy tensors into pinned memory (needs an accelerator).
        prefetch_factor: micro-batches that each worker may have ahead of the loop; None: two groups of them. A group
            is what a worker reads in 50 ms: up to 512 micro-batches, or 16 MiB, and one at least.
        persistent_workers: keep workers from one iteration to the next.
        multiprocessing_context: ``"fork"``, ``"spawn"``, ``"forkserver"``, or a context; None: ``"forkserver"`` if
            the table lies in an object store, torch's default otherwise. A worker that is not forked gets the transform
            pickled.
        timeout: seconds to wait for a worker, then WorkerTimeout; 0: for ever.
        worker_init_fn: called in each worker with its number before it reads.
        restart: begin at the first batch of the epoch in each iteration, as a loader for validation does. The epoch
            stays the same until `set_epoch`; such a loader has no state to save. False: an iteration goes on where the
            last one stopped.
        receipt_column: a name under which each batch (a dict) also holds an ``int`` that names it. It survives what
            rebuilds the dict or moves its tensors: give it to ``manager.step`` if the receipt is lost. None: no
            batch holds one. Needs a ``batch_size``.
        generator: draws the base seed of worker processes (it never changes the order of rows). None: a generator of
            the loader's own, seeded by the dataset's seed and the current place, so that neither iterating nor resuming
            draws from torch's global stream.

    One iteration is one epoch, the next one the next epoch. After a ``break`` the next iteration goes on with what had
    not been delivered; `rewind` begins the epoch again, and `peek` looks at the next batch without taking it.

    From a worker a micro-batch comes through shared memory, as views, without a copy in the main process: tensors,
    arrays, Arrow tables, `Batch`, `Ragged`, and dicts, lists and tuples of them. A transform may return anything else
    that can be pickled, which costs what pickling costs. A worker that dies while it reads is an error, WorkerDied,
    within five seconds; a worker that dies between two iterations (``persistent_workers``) is replaced.
    """

    dataset: Any
    __repr__ = shown_loader

    def __init__(
        self,
        dataset: LakeDataset | MixedDataset,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: torch.Generator | None = None,
        receipt_column: str | None = None,
        restart: bool = False,
        **others: Never,
    ) -> None:
        refuse(others)
        if not isinstance(dataset, BaseDataset):
            raise ConfigError(f"LakeLoader reads a lakeckpt.LakeDataset, got {type(dataset).__name__}")
        options: dict[str, Any] = {
            "num_workers": integer("num_workers", num_workers),
            "pin_memory": pin_memory,
            "prefetch_factor": optional("prefetch_factor", prefetch_factor),
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "generator": generator,
        }
        try:
            super().__init__(dataset, batch_size=None, **options)
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from error
        self._restarts = dataset.epoch if flag("restart", restart) else None
        """The epoch of every iteration of a loader that restarts; None: it goes on."""
        if restart and (dataset.follow is not None or dataset._progress.is_endless):
            raise ConfigError("restart=True begins an epoch again, and an endless stream has no epochs")
        if restart:
            dataset._progress.deliveries.saved()  # its place is never saved, and that is no reason to warn
        check_only_reader(dataset, self, restarts=restart)
        self.use_stateful_dataloader = not restart
        object.__setattr__(self, "sampler", EpochSetter(self._framework_epoch))  # torch's own refuses another one
        self._progress = dataset._progress
        self._counting = Counting()
        self._row_wise = dataset.row_wise
        self.receipt_column = checked_number_column(receipt_column, row_wise=self._row_wise)
        self._own_generator = torch.Generator() if generator is None else None
        self._ahead = options["prefetch_factor"]
        self._workers: Workers | None = None
        self._workers_started: tuple[str, int] = "", 0
        """(digest of the table version that they read, process that started them)."""
        self._early: tuple[Any, Iterator[Received]] | None = None
        self._waiting: int | None = None
        """The newest iteration."""
        self._follows: int | None = None
        """An iteration that a framework sent to another epoch before anything was asked of it."""
        self._before_more: Callable[[], None] | None = None
        """Called when the loop asks for more, or goes to another epoch: what it did with the last batch is done."""

    # --- what is asked

    @property
    def table(self) -> Table:
        """The table that is read."""
        return self.dataset.table  # type: ignore[no-any-return]

    @property
    def identity(self) -> Identity:
        """The identity of the order of rows: all that the order is a function of."""
        return self._progress.identity

    @property
    def topology(self) -> tuple[int, int]:
        """(data-parallel rank, number of data-parallel ranks)."""
        return self.dataset.topology  # type: ignore[no-any-return]

    @property
    def epoch(self) -> int:
        """The current epoch: where `restore` or the last complete iteration left off."""
        return self._progress.epoch if self._restarts is None else self._restarts

    @property
    def last_receipt(self) -> Receipt | None:
        """The receipt of what the loop received last; None before the first batch and after loading a state."""
        return self._progress.last_receipt

    def __len__(self) -> int:
        """Return the number of steps of this rank in the current epoch (row-wise: rows)."""
        self._settle()
        return len(self.dataset)

    # --- iteration

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._iterate(None)

    def _iterate(self, stage: Stage | None) -> Iterator[Any]:
        """An iterator over what is left of the epoch; ``stage`` holds batches back on their way to the loop."""
        self._turn()
        started, self._early = self._early, None
        # If a persistent worker has died since, other workers read what it would have read.
        is_dead = self._workers is not None and self._workers_started[1] == os.getpid() and not self._workers.alive
        if started is None or is_dead or started[0] != self._place():
            del started  # before what it reads ahead is read otherwise
            started = self._begun()
        self._waiting = waiting = self._progress.begin_iteration()
        items = self._deliver(waiting, started[1], stage)
        items = self.dataset._through(items, lambda: self._deliver(waiting, self._begun()[1], stage))
        return Items(self._as_prepared(items, self._progress.steps) if self._is_prepared else items)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_early": None, "_workers": None, "_before_more": None, "_counting": Counting()}

    def _start(self) -> None:
        """Begin to read what the next iteration will deliver, within the memory limit of iterating."""
        self._settle()
        if self._early is None or self._early[0] != self._place():
            self._early = None
            self._early = self._begun()

    def peek(self) -> Any:
        """Return the batch that the next iteration begins with, and count nothing; None if the epoch has none.

        The next iteration delivers the same batch again, without its ``receipt_column``'s number here. An iterator that
        was begun before is out of date. Call it on every rank alike. Raises what reading raises.
        """
        self._turn()
        self._start()
        assert self._early is not None
        place, found = self._early
        self._early = None  # after an error, the next iteration begins to read anew
        self._progress.begin_iteration()
        held = []
        for receipt, batch in found:
            held.append((receipt, batch))
            if gives(receipt, self._row_wise):
                self._early = place, itertools.chain(held, found)
                return batch
        return None

    def _turn(self) -> None:
        """End an epoch that was received, and go on with the newest version of the table when another one begins."""
        if self._restarts is not None:
            self._progress.runs.mark(None)
            self.dataset._go_to(self.epoch)
        self._progress.turn(self.topology[0])
        self.dataset._move()
        self._settle()

    def _begun(self) -> tuple[Any, Iterator[Received]]:
        """Return the place where the next iteration begins, and what it will deliver, which is read from now on."""
        self._seed_workers(rank := self.topology[0])
        return self._place(), self._found(rank)

    def _place(self) -> Any:
        return self._progress.state, self.topology, os.getpid()

    def _seed_workers(self, rank: int) -> None:
        """Seed the generator that this iteration's workers get their seeds from, unless it is the user's."""
        if self._own_generator is not None:
            place = self._progress.state
            word, _ = derive_key("workers", self._progress.seed, place.epoch, place.step, rank)
            self._own_generator.manual_seed(word >> 1)

    def _found(self, rank: int) -> Iterator[Received]:
        """Return what is left of the epoch, which is read ahead from now on."""
        found: Iterator[Received]
        if self.num_workers:
            progress = self._progress
            feed = feed_of(self.dataset._source, progress, rank)
            read = self._counting.reads(self._started()).read
            beginning = Beginning(state=progress.state, rank=rank)
            found = (
                self.dataset._completed(read(progress.assignments(rank), beginning))
                if feed is None
                else feed.of_workers(self.num_workers, read, beginning)
            )
            return found
        found = self._counting.reads(self.dataset._reading(rank))
        pins = self.pin_memory and torch.accelerator.is_available()
        return ((receipt, pinned(batch)) for receipt, batch in found) if pins else found

    def _started(self) -> Workers:
        """Workers for one iteration, or those that live on and read the current version of the table."""
        started = self.dataset._version, os.getpid()
        if self._workers is not None:
            if self._workers_started == started and self._workers.alive:
                return self._workers
            self._workers.close()
            self._workers = None
        workers = Workers(
            self.dataset,
            self.dataset._source,
            storage=self.table.storage,
            num_workers=self.num_workers,
            multiprocessing_context=self.multiprocessing_context,
            worker_init_fn=self.worker_init_fn,
            prefetch_factor=self._ahead,
            timeout=self.timeout,
            memory_limit_bytes=self.dataset._source.memory_limit_bytes,
            pin_memory=self.pin_memory,
            persistent_workers=self.persistent_workers,
            generator=self._own_generator or self.generator,
        )
        if self.persistent_workers:
            self._workers, self._workers_started = workers, started
        return workers

    def _deliver(self, iteration: int, found: Iterator[Received], stage: Stage | None) -> Generator[Any]:
        progress = self._progress
        if iteration == self._follows:
            self._settle()
            iteration, found = progress.begin_iteration(), self._begun()[1]
        # Checked before anything is taken: with persistent workers a newer iterator goes on with them.
        progress.check(iteration)
        step, replanned = progress.state.step, progress.replanned
        found = found if stage is None else stage(found)
        counters = self._counting.begin(self.dataset)
        progress.deliveries.waits()
        while (pulled := counters.pull(found)) is not None:
            receipt, batch = pulled
            self.dataset._carried.check(batch, receipt)
            if gives(receipt, self._row_wise):
                progress.check(iteration)
                item = batch if self.receipt_column is None else numbered(batch, self.receipt_column, receipt.number)
                progress.delivered(receipt)
                counters.delivered(receipt.rows)
                yield item
                progress.deliveries.waits()
                if self._before_more is not None:
                    self._before_more()
            step = receipt.step + 1
            progress.check(iteration)
            if progress.replanned != replanned:
                replanned, again = progress.replanned, self._begun()[1]
                found = again if stage is None else stage(again)
        progress.end(step)

    def _settle(self) -> None:
        self._progress.settle(self.topology[1], self.num_workers)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the current one, from its start; nothing happens if it is already, even in its middle."""
        if epoch != self.epoch:
            self._early = None
            self.dataset.set_epoch(epoch)
            self._restarts = None if self._restarts is None else epoch

    def _framework_epoch(self, epoch: int) -> None:
        """Go to the epoch that a framework begins, if there are any; it may have asked for an iterator already."""
        if self._before_more is not None:
            self._before_more()
        if self.dataset.follow or epoch == self.epoch or self._progress.is_endless:
            return
        is_newest = self._progress.is_newest(self._waiting)
        self.set_epoch(epoch)
        if is_newest:
            self._follows = self._waiting

    def rewind(self) -> None:
        """Begin the current epoch again. The rows of its first part then count twice, and `lakeckpt audit` says so."""
        self._early = None
        self.dataset.rewind()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Give the sources of a `lakeckpt.mix`, each of which ``weights`` names, other weights from the next step on.
        Every rank must do so at the same step. Rows that were read ahead are read anew. Raises ConfigError, also for a
        mixture that is packed."""
        self._settle()
        self._progress.set_weights(weights)
        self._early = None

    def state_dict(self, at: AnyReceipt | None = None) -> dict[str, Any]:
        """Return the state of all that the loop has received, or of all up to the receipt ``at``.

        Plain types, the same on every rank in lockstep, without communication; valid before the first batch, after the
        last, and as often as wanted. Raises StateUnavailable for a receipt from before the last checkpoint, and of a
        loader with ``restart=True``.
        """
        self._check_goes_on()
        self._settle()
        if at is None and (self.dataset.follow or self._progress.is_endless or self.dataset.yields_many):
            check_not_fetched_ahead()
        return self._progress.at(at).to_plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state`` at the next iteration.

        Raises StateMismatch, without a change, if the state is of another order of rows; it says what differs.
        StateError if it is no state of a LakeLoader, or one that no job can be in.
        """
        self._check_goes_on()
        found, counts = self._progress.read(state), counts_steps()
        if counts and found.held is None:
            check_counted(found, self.topology[1])
        self._progress.load(found)
        self._early = None
        if counts:
            self._progress.turn(self.topology[0], loaded=True)

    @property
    def _reader(self) -> LoaderReader:
        """The side that checkpoint managers see (`lakeckpt.tracking.readers`); ConfigError if nothing is to save."""
        if self._restarts is not None:
            raise ConfigError(f"{_RESTARTS}, so leave it out of the manager's state")
        return LoaderReader(self)

    def _check_goes_on(self) -> None:
        if self._restarts is not None:
            raise StateUnavailable(_RESTARTS)


LakeLoader.__init__.__signature__ = without_others(LakeLoader.__init__)  # type: ignore[attr-defined]
