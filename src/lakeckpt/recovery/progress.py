"""This module decides what the next attempt of a job does after deaths without progress: the same again, or less.

*Progress* is a step that is finished beyond all steps of the deaths before. Deaths in a row without progress lead to
higher levels, which `level_of` returns:

    1              the newest cut, as always
    2              the same with processes that are started cold (`lakeckpt run` does it)
    3, all alike   one micro-batch, one cause: the *poison verdict*. The job stops; or the micro-batch is excluded, if
                   that is wanted, and the job stops at the next death: then the rows were not the cause
    3, otherwise   the cut is suspect: the newest checkpoint that is older than it, and nothing from memory
    4              the checkpoint before
    5              stop

Only deaths of a rank's own count (`FaultNote.is_own`), and only within one life of the launcher: a start by hand begins
at 0. Progress resets all. The module is pure: it reads faults, and no clock or storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lakeckpt.recovery.faults import BatchAt, FaultNote
from lakeckpt.wire.documents import Count, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["LEAVES", "STOPS", "Level", "level_of", "own_deaths"]

STOPS, LEAVES = 93, 94
"""The exit status of a job that no restart helps, and of a node that leaves its job."""
_SUSPECT, _STOP = 3, 5
_KIND, _VERSION = "level", (1, 0)
_OF_LAST, _ON_NODE = 4, 3
"""A node is bad if so many (3) of so many last (4) deaths lie on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What the next attempt does."""

    deaths: Count = 0
    """Deaths in a row without progress."""
    go_back: Count | None = None
    """Restore the newest checkpoint before this optimizer step, at which the last attempt began, and no cut in memory;
    None: the newest cut, as always."""
    poison: BatchAt | None = None
    """The micro-batch that is taken for the cause."""
    excludes: bool = False
    """The micro-batch leaves the deal, instead of a stop."""
    stops: bool = False
    """No restart helps."""
    leaves: str = ""
    """The name of the node that leaves the job; empty: none does."""

    @property
    def was_wrong(self) -> bool:
        """True if the micro-batch was excluded, and the next death came all the same."""
        return self.stops and self.poison is not None and self.deaths > _SUSPECT

    @property
    def said(self) -> str:
        """What is done otherwise than before, and why, for people; empty: nothing is.

        >>> Level(deaths=3, go_back=70).said
        '3 deaths in a row without progress: the newest checkpoint before step 70 is restored, and no cut in memory'
        """
        does = ""
        if self.go_back is not None:
            does = f"the newest checkpoint before step {self.go_back} is restored, and no cut in memory"
        if self.leaves:
            does = f"most of them lie on the node {self.leaves}, which leaves the job"
        if self.excludes:
            does = f"{self.poison} is taken for the cause, and excluded"
        if self.stops:
            does = "no restart helps"
        return f"{self.deaths} deaths in a row without progress: {does}" if does else ""

    def to_text(self) -> str:
        """For messages between ranks."""
        return dumps(to_plain(self), kind=_KIND, version=_VERSION).hex()

    @classmethod
    def from_text(cls, text: str) -> Level:
        """Return the level from a text of `to_text`. Raises `WireError`."""
        found: Level = from_plain(cls, loads(bytes.fromhex(text), kind=_KIND, supported=_VERSION), "a level")
        return found


def own_deaths(deaths: Sequence[FaultNote]) -> list[FaultNote]:
    """Return the last of ``deaths``, the first causes of one life of the launcher in their order, that were without
    progress beyond the first of them. Those that do not count are left out."""
    found: list[FaultNote] = []
    furthest = -1
    for one in deaths:
        if one.step > furthest:
            found = []
            furthest = one.step
        if one.is_own:
            found.append(one)
    return found


def level_of(
    deaths: Sequence[FaultNote], *, nodes: int = 1, least_nodes: int | None = None, may_exclude: bool = False
) -> Level:
    """Return what the next attempt does after ``deaths``: the first causes of one life of the launcher, in order.

    ``nodes`` run the job, and ``least_nodes`` are enough for it; None: no node may leave. ``may_exclude``: a
    micro-batch that ends the job three times is excluded.
    """
    last = own_deaths(deaths)
    count = len(last)
    leaves = "" if least_nodes is None or nodes < 2 or nodes <= least_nodes else _bad_node(last)
    if count < _SUSPECT:
        return Level(deaths=count, leaves=leaves)
    poison = _poison(last[:_SUSPECT])
    if poison is not None and count == _SUSPECT and may_exclude:
        return Level(deaths=count, poison=poison, excludes=True)
    if poison is not None or count >= _STOP:
        return Level(deaths=count, poison=poison, stops=True)
    return Level(deaths=count, go_back=last[-1].begun, leaves=leaves)


def _poison(deaths: Sequence[FaultNote]) -> BatchAt | None:
    """Return the micro-batch at which all ``deaths`` lie, if they have one cause."""
    alike = {(one.cause, one.what, one.batch, one.world) for one in deaths}
    return deaths[0].batch if len(alike) == 1 else None


def _bad_node(deaths: Sequence[FaultNote]) -> str:
    """Return the node on which most of the last deaths lie; empty if none stands out. An exception of Python is the
    script's, not the node's, unless its text names a fault of the node."""
    last = deaths[-_OF_LAST:]
    for node in {one.node for one in last if one.node}:
        there = [one for one in last if one.node == node]
        if len(there) >= _ON_NODE and all(one.cause != "exception" or one.blames_node for one in there):
            return node
    return ""
