"""This module keeps the place of one process in the data, behind a dataset, a mixture of datasets, or a loader.

`Progress` plans an epoch for a topology, hands out assignments, and moves on as the training loop receives them. It
keeps the *runs* since the last checkpoint (`lakeckpt.data.position.runs`), so the ledger records what the loop really
got, also if a state was loaded or an epoch was begun again. The segments of a mixture end at the steps of a schedule,
where a source is used up, and where the user changes the weights. It reads no rows, asks no other process, and starts
no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lakeckpt.core.changes import fit_lanes
from lakeckpt.core.identity import Identity
from lakeckpt.core.lanes import micro_batches
from lakeckpt.core.plan import Plan
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import MAX_EPOCH, State
from lakeckpt.core.streams.mixed_batches import AnyReceipt
from lakeckpt.core.streams.mixture import advanced, going_on, plan_of, reweighed, stretches
from lakeckpt.data.base.identity import Pinned
from lakeckpt.data.base.options import check_lanes
from lakeckpt.data.position.deliveries import Deliveries
from lakeckpt.data.position.orders import Orders, checked_weights
from lakeckpt.data.position.runs import Runs
from lakeckpt.errors import ConfigError, StateUnavailable

__all__ = ["Progress"]

_TOPOLOGY = "num_lanes", "batch_size", "world_size"


class Progress:
    """The place of one rank; every rank of a job in lockstep has an equal one. ``orders`` say what is read."""

    def __init__(
        self,
        orders: Orders,
        *,
        batch_size: int,
        num_lanes: int | None,
        row_wise: bool = False,
        moves: bool = False,
        follows: bool = False,
    ) -> None:
        self.mixing = orders.mixing
        """How the sources of a mixture take turns; None: there is one source."""
        self._orders, self._moves, self._follows = orders, moves, follows
        self._later: Pinned | None = None
        self.last_receipt: Receipt | None = None
        self.over = False
        """True once the loop has seen the end of the current epoch."""
        self._batch_size, self._num_lanes, self._row_wise = batch_size, num_lanes, row_wise
        self._first_epoch = 0
        self.runs = Runs()
        """The runs since the mark; the last run ends with the current state."""
        self._settled: tuple[int, int] | None = None
        self._plan: Any = None
        self._last_step: int | None = None
        """The number of steps of the epoch, if it depends on the data and all ranks know it."""
        self._iteration, self._began = 0, -1
        self.deliveries = Deliveries(row_wise=row_wise)
        self.replanned = 0
        """How often `set_weights` planned anew what had been dealt, and was not delivered."""

    # --- what is asked

    @property
    def identity(self) -> Identity:
        """The order of rows. Raises `ConfigError` of a mixture, which has none of its own."""
        if self.mixing is not None:
            raise ConfigError("a mixture has no order of its own: its sources have")
        return self._orders.order()

    @property
    def is_endless(self) -> bool:
        """True if the stream has no end, so that it counts its epochs itself."""
        return self.mixing is not None or self.identity.endless

    @property
    def seed(self) -> int:
        """The seed of the order, or of the turns that sources take."""
        return self.identity.spec.seed if self.mixing is None else self.mixing.seed

    @property
    def weights(self) -> tuple[int, ...]:
        """The weights with which a mixture goes on."""
        assert self.mixing is not None
        origin = self.runs.origin
        return self.mixing.weights if origin is None or origin.segment.weights is None else origin.segment.weights

    @property
    def origin(self) -> State:
        """The state of the whole job that all ranks went on from last; `settle` first."""
        assert self.runs.origin is not None
        return self.runs.origin

    @property
    def epoch(self) -> int:
        """The current epoch: the next one once the loop has seen the end."""
        state = self.runs.glance()
        return self._first_epoch if state is None else state.epoch + self.over

    @property
    def begun(self) -> bool:
        """True if there is a state to go on from: a state that was loaded, or settled for an iteration."""
        return self.runs.origin is not None

    @property
    def at_start(self) -> bool:
        """True if nothing of the current epoch has been delivered."""
        state = self.runs.state
        return state is None or self.over or state.is_start

    def accepts(self, change: str, source: int = 0) -> bool:
        """Return whether the user accepts this difference between states and a source."""
        return self._orders.accepts(change, source)

    def goes_on_elsewhere(self, state: State) -> bool:
        """Return whether versions move and ``state`` needs nothing of the version that it names: its epoch has not
        begun, or is all read."""
        return self._moves and not state.is_endless and (state.is_start or Plan(state).at_end)

    @property
    def plan(self) -> Any:
        """The plan of the current segment; `settle` first."""
        if self._plan is None:
            self._plan = plan_of(self.origin)
        return self._plan

    @property
    def steps(self) -> int | None:
        """The number of steps of the current epoch; None if it is not known, or there is no end. `settle` first."""
        return None if self._follows or self.mixing is not None else self.plan.steps

    def knows_lanes(self, world_size: int) -> bool:
        """Return whether the number of lanes is known without that of the workers: it was given, or a state has it."""
        stored = None if self.runs.origin is None else self.origin.segment.num_lanes
        return self._num_lanes is not None or (stored is not None and stored % world_size == 0)

    @property
    def state(self) -> State:
        """The state of all that was delivered; `settle` first."""
        state = self.runs.state
        assert state is not None
        return self._start_of(state.epoch + 1, state) if self.over else state

    def at(self, receipt: AnyReceipt | None) -> State:
        """Return the state of all up to ``receipt``, or of all that was delivered. Raises StateUnavailable."""
        return self.state if receipt is None else self.runs.at(receipt)

    # --- what changes the place

    def settle(self, world_size: int, workers: int, *, num_lanes: int | None = None) -> None:
        """Plan for a topology: from the start, or going on from the state that was loaded or reached.

        ``num_lanes`` is the number that was agreed on with other processes, a multiple of ``world_size``.
        """
        if self.begun and self._settled == (world_size, workers) and not self.over:
            return
        self._advance(self.settled(world_size, workers, num_lanes=num_lanes))
        self._settled = (world_size, workers)

    def settled(self, world_size: int, workers: int, *, num_lanes: int | None = None) -> State:
        """Return the state that `settle` would go on from."""
        state = self.runs.state
        stored = None if state is None else state.segment.num_lanes
        num_lanes = num_lanes or fit_lanes(self._num_lanes, stored, world_size, workers)
        check_lanes(num_lanes)
        topology = dict(zip(_TOPOLOGY, (num_lanes, self._batch_size, world_size), strict=True))
        if state is None or self.over:
            state = self._orders.start(self.epoch, topology)
        return going_on(state, topology)

    def following(self, state: State) -> State:
        """Return the start of the epoch after that of ``state``, in the order of this identity."""
        return self._start_of(state.epoch + 1, state)

    def read(self, plain: object) -> State:
        """Return the state that ``plain`` is of, as `Orders.read` does."""
        return self._orders.read(plain)

    def load(self, state: State, *, ahead: int = 0) -> None:
        """Go on from ``state``; StateMismatch, without a change, if it belongs to another order of rows, or to another
        mixture. Sources that it does not have begin at their first rows.

        StateError if it is a part of a state, or if no job reaches it: see `check_place`, for ``ahead`` as well.
        """
        elsewhere = self.goes_on_elsewhere(state)
        found, self._orders = self._orders.taken(state, elsewhere=elsewhere, follows=self._follows, ahead=ahead)
        self.last_receipt = None
        self._iteration += 1
        self._set(found)
        self._settled = None

    def begin_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``."""
        if self.mixing is not None:
            raise ConfigError("a mixture has no epoch to go to: its sources count their epochs themselves")
        if self.identity.endless or self._follows:
            raise ConfigError("an endless stream has no epoch to go to; load a state, or make a new dataset")
        if not 0 <= epoch <= MAX_EPOCH:
            raise ConfigError(f"epochs are counted from 0 to {MAX_EPOCH}, got {epoch}")
        self._leave_rest()
        self._restart(epoch)

    def _restart(self, epoch: int) -> None:
        self.last_receipt, self._first_epoch = None, epoch
        self._iteration += 1
        if (state := self.runs.state) is not None:
            self._set(self._start_of(epoch, state))
            self._settled = None  # at an end there was nothing to plan anew: it is of the topology before

    def move_to(self, pinned: Pinned) -> None:
        """Read the current epoch, of which nothing has been delivered, in the order of another table version."""
        assert self.at_start, "a version is never changed inside of an epoch"
        epoch = self.epoch
        self._orders = self._orders.reading(pinned)
        self._restart(epoch)

    def go_over(self, pinned: Pinned) -> None:
        """Go to the start of the next tranche, in the same topology. The current tranche has no full step left."""
        state, steps, settled = self.state, self.plan.steps, self._settled
        assert settled is not None and state.step == steps, "a tranche is read to its last full step"
        self.runs.finish(None, moves=True)
        self._orders = self._orders.reading(pinned)
        self._set(self._start_of(state.epoch + 1, state))
        self._settled = None  # at an end there was nothing to plan anew
        self.settle(*settled)

    def fills_step(self, rows: int) -> bool:
        """Return whether a tranche of so many rows has a step; `settle` first."""
        assert self._settled is not None
        stored = self.state.segment.num_lanes
        lanes = fit_lanes(self._num_lanes, stored, *self._settled)
        return micro_batches(rows, lanes, self._batch_size, "carry") > 0

    def read_rest(self, later: Pinned) -> None:
        """Note that the current identity is of the rest of one epoch; later epochs are in the order of ``later``."""
        self._later = later

    @property
    def in_rest(self) -> bool:
        """True if the current identity is of the rest of one epoch."""
        return self._later is not None

    def _leave_rest(self) -> None:
        if self._later is not None:
            self._orders = self._orders.reading(self._later)
            self._later = None

    def repin(self, pinned: Pinned, source: int = 0) -> Callable[[], None]:
        """Read a source in another table version; a state is loaded next. Return a function that undoes it."""
        undo = self.remember()
        self._orders = self._orders.reading(pinned, source)
        self.last_receipt, self.over = None, False
        self._settled = self._plan = self._later = None
        self.runs.leave()
        self._iteration += 1
        return undo

    def remember(self) -> Callable[[], None]:
        """Return a function that goes back to where this is now; iterations that have begun are out of date then."""
        before = {**self.__dict__, "runs": self.runs.copy()}

        def undo() -> None:
            iteration = self._iteration + 1
            self.__dict__.update(before)
            self._iteration = iteration

        return undo

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Go on with other weights of a mixture from the current step; `settle` first."""
        if self.mixing is None:
            raise ConfigError("set_weights changes the weights of a lakeckpt.mix, and this loader reads one dataset")
        if self.mixing.packs:
            raise ConfigError("pack of a mixture has no set_weights: pack each source, and mix them then")
        self._advance(reweighed(advanced(self.state), checked_weights(weights, self.mixing.names)))
        self.replanned += 1

    def begin_iteration(self) -> int:
        """Return a number for the iteration that begins; `check` refuses those of earlier ones. `ConfigError` if a
        mixture ends before its first step."""
        if self.mixing is not None and (small := self.plan.too_small):
            rows = ", ".join(f"{self.mixing.names[one]!r} has {self._orders.order(one).rows}" for one in small)
            lanes, size = self.plan.segment.num_lanes, self.plan.segment.batch_size
            raise ConfigError(
                f"the mixture ends before its first step: of its sources, {rows} rows, and one step takes rows of each "
                f"source for {lanes} lanes of {size} rows. Give mix(…, num_lanes=…) fewer lanes (at least one for each "
                "rank), a smaller batch_size=, exhausted='next_epoch', or leave these sources out"
            )
        self._iteration = self._began = self._iteration + 1
        return self._iteration

    def is_newest(self, iteration: int | None) -> bool:
        """Return whether nothing has begun and no place was changed since ``iteration`` began."""
        return iteration == self._iteration

    def check(self, iteration: int) -> None:
        """Refuse to go on with an iteration from before another one began, or the place was changed."""
        if iteration != self._iteration:
            raise StateUnavailable(
                "this iterator is out of date: since it began, another one was begun, or load_state_dict, rewind or "
                "set_epoch changed the place. Go on with a new one: iter(loader)"
            )

    def delivered(self, receipt: Any) -> None:
        """Note that the loop got what ``receipt`` is of."""
        self.runs.advance(receipt)
        self.last_receipt = receipt
        self.deliveries.delivered(self._iteration, receipt)
        if self.mixing is not None and self.plan.steps == receipt.step + 1 and not self.plan.is_last:
            self._advance(advanced(self.state))

    def turn(self, rank: int, *, loaded: bool = False) -> None:
        """End the current epoch if the loop got its last batch and then started a new iterator.

        Loops that count steps never ask for more than there is; they take nothing of an epoch that has nothing for
        ``rank``. A state of the end of an epoch that was loaded shows the loop that end once. ``loaded``: the loop
        counted, and has seen it. If consumption depends on the data, a rank alone does not know whether it is over; a
        mixture has no epochs.
        """
        last, state, began = self.last_receipt, self.runs.origin, self._began == self._iteration
        if state is None or self.over or self._follows or state.held is not None or self.mixing is not None:
            return
        took = last is not None and last.epoch == state.epoch
        plan, step, left = self.plan, self.runs.reached, True
        if self._row_wise and (took or began):
            # An epoch's last step may not have a row for every rank. A rank does not know which of the others have got
            # theirs, so its state stays before that step until it begins the next epoch.
            of_this_job = last is None or not took or last.world_size == plan.segment.world_size
            left = not of_this_job or plan.has_rows(last.rank if took and last else rank, from_step=step)
        if not left or ((took or loaded or began) and plan.steps == step):
            self.finish()

    def ends_at(self, steps: int) -> None:
        """Note that the epoch has ``steps`` steps, on all ranks, as the data say."""
        self._last_step = steps

    def end(self, step: int) -> None:
        """Note that the iteration ended before ``step``. Raises StateUnavailable if there is more of the epoch, or of
        the mixture."""
        if self.mixing is not None:
            steps, what = self.plan.steps if self.plan.is_last else None, "a mixture"
        else:
            steps, what = self.plan.steps if self.origin.held is None else self._last_step, f"epoch {self.epoch}"
        if step != steps:
            of = "" if steps is None else f" of {steps}"
            raise StateUnavailable(
                f"the iterator over {what} was closed and ended before step {step}{of}: go on with a new "
                "iterator, iter(loader)"
            )
        if self.mixing is not None:
            self.deliveries.end()
        else:
            self.finish()

    def finish(self) -> None:
        """Note that the loop saw the end of the current epoch, also if the last rows went to other ranks. The end of
        a tranche is none: what is left of it is part of the next one."""
        if self._follows:
            return
        self.over, self._began = True, -1
        self.deliveries.end()
        self.runs.finish(self.plan.steps, moves=self._moves)
        self._leave_rest()

    def stretches(self) -> Iterable[tuple[Any, int, int | None]]:
        """Return (plan, first step, one past its last step or None) of all that is left of the epoch, or mixture."""
        return stretches(self.state)

    def assignments(self, rank: int) -> Iterator[Any]:
        """Yield what ``rank`` gets in the steps that are left of the epoch, or of the mixture."""
        for plan, step, stop in self.stretches():
            while stop is None or step < stop:
                yield plan.assignment(step, rank, row_wise=self._row_wise)
                step += 1

    # --- inside

    def _set(self, state: State) -> None:
        self.runs.begin(state)
        self._plan, self._last_step, self.over = None, None, False

    def _advance(self, state: State) -> None:
        """Go on from ``state``, which is the current one or follows from it, in the segment that begins there."""
        if state is not self.runs.state:
            self._set(state)

    def _start_of(self, epoch: int, state: State) -> State:
        """Return the start of ``epoch``, in the order of this identity and the topology of ``state``."""
        return self._orders.start(epoch, dict(zip(_TOPOLOGY, state.segment.topology, strict=True)))
