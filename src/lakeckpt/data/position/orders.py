"""This module holds the orders in which a reader reads: of one table, or of each source of a mixture.

`Orders` is a value. It makes orders when they are first asked for, because rows that are filtered must be counted
first. It compares a state that is loaded with these orders, and takes it as its own. A difference raises `StateError`
or `StateMismatch`, which says what to do. The module reads no rows, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lakeckpt.core.changes import check_place, rebase, start
from lakeckpt.core.identity import Identity, Maker, Mixing
from lakeckpt.core.state import State
from lakeckpt.core.streams.mixing import fractions
from lakeckpt.core.streams.mixture import joined, started
from lakeckpt.data.base.identity import Pinned, at_version, check_accepted, differing
from lakeckpt.errors import ConfigError, StateError, StateMismatch

__all__ = ["Orders", "checked_weights"]


class Orders:
    """The orders of one source, or of those of ``mixing``. A source is an order, or what makes one.

    ``accepted`` are the differences between states and each source that the user accepts; none by default.
    ``describes`` says of each source what makes any number of items of each row, and reads a few rows for it; None:
    nothing does.
    """

    def __init__(
        self,
        sources: Sequence[Identity | Pinned],
        *,
        accepted: Sequence[Collection[str]] | None = None,
        describes: Sequence[Callable[[Identity], Maker] | None] | None = None,
        mixing: Mixing | None = None,
    ) -> None:
        self.mixing = mixing
        self._sources = tuple(sources)
        self._accepted = [frozenset[str]()] * len(sources) if accepted is None else list(map(frozenset, accepted))
        self._describes = [None] * len(sources) if describes is None else list(describes)
        self._known: dict[int, Identity] = {}
        """Source → its order, once it was asked for."""

    def reading(self, source: Identity | Pinned, number: int = 0) -> Orders:
        """Return these orders with that of another ``source`` in the place of source ``number``."""
        every = [*self._sources[:number], source, *self._sources[number + 1 :]]
        found = Orders(every, accepted=self._accepted, describes=self._describes, mixing=self.mixing)
        found._known = {at: order for at, order in self._known.items() if at != number}
        return found

    def order(self, number: int = 0) -> Identity:
        """Return the order of the rows of a source. If its rows are filtered, asking for it counts them."""
        found, source, describes = self._known.get(number), self._sources[number], self._describes[number]
        if found is not None:
            return found
        if isinstance(source, Identity):
            return source
        try:
            found = source.identity()
        except ConfigError as error:
            if self.mixing is None:
                raise
            raise ConfigError(f"source {self.mixing.names[number]!r} of the mixture cannot be read: {error}") from error
        found = self._known[number] = found if describes is None else replace(found, maker=describes(found))
        return found

    @property
    def every(self) -> tuple[Identity, ...]:
        """The orders of all sources."""
        return tuple(map(self.order, range(len(self._sources))))

    def accepts(self, change: str, number: int = 0) -> bool:
        """Return whether the user accepts this difference between states and a source."""
        return change in self._accepted[number]

    def start(self, epoch: int, topology: Mapping[str, int]) -> State:
        """Return the state before the first step of ``epoch``; of a mixture, before its first step."""
        if self.mixing is not None:
            return started(self.mixing, self.every, topology)
        return start(self.order(), epoch=epoch, **topology)

    def read(self, plain: object) -> State:
        """Return the state of which `State.to_plain` made ``plain``. Raises StateError if it is none, or of another
        kind: of a mixture, or of rows whose number depends on the data."""
        found = State.from_plain(plain)
        is_mixture = self.mixing is not None
        if is_mixture != (found.mixing is not None):
            there, here = ("one dataset", "a mixture") if is_mixture else ("a mixture", "one dataset")
            raise StateError(f"this is the state of {there}, and this loader reads {here}")
        if not is_mixture:
            self._check_kind(found.orders[0], 0)
        return found

    def _check_kind(self, its: Identity, number: int) -> None:
        """Raise StateError if consumption depends on the data here and not in the state, or there and not here."""
        depends = self._describes[number] is not None
        if depends != (its.maker is not None):
            kinds = "each row is one row", 'rows give any number of rows (rows="many", a tokenizer=, whole documents)'
            there, here = kinds if depends else kinds[::-1]
            raise StateError(f"in this dataset {here}, and the state was saved by a reader in which {there}")

    def taken(self, state: State, *, elsewhere: bool, follows: bool, ahead: int) -> tuple[State, Orders]:
        """Return ``state`` in these orders, and the orders with what it decides.

        ``elsewhere``: its epoch has not begun or is all read, and goes on in this table version. ``follows``: the table
        is followed, of which the last tranche before an idle end has another tail. ``ahead``: see `check_place`.
        Sources of a mixture that the state does not have begin at their first rows.

        Raises StateMismatch if it belongs to other orders; StateError if it is a part of a state, or if no job reaches
        it.
        """
        if state.held is not None and not state.is_whole:
            raise StateError(
                f"this is the part of the ranks {state.held.ranks} of {state.segment.world_size}: "
                "lakeckpt.merge_states joins the states of all ranks, and every rank loads the result"
            )
        if self.mixing is not None:
            return self._mixed(self.mixing, state), self
        given, its, mine = state, state.identity, self.order()
        if follows and its.tail != "drop":
            mine = replace(mine, tail=its.tail)
        mine = identity = replace(mine, phase=its.phase)
        if elsewhere:
            if not state.is_start:  # the loop has yet to see the end of an epoch of which nothing is left
                identity = identity.of_version(its)
            its = at_version(mine, its)
            state = replace(state, orders=(its,))
        never = {"tail"} if its.tail == "carry" else set[str]()
        check_accepted(differing(mine, its, kept=self._kept(0)), accepted=self._accepted[0] - never)
        check_place(given, ahead=ahead)
        if mine.tail != its.tail:
            state = rebase(state, identity)
        return replace(state, orders=(identity,)), self._ordered(mine)

    def _mixed(self, mixing: Mixing, state: State) -> State:
        """Return ``state`` as one of the mixture ``mixing``, with these orders."""
        before = state.mixing
        assert before is not None
        _check_mixing(mixing, before)
        its = dict(zip(before.names, state.orders, strict=True))
        found = {}
        for number, (name, order) in enumerate(zip(mixing.names, self.every, strict=True)):
            found[name] = replace(order, phase=its[name].phase) if name in its else order
            try:
                self._check_kind(its.get(name, order), number)
                differences = differing(found[name], its.get(name, order), kept=self._kept(number))
                check_accepted(differences, accepted=self._accepted[number])
            except StateError as error:
                raise type(error)(f"source {name!r} of the mixture: {error}") from error
        state = replace(state, orders=tuple(found[name] for name in its))
        if before.names == mixing.names:
            return replace(state, mixing=mixing)
        return joined(state, mixing, tuple(found.values()))

    def _ordered(self, order: Identity) -> Orders:
        """Return these orders, of which the only one is ``order``."""
        found = self.reading(self._sources[0])
        found._known = {0: order}
        return found

    def _kept(self, number: int) -> str:
        """Return the filter of a source, for people."""
        source = self._sources[number]
        return str(source.selecting) if isinstance(source, Pinned) else ""


def _check_mixing(mine: Mixing, its: Mixing) -> None:
    """Refuse a state in which rows were mixed in another way: `mixing` would go on elsewhere in it."""
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
