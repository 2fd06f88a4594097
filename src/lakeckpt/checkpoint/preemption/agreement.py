"""This module lets the ranks of a job agree on the cut at which they all save and end, through notes in their exchange.

A rank that got a signal leaves a note, for which the threads of the other ranks look about once a second. Then each
rank states the first cut at which it can still stop, and does not go beyond that cut until there is an answer. Rank 0
answers with the latest of these cuts: every rank can stop there. Threads state and answer, so that it does not matter
whether the main threads are in a collective. Without a signal there are no notes.

The module starts no threads and never waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lakeckpt.tracking.exchange import Exchange

__all__ = ["Agreement"]

_SIGNAL, _CUT = "preempted/signal", "preempted/cut"


class Agreement:
    """The notes of one rank. One thread calls it.

    All methods that leave a note raise `MissingRanksError` if the store of the job is gone.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._stated: dict[int, int] = {}  # rank → the first cut at which it can stop, on rank 0

    def signal(self) -> int | None:
        """Return the number of the signal that some rank got; None if there was none."""
        found = self._exchange.peek(_SIGNAL)
        return None if found is None else int(found)

    def announce(self, number: int) -> None:
        """Leave a note that this rank got a signal, unless another rank has left one."""
        if self._exchange.peek(_SIGNAL) is None:
            self._exchange.publish(_SIGNAL, str(number).encode())

    def state(self, cut: int) -> None:
        """State the first cut (optimizer steps done) at which this rank can stop."""
        self._exchange.publish(_stated_by(self._exchange.rank), str(cut).encode())

    def cut(self) -> int | None:
        """Return the cut at which all ranks stop; None while it is not known. Rank 0 answers here."""
        if self._exchange.rank:
            found = self._exchange.peek(_CUT)
            return None if found is None else int(found)
        for rank in self.missing():
            found = self._exchange.peek(_stated_by(rank))
            if found is not None:
                self._stated[rank] = int(found)
        if self.missing():
            return None
        cut = max(self._stated.values())
        self._exchange.publish(_CUT, str(cut).encode())
        return cut

    def missing(self) -> list[int]:
        """Return the ranks of which no cut is known here: on rank 0, those that have not answered."""
        return [rank for rank in range(self._exchange.world_size) if rank not in self._stated]


def _stated_by(rank: int) -> str:
    return f"preempted/stated/{rank}"
