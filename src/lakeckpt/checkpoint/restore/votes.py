"""How do all ranks do one thing, so that what fails on one fails on all?  Work, then a vote; failures raise everywhere.

Used where ranks restore together. The work of a vote never talks to other ranks itself: a rank that fails before it
comes to that votes at once, the others take its vote for the answer to what they ask, and then wait for another one.
Talks through the exchange that it is given, and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from lakeckpt.checkpoint.persist.agreement import everyone
from lakeckpt.errors import ArenaDamaged, CheckpointDamaged, CheckpointError, LakeckptError, WireError, error_of
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.tally import Tally

__all__ = ["Together", "texts", "told", "verdict"]


class Together:
    """What one rank does with all others. All call the same methods in the same order."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def do(self, work: Callable[[], object]) -> None:
        """Do ``work`` on every rank; what it raises on one is raised on all."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        self.settle({} if failure is None else {"refused": told(failure)}, failure)

    def settle(self, votes: dict[str, str], failure: Exception | None, what: str = "") -> Tally:
        """The votes of all ranks. A vote ``refused`` raises on all: this rank's own ``failure`` where it gave it."""
        tally = everyone(self._exchange, votes)
        if "refused" in tally.facts:
            if failure is not None and "refused" in votes:
                raise failure
            _raise_said(next(iter(tally.facts["refused"])), what + tally.describe("refused"))
        return tally

    def told_by_rank_0(self, work: Callable[[], dict[str, str]]) -> dict[str, str]:
        """What ``work`` says on rank 0, on every rank; what it raises there is raised everywhere."""
        words: dict[str, str] = {}
        failure: Exception | None = None
        if self._exchange.rank == 0:
            try:
                words = work()
            except Exception as error:
                failure, words = error, {"failed": told(error)}
        tally = everyone(self._exchange, words)
        if failure is not None:
            raise failure
        every = {name: next(iter(values)) for name, values in tally.facts.items()}
        if "failed" in every:
            _raise_said(every["failed"], f"rank 0 could not restore: {every['failed']}")
        return every


def verdict(error: Exception, *, of_memory: bool = False) -> str:
    """Whether an older checkpoint may do. A cut in memory (``of_memory``) is never needed: where it is not damaged, it
    is ``unfit``, and a checkpoint that does not fit either says so for itself."""
    if isinstance(error, (CheckpointDamaged, ArenaDamaged)) or (of_memory and isinstance(error, WireError)):
        return "damaged"
    return "unfit" if of_memory else "refused"


def told(error: Exception) -> str:
    """An error in a vote."""
    kind = error.kind if isinstance(error, LakeckptError) else type(error).__name__
    return f"{kind}: {error}"


def texts(tally: Tally, fact: str) -> list[str]:
    """What ranks have `told` of a fact, without the kinds of the errors."""
    return sorted({said.partition(": ")[2] for said in tally.facts.get(fact, ())})


def _raise_said(words: str, text: str) -> NoReturn:
    """Raise what another rank has `told`, with this ``text``."""
    raise error_of(words.partition(":")[0], text, otherwise=CheckpointError)
