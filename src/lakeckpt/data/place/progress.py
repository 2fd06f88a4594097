"""Where is this process in the data?  The bookkeeping behind a dataset or loader: states, receipts, stretches.

`Progress` plans an epoch for a topology, hands out assignments, and moves on as the training loop receives them. It
remembers the *runs* (stretches of unbroken progress) since the last checkpoint, so that what the ledger records is what
the loop really got: where a state was not loaded, or an epoch was begun again, that shows.

It reads no rows and talks to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from lakeckpt.core.plan import Assignment, Plan, check_place, fit_lanes, rebase, replan, start
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import MAX_EPOCH, Identity, ReaderState
from lakeckpt.data.options import OVERRIDABLE, check_lanes
from lakeckpt.data.place.deliveries import Deliveries
from lakeckpt.data.place.identity import IdentityOf, at_version, differing
from lakeckpt.data.place.runs import Runs
from lakeckpt.errors import ConfigError, StateMismatch, StateUnavailable

__all__ = ["Progress"]


class Progress:
    """The place of one rank; every rank of a job in lockstep has an equal one."""

    def __init__(
        self,
        identity: Identity | IdentityOf,
        *,
        batch_size: int,
        num_lanes: int | None,
        row_wise: bool,
        accept_changes: Collection[str] = frozenset(),
        moves: bool = False,
    ) -> None:
        self._moves = moves
        self._identity: Identity | IdentityOf
        self._later: Identity | IdentityOf | None = None
        self._pin(identity)
        self.last_receipt: Receipt | None = None
        self.over = False
        """Whether the loop has seen the end of the epoch at hand."""
        self._batch_size, self._num_lanes, self._row_wise = batch_size, num_lanes, row_wise
        self._accept = accept_changes
        self._first_epoch = 0
        self._begun = Runs()
        self._made: ReaderState | None
        self._reached = 0
        self._state = None
        self._settled: tuple[int, int] | None = None
        self._plan: Plan | None = None
        self._iteration, self._began = 0, -1
        self.deliveries = Deliveries(row_wise=row_wise)

    # --- what was delivered, in one number: states are made when they are asked for, not for every micro-batch

    @property
    def _state(self) -> ReaderState | None:
        state = self._made
        if state is not None and self._reached != state.step:
            state = self._made = state.moved(step=self._reached)
            self._begun.reach(state)
        return state

    @_state.setter
    def _state(self, state: ReaderState | None) -> None:
        self._made = state
        self._reached = 0 if state is None else state.step

    @property
    def _runs(self) -> Runs:
        """The runs since the mark; the last one ends with the state at hand."""
        _ = self._state  # asking for the state moves the end of the last run up to it
        return self._begun

    # --- what is asked

    @property
    def identity(self) -> Identity:
        """What the order of rows is a function of. Where rows are filtered, they are counted for it."""
        if isinstance(self._identity, IdentityOf):
            self._identity = self._identity()
        return self._identity

    @property
    def epoch(self) -> int:
        """The epoch at hand: the next one once the loop has seen the end."""
        return self._first_epoch if self._state is None else self._state.epoch + self.over

    @property
    def begun(self) -> bool:
        """Whether there is a state to go on from: one that was loaded, or settled for an iteration."""
        return self._state is not None

    @property
    def at_start(self) -> bool:
        """Whether nothing of the epoch at hand has been delivered."""
        return self._state is None or self.over or _is_start(self._state)

    @property
    def tables(self) -> set[str]:
        """The digests of the tables that something was delivered of since the mark, and of the one at hand."""
        return self._runs.tables

    def accepts(self, change: str) -> bool:
        """Whether the user accepts a difference between states and the dataset."""
        return change in self._accept

    def goes_on_elsewhere(self, state: ReaderState) -> bool:
        """Whether ``state`` needs nothing of the table version it names, where versions move: of an epoch not begun, or
        all read."""
        return self._moves and not state.identity.endless and (_is_start(state) or Plan(state).at_end)

    @property
    def plan(self) -> Plan:
        """The plan of the segment at hand; `settle` first."""
        assert self._state is not None
        if (
            self._plan is None
            or self._plan.segment != self._state.segment
            or self._plan.state.epoch != self._state.epoch
        ):
            self._plan = Plan(self._state)
        return self._plan

    def knows_lanes(self, world_size: int) -> bool:
        """Whether the number of lanes was given, or follows from a state, however many workers there will be."""
        stored = None if self._state is None else self._state.segment.num_lanes
        return self._num_lanes is not None or (stored is not None and stored % world_size == 0)

    @property
    def state(self) -> ReaderState:
        """The state of all that was delivered; `settle` first."""
        assert self._state is not None
        return self._next_epoch(self._state.epoch + 1) if self.over else self._state

    def at(self, receipt: Receipt | None) -> ReaderState:
        """Return the state of all up to ``receipt``, or of all that was delivered.

        Raises StateUnavailable for a receipt that is not one of this process's recent ones.
        """
        if receipt is None:
            return self.state
        return self._runs.at(receipt)

    def receipt_of(self, number: int, rank: int) -> Receipt:
        """Return the receipt with this `Receipt.number`, of a batch that ``rank`` was delivered since the mark."""
        return self._runs.numbered(number, rank)

    # --- what changes the place

    def settle(self, world_size: int, workers: int, *, num_lanes: int | None = None) -> None:
        """Plan for a topology: from the start, or going on from the state that was loaded or reached.

        ``num_lanes`` are those that were agreed on with other processes, a multiple of ``world_size``.
        """
        if self._state is not None and self._settled == (world_size, workers) and not self.over:
            return
        settled = self.settled(world_size, workers, num_lanes=num_lanes)
        if settled is not self._state:
            self._set(settled)
        self._settled = (world_size, workers)

    def settled(self, world_size: int, workers: int, *, num_lanes: int | None = None) -> ReaderState:
        """Return the state that `settle` would go on from."""
        stored = None if self._state is None else self._state.segment.num_lanes
        num_lanes = num_lanes or fit_lanes(self._num_lanes, stored, world_size, workers)
        check_lanes(num_lanes)
        topology = {"num_lanes": num_lanes, "batch_size": self._batch_size, "world_size": world_size}
        if self._state is None or self.over:
            return start(self.identity, epoch=self.epoch, **topology)
        return replan(self._state, **topology)

    def following(self, state: ReaderState) -> ReaderState:
        """The start of the epoch after that of ``state``, in the order of this identity."""
        num_lanes, batch_size, world_size = state.segment.topology
        epoch = state.epoch + 1
        return start(self.identity, epoch=epoch, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size)

    def load(self, state: ReaderState, *, ahead: int = 0) -> None:
        """Go on from ``state``; StateMismatch, without a change, where it is of another order of rows.

        StateError where no job comes to it: see `check_place`, for ``ahead`` as well.
        """
        identity, given = self.identity, state
        if self.goes_on_elsewhere(state):
            if not _is_start(state):  # the loop has yet to see the end of an epoch of which nothing is left
                identity = identity.of_version(state.identity)
            state = replace(state, identity=at_version(self.identity, state.identity))
        differences = differing(self.identity, state.identity, kept=self._kept)
        rejected = [line for line in differences if line.split(":")[0] not in self._accept]
        if rejected:
            raise StateMismatch(
                "the reader state is of another order of rows than this dataset. They differ in "
                + "; ".join(rejected)
                + ". "
                "Open the dataset with the values of the state, or list the fields to override in "
                f"ReadOptions(accept_changes=[…]) "
                f"({', '.join(sorted(OVERRIDABLE))} can be overridden)."
            )
        check_place(given, ahead=ahead)
        if self.identity.tail != state.identity.tail:
            state = rebase(state, identity)
        self.last_receipt = None
        self._iteration += 1
        self._set(replace(state, identity=identity))
        self._settled = None

    def begin_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``."""
        if self.identity.endless:
            raise ConfigError("an endless stream has no epoch to go to; load a state, or make a new dataset")
        if not 0 <= epoch <= MAX_EPOCH:
            raise ConfigError(f"epochs are counted from 0 to {MAX_EPOCH}, got {epoch}")
        self.last_receipt = None
        self._iteration += 1
        self._leave_rest()
        if self._state is None:
            self._first_epoch = epoch
        else:
            self._set(self._next_epoch(epoch))
            self._settled = None  # at an end there was nothing to plan anew: it is of the topology before

    def move_to(self, identity: Identity | IdentityOf) -> None:
        """Read the epoch at hand, of which nothing has been delivered, in the order of another table version."""
        assert self.at_start, "a version is never changed inside of an epoch"
        epoch = self.epoch
        self._pin(identity)
        self._first_epoch = epoch
        if self._state is not None:
            self.last_receipt = None
            self._set(self._next_epoch(epoch))
            self._settled = None

    def read_rest(self, later: Identity | IdentityOf) -> None:
        """The identity at hand is of the rest of one epoch; the epochs after it are in the order of ``later``."""
        self._later = later

    def _leave_rest(self) -> None:
        if self._later is not None:
            self._pin(self._later)
            self._later = None

    def repin(self, identity: Identity | IdentityOf) -> Callable[[], None]:
        """Go on in the order of another table version, from nowhere: a state is loaded next. Returns what undoes it."""
        before = {**self.__dict__, "_begun": self._runs.copy()}
        self._pin(identity)
        self.last_receipt, self.over = None, False
        self._state = self._settled = self._plan = self._later = None
        self._iteration += 1

        def undo() -> None:
            iteration = self._iteration + 1
            self.__dict__.update(before)
            self._iteration = iteration

        return undo

    def _pin(self, identity: Identity | IdentityOf) -> None:
        self._identity = identity
        self._kept = identity.kept if isinstance(identity, IdentityOf) else ""

    def begin_iteration(self) -> int:
        """Return a number for the iteration that begins; `check` refuses those of earlier ones."""
        self._iteration = self._began = self._iteration + 1
        return self._iteration

    def is_newest(self, iteration: int | None) -> bool:
        """Whether nothing has begun and no place was changed since ``iteration`` began."""
        return iteration == self._iteration

    def check(self, iteration: int) -> None:
        """Refuse to go on with an iteration from before another one began, or the place was changed."""
        if iteration != self._iteration:
            raise StateUnavailable(
                "this iterator is out of date: since it began, another one was begun, or load_state_dict, rewind or "
                "set_epoch changed the place. Go on with a new one: iter(loader)"
            )

    def delivered(self, receipt: Receipt) -> None:
        """Note that the loop got what ``receipt`` is of."""
        assert self._reached == receipt.step, f"{receipt} was delivered at step {self._reached}"
        self._reached = receipt.step + 1
        self.last_receipt = receipt
        self.deliveries.delivered(self._iteration)

    def turn(self, rank: int, *, loaded: bool = False) -> None:
        """End the epoch at hand where the loop received its last batch, and asked for no more before it begins again.

        Loops that count steps never ask; of an epoch that has nothing for ``rank`` they take nothing. After loading a
        state of that place the loop is to see the end once, unless ``loaded`` says that it counted.
        """
        last, state, began = self.last_receipt, self._state, self._began == self._iteration
        if state is None or self.over:
            return
        took = last is not None and last.epoch == state.epoch
        # Row by row, an epoch's very last rows may not suffice for all ranks. Which of them have got theirs, the others
        # do not know: so each says that it is where it was until it begins again.
        plan, step, left = self.plan, self._reached, True
        if self._row_wise and (took or began):
            of_this_job = last is None or not took or last.world_size == plan.segment.world_size
            left = not of_this_job or plan.has_rows(last.rank if took and last else rank, from_step=step)
        if not left or ((took or loaded or began) and plan.steps == step):
            self.finish()

    def end(self, step: int) -> None:
        """Note that what the loop reads ended before ``step``. `StateUnavailable` where there is more of the epoch."""
        if step != self.plan.steps:
            raise StateUnavailable(
                f"what reads epoch {self.epoch} ended before step {step} of {self.plan.steps}, where it was given up: "
                "go on with a new iterator, iter(loader)"
            )
        self.finish()

    def finish(self) -> None:
        """Note that the loop saw the end of the epoch at hand: of all ranks' rows, also where others had the last."""
        if self.plan.steps is not None:
            self._reached = self.plan.steps
        self.over, self._began = True, -1
        self.deliveries.end()
        self._runs.finish(moves=self._moves)
        self._leave_rest()

    def assignments(self, rank: int) -> Iterator[Assignment]:
        """Yield what ``rank`` gets in the steps that are left of the epoch."""
        plan = self.plan
        step = self.state.step
        while plan.steps is None or step < plan.steps:
            yield plan.assignment(step, rank)
            step += 1

    # --- what a checkpoint asks

    def mark(self, receipt: Receipt | None) -> None:
        """Forget what was consumed up to ``receipt`` (None: all that was delivered): it has been recorded."""
        self._runs.mark(receipt)

    def stretches(self, receipt: Receipt | None) -> list[tuple[ReaderState, ReaderState]]:
        """Return (from, to) for what was consumed since the mark, up to ``receipt``."""
        return self._runs.stretches(receipt)

    # --- inside

    def _set(self, state: ReaderState) -> None:
        runs = self._runs
        self._state, self._plan, self.over = state, None, False
        runs.begin(state)

    def _next_epoch(self, epoch: int) -> ReaderState:
        assert self._state is not None
        num_lanes, batch_size, world_size = self._state.segment.topology
        return start(self.identity, epoch=epoch, num_lanes=num_lanes, batch_size=batch_size, world_size=world_size)


def _is_start(state: ReaderState) -> bool:
    return state.step == 0 and state.base is None and len(state.segments) == 1
