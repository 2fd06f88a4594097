"""This module keeps the place of one process in a mixture, behind a mixed dataset and its loader.

Each source has a `lakeckpt.data.place.progress.Progress` of its own, which keeps its state and its runs, so that the
ledger records each source by itself. `MixedProgress` moves all of them in lockstep, plans their segments together, and
hands out assignments. It reads no rows, asks no other process, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lakeckpt.core.changes import fit_lanes
from lakeckpt.core.identity import Identity
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import State
from lakeckpt.core.streams.mixed_batches import MixedAssignment, MixedReceipt
from lakeckpt.core.streams.mixing import fractions
from lakeckpt.core.streams.mixture import (
    FORMAT,
    MixedPlan,
    MixedState,
    Mixing,
    advanced,
    is_unread,
    joined,
    replanned,
    reweighed,
    started,
    stretches,
)
from lakeckpt.data.options import check_lanes
from lakeckpt.data.place.progress import Progress
from lakeckpt.errors import ConfigError, StateError, StateMismatch, StateUnavailable

__all__ = ["MixedProgress", "checked_weights"]


class MixedProgress:
    """The place of one rank in a mixture; every rank of a job in lockstep has an equal one.

    ``sources`` are the places of the sources, in the order of ``mixing``. What a loader calls is as in `Progress`.
    """

    in_rest = False

    def __init__(self, mixing: Mixing, sources: Sequence[Progress], *, batch_size: int, num_lanes: int | None) -> None:
        self.mixing, self.sources = mixing, tuple(sources)
        self._batch_size, self._num_lanes = batch_size, num_lanes
        self.last_receipt: MixedReceipt | None = None
        self._receipts: dict[int, Receipt] = {}
        """Source → its part of the last receipt."""
        self._iteration = 0
        self._settled: tuple[int, int] | None = None
        self._plan: MixedPlan | None = None
        self.replanned = 0
        """How often `set_weights` planned anew what had been dealt, and was not delivered."""

    # --- what is asked

    @property
    def identity(self) -> Identity:
        """The identity of the first source's order."""
        return self.sources[0].identity

    @staticmethod
    def _identity_of(name: str, source: Progress) -> Identity:
        try:
            return source.identity
        except ConfigError as error:
            raise ConfigError(f"source {name!r} of the mixture cannot be read: {error}") from error

    @property
    def epoch(self) -> int:
        """0: sources count their epochs themselves."""
        return 0

    @property
    def begun(self) -> bool:
        """True where every source has a state to go on from."""
        return all(one.begun for one in self.sources)

    @property
    def at_start(self) -> bool:
        """True where nothing has been delivered."""
        return all(one.at_start for one in self.sources)

    @property
    def is_together(self) -> bool:
        """True where all sources have states, which are of one place."""
        try:
            return self.begun and bool(self.state)
        except StateError:
            return False

    @property
    def state(self) -> MixedState:
        """The state of all that was delivered; `settle` first."""
        return MixedState(mixing=self.mixing, sources=tuple(one.state for one in self.sources))

    @property
    def plan(self) -> MixedPlan:
        """The plan of the segment at hand; `settle` first."""
        if self._plan is None:
            self._plan = MixedPlan(self.state)
        return self._plan

    @property
    def steps(self) -> int | None:
        """None: how many steps there are is not known before the last."""
        return None

    def knows_lanes(self, world_size: int) -> bool:
        """Return whether the number of lanes is known without that of the workers."""
        return self._num_lanes is not None or self.sources[0].knows_lanes(world_size)

    def at(self, receipt: MixedReceipt | None) -> MixedState:
        """Return the state of all up to ``receipt``, or of all that was delivered.

        Raises StateUnavailable for a receipt that is not one of this process's recent ones.
        """
        if receipt is None:
            return self.state
        if not isinstance(receipt, MixedReceipt):
            raise ConfigError(f"this is the receipt of a batch of a mixture (batch.receipt), or None, got {receipt!r}")
        found = tuple(one.at(one.runs.numbered(receipt.number, receipt.rank)) for one in self.sources)
        return MixedState(mixing=self.mixing, sources=found)

    def receipt_of(self, source: int) -> Receipt | None:
        """Return what a source gave to the micro-batch that was delivered last; None where none was."""
        last = self.last_receipt
        if last is not None and source not in self._receipts:
            self._receipts[source] = self.sources[source].runs.numbered(last.number, last.rank)
        return self._receipts.get(source)

    # --- what changes the place

    def settle(self, world_size: int, workers: int) -> None:
        """Plan for a topology: from the start, or going on from the states that were loaded or reached.

        Raises StateError where sources were loaded with states that are not of one place.
        """
        if self._settled != (world_size, workers) or not self.begun:
            self._go_to(self.settled(world_size, workers))
            self._settled = (world_size, workers)

    def settled(self, world_size: int, workers: int) -> MixedState:
        """Return the state that `settle` would go on from."""
        known = {number: one.state for number, one in enumerate(self.sources) if one.begun}
        lanes = fit_lanes(
            self._num_lanes, next(iter(known.values())).segment.num_lanes if known else None, world_size, workers
        )
        check_lanes(lanes)
        topology = {"num_lanes": lanes, "batch_size": self._batch_size, "world_size": world_size}
        identities = tuple(map(self._identity_of, self.mixing.names, self.sources))
        # Where a restore has loaded the states of some sources only, the others are new.
        read = {number: one for number, one in known.items() if not is_unread(one)}
        if read and len(read) < len(self.sources):
            return replanned(joined(self.mixing, read, identities), topology)
        if len(known) < len(self.sources):
            return started(self.mixing, identities, topology)
        return replanned(advanced(self.state), topology)

    def load(self, state: MixedState) -> None:
        """Go on from ``state``; StateMismatch, without a change, where a source's state is of another order of rows."""
        undo = [one.remember() for one in self.sources]
        try:
            for number, (name, found) in enumerate(zip(self.mixing.names, state.sources, strict=True)):
                try:
                    self.load_source(number, found)
                except StateError as error:
                    raise type(error)(f"source {name!r} of the mixture: {error}") from error
        except StateError:
            for go_back in undo:
                go_back()
            raise
        self.changed()

    def load_source(self, number: int, state: State) -> None:
        """Go on from the state of one source, if the others go on from there, too; `changed` comes next.

        StateMismatch, without a change, where its rows were mixed otherwise, or it is of another order of rows.
        """
        _check_mixed_alike(self.mixing, number, state)
        self.sources[number].load(state)

    def read(self, plain: object) -> MixedState:
        """Return the state of which `MixedState.to_plain` made ``plain``. Raises StateError where it is none."""
        if not isinstance(plain, Mapping) or plain.get("format") != FORMAT:
            found = plain.get("format") if isinstance(plain, Mapping) else type(plain).__name__
            raise StateError(f"the state of a mixture has the 'format' {FORMAT!r}, got {found!r}")
        sources: Any = plain.get("sources")
        names = sorted(sources) if isinstance(sources, Mapping) else []
        if names != sorted(self.mixing.names):
            raise StateError(f"the state is of a mixture of {names}, and this mixture is of {list(self.mixing.names)}")
        states = tuple(State.from_plain(sources[name]) for name in self.mixing.names)
        return MixedState(mixing=self.mixing, sources=states)

    def changed(self) -> None:
        """Note that the states of sources were changed: iterations that have begun are out of date."""
        self.last_receipt, self._settled, self._plan = None, None, None
        self._receipts = {}
        self._iteration += 1

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Go on with other weights from the step at hand; `settle` first."""
        self._go_to(reweighed(advanced(self.state), checked_weights(weights, self.mixing.names)))
        self.replanned += 1

    def turn(self, rank: int, *, loaded: bool = False) -> None:
        """Do nothing: there are no epochs to end."""

    def begin_iteration(self) -> int:
        """Return a number for the iteration that begins; `check` refuses those of earlier ones. `ConfigError` if the
        mixture ends before its first step."""
        if small := self.plan.too_small:
            rows = ", ".join(
                f"{name!r} has {self.sources[self.mixing.names.index(name)].identity.rows}" for name in small
            )
            lanes, size = self.plan.segment.num_lanes, self.plan.segment.batch_size
            raise ConfigError(
                f"the mixture ends before its first step: of its sources, {rows} rows, and one step takes rows of each "
                f"source for {lanes} lanes of {size} rows. Give mix(…, num_lanes=…) fewer lanes (at least one for each "
                "rank), a smaller batch_size=, exhausted='next_epoch', or leave these sources out"
            )
        self._iteration += 1
        return self._iteration

    def is_newest(self, iteration: int | None) -> bool:
        """Return whether nothing has begun and no place was changed since ``iteration`` began."""
        return iteration == self._iteration

    def check(self, iteration: int) -> None:
        """Refuse to go on with an iteration from before another one began, or the place was changed."""
        if iteration != self._iteration:
            raise StateUnavailable(
                "this iterator is out of date: since it began, another one was begun, or load_state_dict changed the "
                "place. Go on with a new one: iter(loader)"
            )

    def delivered(self, receipt: MixedReceipt) -> None:
        """Note that the loop got what ``receipt`` is of."""
        for one in self.sources:
            one.reached(receipt.step, self._iteration)
        self.last_receipt, self._receipts = receipt, {}
        plan = self.plan
        if plan.steps == receipt.step + 1 and not plan.is_last:
            self._go_to(self.state)

    def end(self, step: int) -> None:
        """Note that the iteration ended before ``step``. Raises StateUnavailable where there is more."""
        if not self.plan.is_last or step != self.plan.steps:
            raise StateUnavailable(
                f"the iterator over a mixture was closed and ended before step {step}: go on with a new one, "
                "iter(loader)"
            )
        for one in self.sources:
            one.deliveries.end()

    def assignments(self, rank: int) -> Iterator[MixedAssignment]:
        """Yield what ``rank`` gets in the steps that are left."""
        for plan, step, stop in stretches(self.state):
            assert isinstance(plan, MixedPlan)
            while stop is None or step < stop:
                yield plan.assignment(step, rank)
                step += 1

    def _go_to(self, state: MixedState) -> None:
        """Go on from ``state``, in the segment that is planned from there: one may end where another begins."""
        state = advanced(state)
        for one, found in zip(self.sources, state.sources, strict=True):
            one.go_to(found)
        self._plan = None


def _check_mixed_alike(mixing: Mixing, number: int, state: State) -> None:
    """Refuse the state of a source that was mixed with others in another way: `mixing` would go on elsewhere in it."""
    share = state.segment.share
    if share is None:  # refused with the states of all sources
        return
    name, ways = mixing.names[number], {False: "row", True: "batch"}
    pairs = {"seed": (mixing.seed, share.seed), "granularity": (ways[mixing.whole], ways[share.whole])}
    if len(share.weights) == len(mixing.names):  # else a source is added, and numbers change
        pairs[f"the number of source {name!r}"] = number, share.source
    differ = [
        f"{what}: {mine!r} in this mixture, {its!r} in the state" for what, (mine, its) in pairs.items() if mine != its
    ]
    if differ:
        raise StateMismatch(
            f"the state is of a source whose rows were mixed otherwise. They differ in {'; '.join(differ)}. Give "
            "lakeckpt.mix the values of the state, and the sources in the order that they had (it numbers them from 0)"
        )


def checked_weights(weights: Mapping[str, Any], names: Sequence[str]) -> tuple[int, ...]:
    """Return the weights of the sources ``names`` as fractions. `ConfigError` where they are not that."""
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        given = sorted(map(str, weights)) if isinstance(weights, Mapping) else weights
        raise ConfigError(f"weights name each source of the mixture, {list(names)}, got {given!r}")
    try:
        found = fractions({name: weights[name] for name in names})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"these are not weights of a mixture: {error}") from error
    return tuple(found.values())
