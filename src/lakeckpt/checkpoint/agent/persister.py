"""This module persists the cuts of one rank from its arena to storage, on one thread.

It takes the trainer's orders one after the other: it holds the generation, agrees with the other ranks through records
in storage, writes its share, and commits or waits for the commit. Rank 0 leads: it takes the newest order and writes a
note where it skips one; the other ranks take theirs in order and read its notes. A store that fails is tried again
until a newer order waits or the time is over. Training never waits for any of this.

Where the trainer dies, the save under way is finished, and then the final save is made: the newest cut that all ranks
have complete is persisted, if it is newer than the newest commit. It is not made into a run that somebody has removed.
Imports without torch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from lakeckpt.checkpoint.agent.final_save import FINAL, agree_on_final_save, final_folder
from lakeckpt.checkpoint.agent.generations import Generations
from lakeckpt.checkpoint.agent.orders import GivenUp, Order, Outcome
from lakeckpt.checkpoint.agent.retrying import RetryingStorage
from lakeckpt.checkpoint.arena.arena import Held
from lakeckpt.checkpoint.arena.contents import Contents, contents_of
from lakeckpt.checkpoint.consumed.pending import pending_from_bytes
from lakeckpt.checkpoint.failures import ListeningWaiter, error_said, gave_up, publish_failure
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import PARTS, SaveId
from lakeckpt.checkpoint.persist.attempt import Attempt
from lakeckpt.checkpoint.persist.publish import Publisher, Settings
from lakeckpt.checkpoint.persist.records import RecordTalk
from lakeckpt.checkpoint.state.staged import Staged, StagedCut, StagedTensor, StagedTree
from lakeckpt.errors import AttemptSuperseded, LakeckptError, SaveFailed, SaveSkipped, StorageError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.waiting import Waiter

__all__ = ["Persister", "chosen"]

_NOTE_THREADS = 8


def chosen(waiting: Sequence[Order], *, leads: bool) -> tuple[Order, tuple[Order, ...]]:
    """The order to do next, and those that are left out for it: the rank that leads takes the newest one."""
    return (waiting[-1], tuple(waiting[:-1])) if leads else (waiting[0], ())


class Persister:
    """Persists cuts out of ``generations``. ``report`` gets the outcome of each order, on a thread of the persister's.
    ``linger_s``: how much longer than a save the final save waits for other ranks, whose trainers may die later.

    `start` starts the thread; it ends when the trainer has gone (`leave`, `die`) and nothing is left to be done;
    `join` waits for that.
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
        self._generations = generations
        self._settings = settings
        self._waiter = ListeningWaiter(waiter, self._refuse_given_up_elsewhere)
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
            still=self._refuse_pointless,
        )
        self._documents: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._waiting: list[Order] = []
        self._order: Order | None = None  # the one at hand
        self._elsewhere: dict[tuple[int, int], str] = {}  # saves that other ranks gave up, and why
        self._left = self._died = False
        self._superseded: AttemptSuperseded | None = None
        self._caught_up = False  # with what an agent before this one has committed
        self._unsaid: dict[SaveId, tuple[Exception, float]] = {}  # saves that failed with the store, and until when
        self._until_s = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"lakeckpt-persister-{rank}", daemon=True)

    # --- what the trainer does

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def order(self, order: Order) -> None:
        """Persist the generation of ``order.step``, after those that were ordered before, or instead of them."""
        with self._changed:
            self._waiting.append(order)
            self._changed.notify_all()

    def give_up(self, save: GivenUp) -> None:
        """Another rank has given this save up."""
        with self._changed:
            self._elsewhere[save.step, save.number] = save.failure

    def keep(self, documents: Mapping[str, bytes]) -> None:
        """Have these written before the next commit of any cut."""
        with self._changed:
            self._documents |= documents

    def leave(self) -> None:
        """The trainer ends well: what is ordered is done, and then nothing more."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def die(self) -> None:
        """The trainer died: make the final save."""
        with self._changed:
            self._died = True
            self._changed.notify_all()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until all is done; False where it is not by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def recorded(self) -> int:
        """The optimizer step of the newest commit that is known here."""
        return self._publisher.attempt.recorded

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    # --- the thread

    def _run(self) -> None:
        self._begin_work()
        with contextlib.suppress(LakeckptError):  # it is looked for again with the first order, and told
            self._look_back()
        while (taken := self._next()) is not None:
            order, left_out = taken
            self._begin_work()
            self._do(order, left_out)
        if self._died and not self._left and self._superseded is None:
            self._begin_work()
            try:
                self._save_finally()
            except LakeckptError as error:  # there is nobody left to be told but the log
                self._log(f"the final save was not made: {error.kind}: {error}")

    def _next(self) -> tuple[Order, tuple[Order, ...]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._left or self._died)
            if self._died and not self._left:  # the final save is newer than what the trainer ordered
                self._documents |= {path: data for one in self._waiting for path, data in one.documents.items()}
                self._waiting = []
            if not self._waiting:
                return None
            order, left_out = chosen(self._waiting, leads=self.rank == 0)
            self._waiting = [one for one in self._waiting if one is not order and one not in left_out]
            self._documents |= {path: data for one in (*left_out, order) for path, data in one.documents.items()}
            return order, left_out

    def _begin_work(self) -> None:
        # The other ranks wait for this one as long as a save may take, and are to hear why it fails before that.
        self._until_s = self._waiter.now() + self._settings.timeout_s / (1 if self.world_size == 1 else 2)

    def _is_hopeless(self) -> bool:
        with self._changed:
            return bool(self._waiting) or self._waiter.now() >= self._until_s

    def _refuse_given_up_elsewhere(self) -> None:
        """Raise the error of another rank that has given up the save at hand, as this rank's trainer has heard."""
        order = self._order
        if order is None or threading.current_thread() is not self._thread:
            return
        failure = self._elsewhere.get((order.step, order.number))
        if failure is not None:
            raise error_said(failure)

    def _save_of(self, order: Order) -> SaveId:
        return SaveId(attempt=self._publisher.attempt.number, step=order.step, number=order.number)

    # --- orders

    def _look_back(self) -> None:
        """Catch up with what an agent before this one has committed and not reported. Raises `StorageError`."""
        if not self._caught_up and self._superseded is None:
            try:
                self._publisher.catch_up()
                self._caught_up = True
            except AttemptSuperseded as newer:
                self._superseded = newer

    @contextlib.contextmanager
    def _leaving_out(self, orders: Sequence[Order]) -> Iterator[None]:
        """Write a note for each of ``orders``, which are left out for another order, while that order is done: ranks
        that wait for one of them read its note."""
        removed: LakeckptError | None = None
        told: list[tuple[Order, LakeckptError, Future[bool] | None]] = []
        with ThreadPoolExecutor(_NOTE_THREADS, thread_name_prefix="lakeckpt-notes") as pool:
            try:
                if orders:
                    self._refuse_removed()
            except LakeckptError as refused:
                removed = refused
            for order in orders:
                save = self._save_of(order)
                error = removed or SaveSkipped(f"step {order.step} was left out: a newer cut waits to be persisted")
                note = None
                if removed is None and self.world_size > 1:  # alone, nobody reads it
                    note = pool.submit(publish_failure, self._storage, save, self.rank, error)
                told.append((order, error, note))
            pool.submit(self._tell_left_out, told)
            yield

    def _tell_left_out(self, told: Sequence[tuple[Order, LakeckptError, Future[bool] | None]]) -> None:
        """Report each when its note is written: without it the other ranks would wait for this rank."""
        for order, error, note in told:
            if note is not None and not note.result():
                self._unsaid[self._save_of(order)] = (error, self._waiter.now() + 2 * self._settings.timeout_s)
            self._tell(order, error, 0.0)

    def _do(self, order: Order, left_out: Sequence[Order] = ()) -> None:
        begun_s = self._waiter.now()
        self._order = order
        try:
            with contextlib.ExitStack() as stack:
                # Held before anything is asked of the store, as newer cuts take its place meanwhile.
                held = self._hold(order, stack)
                stack.enter_context(self._leaving_out(left_out))
                found: Manifest | Exception = self._persisted(order, held)
        except Exception as error:
            if isinstance(error, AttemptSuperseded):
                self._superseded = error
            if self.world_size > 1 and self._is_to_be_said(order, error):
                self._unsaid[self._save_of(order)] = (error, self._waiter.now() + 2 * self._settings.timeout_s)
                with contextlib.suppress(Exception):  # said before the next order, where the store does not take it
                    self._say_what_failed()
            found = error
        self._order = None
        self._elsewhere.pop((order.step, order.number), None)
        self._tell(order, found, self._waiter.now() - begun_s)

    def _is_to_be_said(self, order: Order, error: Exception) -> bool:
        """Whether the agents of other ranks may not have heard of this failure."""
        is_stores = any(isinstance(one, StorageError) for one in (error, error.__cause__))
        is_trainers = bool(order.failure) or (order.step, order.number) in self._elsewhere
        return is_stores or is_trainers or not isinstance(error, LakeckptError)

    def _say_what_failed(self) -> None:
        """Leave the notes that the store did not take as saves failed, for as long as other ranks may wait for this
        one's part: else they would, though the store works again."""
        for save, (error, until_s) in list(self._unsaid.items()):
            if self._waiter.now() < until_s:
                listed = {info.path for info in self._storage.list(f"{PARTS}/{save.folder}")}
                is_there = save.part_path(self.rank) in listed
                if not is_there and not publish_failure(self._storage, save, self.rank, error):
                    raise StorageError(f"the store does not work yet: {error}") from error
            del self._unsaid[save]

    def _hold(self, order: Order, stack: contextlib.ExitStack) -> Held | Exception | None:
        """The generation; or why it cannot be had, which others who wait for this rank are to hear."""
        try:
            return stack.enter_context(self._generations.hold(order.step, str(self._publisher.attempt.number)))
        except Exception as error:
            return error

    def _persisted(self, order: Order, held: Held | Exception | None) -> Manifest:
        self._look_back()
        if self._superseded is not None:
            raise self._superseded
        if order.failure:
            raise error_said(order.failure)
        self._refuse_given_up_elsewhere()
        self._refuse_removed()
        self._say_what_failed()
        if self.world_size == 1 and order.step < self.recorded:  # an agent before this one has left it out
            raise SaveSkipped(f"step {order.step} was left out: step {self.recorded} is committed")
        save = self._save_of(order)
        if self.rank:
            self._refuse_given_up(save.failure_path(0))
        return self._publish(save, order, held)

    def _refuse_given_up(self, note: str) -> None:
        """Raise what rank 0 has noted at ``note``, if it has given this save up."""
        if any(info.path == note for info in self._storage.list(note)):
            raise gave_up(self._storage, note, 0)

    def _publish(self, save: SaveId, order: Order, held: Held | Exception | None) -> Manifest:
        talk = RecordTalk(
            self._storage,
            save,
            rank=self.rank,
            world_size=self.world_size,
            waiter=self._waiter,
            timeout_s=self._settings.timeout_s,
            still=partial(self._refuse_over, order),
        )
        documents: Mapping[str, bytes] = {}
        taken: StagedCut | Exception
        try:
            if isinstance(held, Exception):
                raise held
            if held is None and not self._generations.steps():
                raise SaveFailed(
                    f"step {order.step} was not saved: nothing that rank {self.rank} has captured is in memory any "
                    "more: its arena was removed, or all of its captures were given up"
                )
            if held is None:
                raise SaveSkipped(
                    f"step {order.step} was left out: rank {self.rank} had not captured it, or newer cuts took its "
                    "place while an earlier one was persisted"
                )
            with self._changed:
                documents = dict(self._documents)
            taken = _staged(contents_of(held), order, documents)
        except Exception as error:
            taken = error
        manifest = self._publisher.publish(save, taken, talk)
        with self._changed:
            self._documents = {path: data for path, data in self._documents.items() if path not in documents}
        return manifest

    def _refuse_removed(self) -> None:
        """Raise where the run was removed and nobody is left who saves into it: it must not come back by itself."""
        if (self._died or self._left) and (lost := self._publisher.lost()):
            found = lost.partition(":")[0]
            raise SaveFailed(
                f"nothing was saved of a run that was removed: {found}. What was captured stays in memory, in case its "
                "storage comes back; lakeckpt doctor removes it"
            )

    def _refuse_pointless(self) -> None:
        """Raise where nobody is left to whom a commit is of use: the trainer is gone, and the run was removed, or
        another attempt has begun. The agents of other ranks may be dead, and never come to what this one is at."""
        self._refuse_removed()
        if self._died or self._left:
            self._publisher.refuse_later()

    def _refuse_over(self, order: Order) -> None:
        """Raise where the other ranks may never come to what this one is at: trainers died between two orders, or their
        agents with them."""
        self._refuse_pointless()
        if order.number == FINAL or not self._died:
            return
        if self._storage.list(final_folder(self._publisher.attempt.number)):
            raise SaveFailed(f"the save of step {order.step} was begun by some ranks only before their trainers died")

    def _tell(self, order: Order, found: Manifest | Exception, took_s: float) -> None:
        if isinstance(found, Manifest):
            outcome = Outcome(
                step=order.step,
                number=order.number,
                slot=found.slot,
                created_s=found.created_s,
                took_s=took_s,
                text=self._publisher.remarks.unpruned,
                lost=self._publisher.remarks.lost,
            )
        else:
            kind = found.kind if isinstance(found, LakeckptError) else "save_failed"
            text = str(found) if isinstance(found, LakeckptError) else repr(found)
            outcome = Outcome(step=order.step, number=order.number, took_s=took_s, kind=kind, text=text)
        came = f"committed in slot {outcome.slot}" if outcome.slot is not None else f"{outcome.kind}: {outcome.text}"
        self._log(f"step {order.step}: {came} ({took_s:.1f} s)")
        if outcome.slot is not None and outcome.text:
            self._log(f"checkpoints that are not to be kept could not be removed: {outcome.text}")
        if outcome.lost:
            self._log(f"damage in the run: {outcome.lost}")
        self._report(outcome)

    # --- the final save

    def _save_finally(self) -> None:
        attempt = self._publisher.attempt
        self._refuse_superseded()
        self._until_s += self._linger_s
        step = agree_on_final_save(
            self._storage,
            attempt.number,
            self._generations.steps(str(attempt.number)),
            attempt.recorded,
            rank=self.rank,
            world_size=self.world_size,
            waiter=self._waiter,
            timeout_s=self._settings.timeout_s,
            linger_s=self._linger_s,
            still=self._refuse_superseded,
        )
        self._begin_work()
        if step is None:
            self._log("no cut of all ranks is newer than the newest commit")
        else:
            self._do(Order(step=step, number=FINAL))

    def _refuse_superseded(self) -> None:
        """Raise where another attempt has begun, or the run was removed, so that nobody needs the final save any
        more."""
        self._publisher.catch_up()
        self._refuse_removed()


def _staged(contents: Contents, order: Order, documents: Mapping[str, bytes]) -> StagedCut:
    """A generation with the digests of its capture. It is verified while it is written."""
    data, leaves = contents.held.data, contents.leaves()
    tensors = {
        key: StagedTensor(spec=one.spec, data=data[one.start : one.stop], leaves=leaves[key])
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
        documents={path: partial(bytes, data) for path, data in documents.items()},
        intact=contents.verify_mapped,
    )
