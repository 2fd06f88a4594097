"""This module persists the cuts of one rank from its arena to storage, on the thread that calls `Persister.run`.

It takes the trainer's orders one after the other: it locks the generation, agrees with the other ranks through records
in storage, writes its share, and commits or waits for the commit. Rank 0 leads: it takes the newest order, and writes a
note for each order that it skips; the other ranks take their orders in sequence and read these notes. A store that
fails is tried again until a newer order waits or the time is over. Training never waits for any of this. While there is
nothing to persist, the thread takes the checksums of the newest cut.

If the trainer dies, the save under way is finished, and then the final save is made: the newest cut that all ranks
have complete is persisted, if it is newer than the newest commit. Nothing is written into a run that somebody has
removed. Imports without torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from lakeckpt.checkpoint.agent.final_save import FINAL, agree_on_final_save, final_folder
from lakeckpt.checkpoint.agent.frozen import FrozenTensors
from lakeckpt.checkpoint.agent.generations import Generations
from lakeckpt.checkpoint.agent.orders import Bye, Message, Order, Outcome, TableDocuments
from lakeckpt.checkpoint.agent.retrying import RetryingStorage
from lakeckpt.checkpoint.arena.arena import HeldGeneration
from lakeckpt.checkpoint.arena.checksums import checked
from lakeckpt.checkpoint.arena.contents import Contents, contents_of
from lakeckpt.checkpoint.consumed.pending import pending_from_bytes
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.manifest import CheckpointInfo, Manifest
from lakeckpt.checkpoint.format.parts import SaveId
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.failures import publish_failure, refuse_failed, save_failed
from lakeckpt.checkpoint.persist.publish import Publisher, Settings
from lakeckpt.checkpoint.persist.records import RecordTalk
from lakeckpt.checkpoint.state.staged import Staged, StagedCut, StagedTensor, StagedTree
from lakeckpt.errors import ArenaError, LakeckptError, SaveFailed, SaveSkipped, StorageError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.notes import save_error
from lakeckpt.tracking.obstacles import Obstacle, Obstacles
from lakeckpt.tracking.waiting import Waiter

__all__ = ["Persister"]

_LOOK_S = 0.25
"""How often the arena is looked at for a cut without checksums."""


class Persister:
    """Persists cuts out of ``generations``. ``report`` gets the outcome of each order, on the thread of `run`.

    ``linger_s``: how much longer than a save the final save waits for other ranks, whose trainers may die later. Any
    thread may call `take`; one thread calls `run`.
    """

    def __init__(
        self,
        storage: Storage,
        generations: Generations,
        attempt: Attempt,
        *,
        rank: int,
        world_size: int,
        settings: Settings,
        waiter: Waiter,
        report: Callable[[Outcome], None],
        log: Callable[[str], None] = lambda text: None,
        linger_s: float = 0.0,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.ordered = 0
        """The newest optimizer step of an order."""
        self._generations = generations
        self._settings = settings
        self._waiter = waiter
        self._obstacles = Obstacles()  # as the trainer passes them on
        self._report = report
        self._log = log
        self._linger_s = linger_s
        self._storage = RetryingStorage(
            storage,
            waiter=self._waiter,
            is_hopeless=self._is_hopeless,
            failing=lambda error: log(f"storage fails, and is tried again: {error}"),
        )
        self._publisher = Publisher(
            self._storage,
            attempt,
            rank=rank,
            world_size=world_size,
            settings=settings,
            waiter=self._waiter,
            refuse=self._refuse,
            tell=self._tell,
            still=self._refuse_pointless,
        )
        self._changed = threading.Condition()
        self._waiting: list[Order] = []
        self._tables: list[Mapping[str, bytes]] = []  # documents of tables; all but the newest are not written yet
        self._bye: Bye | None = None
        self._order: Order | None = None  # the order under way
        self._until_s = float("inf")
        self._frozen = FrozenTensors()

    def take(self, message: Message) -> None:
        """Take a message of the trainer. `run` ends after a `Bye`; a second `Bye` changes nothing."""
        with self._changed:
            if isinstance(message, Order):
                assert message.number < FINAL, f"an attempt has at most {FINAL} saves: start the job again"
                self._waiting.append(message)
                self.ordered = max(self.ordered, message.step)
            elif isinstance(message, TableDocuments):
                self._tables.append(message.data)
            elif isinstance(message, Obstacle):
                self._obstacles.take(message)
            elif isinstance(message, Bye):
                self._bye = self._bye or message
            self._changed.notify_all()

    @property
    def recorded(self) -> int:
        """The optimizer step of the newest commit that is known here."""
        return self._publisher.attempt.recorded

    def run(self) -> None:
        """Persist what is ordered until the trainer has ended, and then make the final save if the trainer died."""
        while (taken := self._next()) is not None:
            self._limit_time()
            self._do(*taken)
        if self.is_final:
            self._limit_time()
            try:
                self._save_finally()
            except LakeckptError as error:  # only the log is left to report it to
                self._log(f"the final save was not made: {error.kind}: {error}")

    @property
    def is_final(self) -> bool:
        """True if the trainer died, so that the final save is made."""
        return self._bye is not None and not self._bye.well

    def _next(self) -> tuple[Order, Sequence[Order]] | None:
        """Return the order to do next, and the orders that are skipped for it; None if nothing is left to do."""
        while not self._has_work(_LOOK_S):
            self._take_checksums()
        with self._changed:
            waiting, self._waiting = self._waiting, []
            if not waiting or self.is_final:  # the final save is newer than what the trainer ordered
                return None
            if self.rank == 0:
                return waiting[-1], waiting[:-1]
            self._waiting = waiting[1:]
            return waiting[0], ()

    def _has_work(self, timeout_s: float = 0.0) -> bool:
        """Wait until there is an order, or the trainer has ended, at most ``timeout_s``. Returns whether that is so."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._waiting or self._bye, timeout_s))

    def _take_checksums(self) -> None:
        """Take the checksums of the newest generation, until there is something else to do."""
        with contextlib.suppress(ArenaError, OSError):  # a save, or a restore, reports what is wrong
            self._generations.look_over(lambda: not self._has_work())

    def _limit_time(self) -> None:
        """Begin to count the time of a save. The other ranks wait for this rank as long as a save may take, and have to
        learn before that why its save fails."""
        self._until_s = self._waiter.now() + self._settings.timeout_s / (1 if self.world_size == 1 else 2)

    def _is_hopeless(self) -> bool:
        with self._changed:
            is_over = bool(self._waiting) or self._waiter.now() >= self._until_s
            return is_over or (self._order is not None and self._is_dropped(self._order))

    def _save_of(self, order: Order) -> SaveId:
        return SaveId(attempt=self._publisher.attempt.number, step=order.step, number=order.number)

    # --- orders

    def _do(self, order: Order, skipped: Sequence[Order] = ()) -> None:
        begun_s = self._waiter.now()
        self._order = order
        with contextlib.ExitStack() as stack:
            held = self._hold(order, stack)  # before any request: newer cuts take the place of this one meanwhile
            for one in skipped:
                self._skip(one)
            found: Manifest | Exception
            try:
                found = self._persisted(order, held)
            except Exception as error:
                found = save_failed(str(error), error) if isinstance(error, OSError) else error
                self._note(order, found)
        self._order = None
        self._report_outcome(order, found, self._waiter.now() - begun_s)

    def _hold(self, order: Order, stack: contextlib.ExitStack) -> HeldGeneration | Exception | None:
        """Return the locked generation, None if there is none, or the error for which it cannot be locked."""
        try:
            return stack.enter_context(self._generations.hold(self._save_of(order).cut))
        except Exception as error:
            return error

    def _skip(self, order: Order) -> None:
        """Report an order that is skipped for a newer order, after a note to the ranks that take it in sequence."""
        error: LakeckptError = SaveSkipped(f"step {order.step} was skipped: a newer cut waits to be persisted")
        try:
            self._refuse_pointless()
            if not self._tell(self._save_of(order), error):
                error = SaveFailed(f"step {order.step} was skipped for a newer cut, and the store takes no note of it")
        except LakeckptError as refused:
            error = refused
        self._report_outcome(order, error, 0.0)

    def _note(self, order: Order, error: Exception) -> None:
        """Write why this rank dropped a save, if the agents of other ranks may not know it yet. If the store
        takes no note, the trainers report the error to each other, and pass it on to their agents."""
        is_stores = any(isinstance(one, StorageError) for one in (error, error.__cause__))
        is_trainers = bool(order.failure) or self._is_dropped(order)
        if is_stores or is_trainers or not isinstance(error, LakeckptError):
            self._tell(self._save_of(order), error)

    def _tell(self, save: SaveId, error: Exception) -> bool:
        """Leave a note to the agents of other ranks. Return whether they can know of the failure."""
        return self.world_size == 1 or publish_failure(self._storage, save, self.rank, error)

    def _persisted(self, order: Order, held: HeldGeneration | Exception | None) -> Manifest:
        self._publisher.tip.catch_up()  # an agent before this one may have committed and not reported
        if order.failure:
            raise save_error(order.failure)
        self._obstacles.refuse(order.number)
        self._refuse_pointless()
        try:
            taken: StagedCut | Exception = self._staged(order, held)
        except Exception as error:
            taken = error
        talk = RecordTalk(
            self._storage,
            self._save_of(order),
            rank=self.rank,
            world_size=self.world_size,
            waiter=self._waiter,
            timeout_s=self._settings.timeout_s,
            obstacles=partial(self._refuse_over, self._save_of(order)),
        )
        try:
            self._write_documents()
        except StorageError as error:
            text = f"the index of a table, which a checkpoint refers to, was not written: {error}"
            taken = save_failed(text, error)
        return self._publisher.publish(self._save_of(order), taken, talk)

    def _write_documents(self) -> None:
        """Write the documents of tables that the run lacks, before a commit refers to them."""
        with self._changed:
            tables = list(self._tables)
        for path, data in {path: data for one in tables for path, data in one.items()}.items():
            if not self._storage.list(path):
                self._storage.put(path, [data])
        with self._changed:
            del self._tables[: len(tables) - 1]

    def _staged(self, order: Order, held: HeldGeneration | Exception | None) -> StagedCut:
        """Return the cut to publish. Raises why there is none."""
        if isinstance(held, Exception):
            raise held
        if held is not None:
            contents = checked(contents_of(held))
            staged = _staged(contents, order)
            self._frozen.compare(contents.documents.frozen, staged.staged.tensors)
            return staged
        if not self._generations.steps():
            raise SaveFailed(
                f"step {order.step} was not saved: nothing that rank {self.rank} has captured is in memory any more: "
                "its arena was removed, or all of its captures were dropped"
            )
        raise SaveSkipped(
            f"step {order.step} was skipped: rank {self.rank} had not captured it, or newer cuts took its place while "
            "an earlier one was persisted"
        )

    # --- when to stop

    def _is_dropped(self, order: Order) -> bool:
        """Return whether the trainer has passed on why the save of ``order`` cannot be made."""
        return self._obstacles.of_save(order.number) is not None

    def _refuse_pointless(self) -> None:
        """Raise if the trainer has ended and nobody needs a commit. Either the run was removed, and the agent must
        not write it again, or another attempt has begun. The agents of other ranks may be dead, and send nothing."""
        if self._bye is None:
            return
        if lost := self._publisher.tip.lost():
            found = lost.partition(":")[0]
            raise SaveFailed(
                f"nothing was saved of a run that was removed: {found}. What was captured stays in memory, in case its "
                "storage comes back; lakeckpt doctor removes it"
            )
        with contextlib.suppress(StorageError):
            self._publisher.tip.catch_up()

    def _refuse(self, save: SaveId) -> None:
        """Raise why it is in vain to wait for other ranks in ``save``, if it is: as the trainer or an agent says, or as
        this agent sees."""
        self._obstacles.refuse(save.number)
        if self.world_size > 1:
            refuse_failed(self._storage, save, self.rank)
        self._refuse_pointless()

    def _refuse_over(self, save: SaveId) -> None:
        """Raise as `_refuse` does, and if the other ranks may have no such order: their trainers died before they sent
        it."""
        self._refuse(save)
        is_over = self.is_final and save.number != FINAL
        if is_over and self._storage.list(final_folder(save.attempt)):
            raise SaveFailed(f"the save of step {save.step} was begun by some ranks only before their trainers died")

    # --- outcomes

    def _report_outcome(self, order: Order, found: Manifest | Exception, took_s: float) -> None:
        outcome = Outcome(step=order.step, number=order.number, took_s=took_s)
        if isinstance(found, Manifest):
            came = f"committed in slot {found.slot}"
            remarks = replace(self._publisher.remarks, changed=self._frozen.adopt())
            outcome = replace(outcome, info=CheckpointInfo.of(found), remarks=remarks)
        else:
            kind = found.kind if isinstance(found, LakeckptError) else SaveFailed.kind
            text = str(found) if isinstance(found, LakeckptError) else repr(found)
            came, outcome = f"{kind}: {text}", replace(outcome, kind=kind, text=text)
        self._log(f"step {order.step}: {came} ({took_s:.1f} s)")
        if outcome.remarks.unpruned:
            self._log(f"checkpoints that are not to be kept could not be removed: {outcome.remarks.unpruned}")
        if outcome.remarks.lost:
            self._log(f"damage in the run: {outcome.remarks.lost}")
        self._report(outcome)

    # --- the final save

    def _save_finally(self) -> None:
        attempt = self._publisher.attempt
        self._obstacles.clear()  # they are of trainers' saves, and no trainer takes part in this one
        self._publisher.tip.catch_up()
        self._refuse_pointless()
        self._until_s += self._linger_s
        step = agree_on_final_save(
            self._storage,
            attempt.number,
            {cut: digest for cut, digest in self._generations.cuts().items() if cut.attempt == attempt.number},
            attempt.recorded,
            rank=self.rank,
            world_size=self.world_size,
            waiter=self._waiter,
            timeout_s=self._settings.timeout_s,
            linger_s=self._linger_s,
            obstacles=self._refuse_pointless,
        )
        self._limit_time()
        if step is None:
            self._log("no cut of all ranks is newer than the newest commit")
        else:
            self._do(Order(step=step, number=FINAL))


def _staged(contents: Contents, order: Order) -> StagedCut:
    """Return a generation with its digests. It is verified while it is written."""
    view, leaves = contents.held.view, contents.leaves()
    tensors = {
        key: StagedTensor(spec=one.spec, data=view(one.start, one.stop), leaves=leaves[key])
        for key, one in contents.documents.table.places.items()
    }
    trees = {
        item: StagedTree(item=item, document=document, digest=short_digest(document))
        for item, document in contents.documents.trees.items()
    }
    return StagedCut(
        step=order.step,
        staged=Staged(tensors=tensors, trees=trees),
        readers={name: pending_from_bytes(data) for name, data in contents.documents.readers.items()},
        metric=order.metric,
        waits=order.waits,
        sums=contents.documents.sums,
        intact=contents.verify,
    )
