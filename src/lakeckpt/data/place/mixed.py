"""This module keeps the place of one process in a mixture, behind a mixed dataset and its loader.

A mixture is one state with an order for each source. `MixedProgress` plans its segments, which end at the steps of a
schedule, when a source is used up, or when the user changes the weights. It reads no rows, asks no other process, and
starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lakeckpt.core.changes import fit_lanes
from lakeckpt.core.identity import Identity, Mixing
from lakeckpt.core.state import State
from lakeckpt.core.streams.mixing import fractions
from lakeckpt.core.streams.mixture import MixedPlan, advanced, joined, replanned, reweighed, started, stretches
from lakeckpt.data.options import check_lanes
from lakeckpt.data.place.identity import Pinned, check_accepted, differing
from lakeckpt.data.place.progress import Progress
from lakeckpt.errors import ConfigError, StateError, StateMismatch, StateUnavailable

__all__ = ["MixedProgress", "SourcePlace", "checked_weights"]


class MixedProgress(Progress):
    """The place of one rank in a mixture; every rank of a job in lockstep has an equal one.

    ``sources`` are the tables and orders of the sources, and ``accepted`` the changes that each accepts, in the order
    of ``mixing``.
    """

    def __init__(
        self,
        mixing: Mixing,
        sources: Sequence[Pinned],
        accepted: Sequence[frozenset[str]],
        *,
        batch_size: int,
        num_lanes: int | None,
    ) -> None:
        super().__init__(sources[0], batch_size=batch_size, num_lanes=num_lanes, row_wise=False)
        self.mixing, self._sources, self._accepted = mixing, list(sources), accepted
        self._orders: dict[int, Identity] = {}
        """Source → its order, once it was asked for."""
        self.replanned = 0
        """How often `set_weights` planned anew what had been dealt, and was not delivered."""

    # --- what is asked

    def order(self, source: int) -> Identity:
        """Return the order of a source. If its rows are filtered, asking for it counts them."""
        if source not in self._orders:
            try:
                self._orders[source] = self._sources[source].identity()
            except ConfigError as error:
                name = self.mixing.names[source]
                raise ConfigError(f"source {name!r} of the mixture cannot be read: {error}") from error
        return self._orders[source]

    def accepts_of(self, source: int, change: str) -> bool:
        """Return whether the user accepts this difference between states and the dataset of a source."""
        return change in self._accepted[source]

    @property
    def identity(self) -> Identity:
        """None: each source has an order of its own. Raises ConfigError."""
        raise ConfigError("a mixture has no order of its own: its sources have, mixed.sources[name].identity")

    @property
    def is_endless(self) -> bool:
        """True: sources count their epochs themselves."""
        return True

    @property
    def seed(self) -> int:
        """The seed of the turns that sources take."""
        return self.mixing.seed

    @property
    def plan(self) -> Any:
        """The plan of the current segment; `settle` first."""
        if self._plan is None:
            self._plan = MixedPlan(self.origin)  # type: ignore[assignment]
        return self._plan

    @property
    def steps(self) -> int | None:
        """None: how many steps there are is not known before the last."""
        return None

    @property
    def weights(self) -> tuple[int, ...]:
        """The weights with which the mixture goes on."""
        origin = self.runs.origin
        return self.mixing.weights if origin is None or origin.segment.weights is None else origin.segment.weights

    # --- what changes the place

    def settled(self, world_size: int, workers: int, *, num_lanes: int | None = None) -> State:
        """Return the state that `settle` would go on from."""
        state = self.runs.state
        stored = None if state is None else state.segment.num_lanes
        lanes = num_lanes or fit_lanes(self._num_lanes, stored, world_size, workers)
        check_lanes(lanes)
        topology = {"num_lanes": lanes, "batch_size": self._batch_size, "world_size": world_size}
        if state is None:
            return advanced(started(self.mixing, self._every_order(), topology))
        return advanced(replanned(advanced(state), topology))

    def _every_order(self) -> tuple[Identity, ...]:
        return tuple(self.order(source) for source in range(len(self.mixing.names)))

    def read(self, plain: object) -> State:
        """Return the state of which `State.to_plain` made ``plain``. Raises StateError if it is of no mixture."""
        found = State.from_plain(plain)
        if found.mixing is None:
            raise StateError("this is the state of one dataset, and this loader reads a mixture")
        return found

    def load(self, state: State, *, ahead: int = 0) -> None:
        """Go on from ``state``; StateMismatch, without a change, if it is of another mixture, or if the order of one of
        its sources is another. Sources that it does not have begin at their first rows."""
        self._check_alike(state)
        assert state.mixing is not None
        orders = dict(zip(state.mixing.names, state.orders, strict=True))
        phases = [orders[name].phase if name in orders else 0 for name in self.mixing.names]
        mine = tuple(replace(one, phase=at) for one, at in zip(self._every_order(), phases, strict=True))
        for number, name in enumerate(self.mixing.names):
            if name in orders:
                self._check_source(number, mine[number], orders[name])
        if state.mixing.names == self.mixing.names:
            state = replace(state, orders=mine, mixing=self.mixing)
        else:
            state = joined(
                replace(state, orders=tuple(mine[self.mixing.names.index(name)] for name in orders)), self.mixing, mine
            )
        self.last_receipt = None
        self._iteration += 1
        self._set(state)
        self._settled = None

    def _check_source(self, number: int, mine: Identity, its: Identity) -> None:
        try:
            kept = str(self._sources[number].selecting)
            check_accepted(differing(mine, its, kept=kept), accepted=self._accepted[number])
        except StateError as error:
            raise type(error)(f"source {self.mixing.names[number]!r} of the mixture: {error}") from error

    def _check_alike(self, state: State) -> None:
        """Refuse a state in which rows were mixed in another way: `mixing` would go on elsewhere in it."""
        mine, its = self.mixing, state.mixing
        assert its is not None
        if gone := [name for name in its.names if name not in mine.names]:
            raise StateMismatch(
                f"the state is of a mixture of {list(its.names)}, and this one has no source {gone[0]!r}: name it in "
                "lakeckpt.mix, with a weight of 0 if no more of it is to be read"
            )
        ways = {False: "row", True: "batch"}
        pairs: dict[str, tuple[Any, Any]] = {
            "seed": (mine.seed, its.seed),
            "granularity": (ways[mine.whole], ways[its.whole]),
        }
        if len(mine.names) == len(its.names):  # else a source is added, and numbers change
            pairs |= {f"the number of source {one!r}": (at, its.names.index(one)) for at, one in enumerate(mine.names)}
        words = "{}: {!r} in this mixture, {!r} in the state"
        differ = [words.format(what, one, other) for what, (one, other) in pairs.items() if one != other]
        if differ:
            raise StateMismatch(
                f"the state is of a source whose rows were mixed otherwise. They differ in {'; '.join(differ)}. Give "
                "lakeckpt.mix the values of the state, and the sources in the order that they had (it numbers them "
                "from 0)"
            )

    def repin_source(self, source: int, pinned: Pinned) -> Callable[[], None]:
        """Read another version of the table of a source; a state is loaded next. Return a function that undoes it."""
        undo = self.remember()
        sources, orders = list(self._sources), dict(self._orders)
        self._sources[source] = pinned
        self._orders.pop(source, None)
        self.last_receipt, self._settled, self._plan = None, None, None
        self.runs.leave()
        self._iteration += 1

        def go_back() -> None:
            undo()
            self._sources, self._orders = sources, orders

        return go_back

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Go on with other weights from the current step; `settle` first."""
        self._advance(reweighed(advanced(self.state), checked_weights(weights, self.mixing.names)))
        self.replanned += 1

    def begin_epoch(self, epoch: int) -> None:
        """Refuse: sources count their epochs themselves."""
        raise ConfigError("a mixture has no epoch to go to: its sources count their epochs themselves")

    def turn(self, rank: int, *, loaded: bool = False) -> None:
        """Do nothing: there are no epochs to end."""

    def begin_iteration(self) -> int:
        """Return a number for the iteration that begins. `ConfigError` if the mixture ends before its first step."""
        if small := self.plan.too_small:
            rows = ", ".join(f"{self.mixing.names[one]!r} has {self.order(one).rows}" for one in small)
            lanes, size = self.plan.segment.num_lanes, self.plan.segment.batch_size
            raise ConfigError(
                f"the mixture ends before its first step: of its sources, {rows} rows, and one step takes rows of each "
                f"source for {lanes} lanes of {size} rows. Give mix(…, num_lanes=…) fewer lanes (at least one for each "
                "rank), a smaller batch_size=, exhausted='next_epoch', or leave these sources out"
            )
        return super().begin_iteration()

    def delivered(self, receipt: Any) -> None:
        """Note that the loop got what ``receipt`` is of."""
        super().delivered(receipt)
        if self.plan.steps == receipt.step + 1 and not self.plan.is_last:
            self._advance(advanced(self.state))

    def end(self, step: int) -> None:
        """Note that the iteration ended before ``step``. Raises StateUnavailable if there is more."""
        if not self.plan.is_last or step != self.plan.steps:
            raise StateUnavailable(
                f"the iterator over a mixture was closed and ended before step {step}: go on with a new one, "
                "iter(loader)"
            )
        self.deliveries.end()

    def stretches(self) -> Iterable[tuple[Any, int, int | None]]:
        """See `Progress.stretches`."""
        return stretches(self.state)

    def _advance(self, state: State) -> None:
        """Go on from ``state``, which follows from the current one, in the segment that begins there."""
        if state is not self.runs.state:
            self._set(state)


class SourcePlace:
    """The place in source ``number`` of a mixture, for what looks after the versions of its table."""

    in_rest, at_start = False, False

    def __init__(self, mixed: MixedProgress, number: int) -> None:
        self._mixed, self._number = mixed, number

    @property
    def runs(self) -> Any:
        """The runs of the mixture."""
        return self._mixed.runs

    def accepts(self, change: str) -> bool:
        """See `Progress.accepts`."""
        return self._mixed.accepts_of(self._number, change)

    def goes_on_elsewhere(self, state: State) -> bool:
        """Never: a source stays at the version of its table."""
        return False

    def repin(self, pinned: Pinned) -> Callable[[], None]:
        """See `Progress.repin`."""
        return self._mixed.repin_source(self._number, pinned)


def checked_weights(weights: Mapping[str, Any], names: Sequence[str]) -> tuple[int, ...]:
    """Return the weights of the sources ``names`` as fractions. `ConfigError` if they are not that."""
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        given = sorted(map(str, weights)) if isinstance(weights, Mapping) else weights
        raise ConfigError(f"weights name each source of the mixture, {list(names)}, got {given!r}")
    try:
        found = fractions({name: weights[name] for name in names})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"these are not weights of a mixture: {error}") from error
    return tuple(found.values())
