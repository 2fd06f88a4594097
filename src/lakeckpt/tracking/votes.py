"""This module lets all ranks do one piece of work and vote: what fails on one rank fails on all.

All ranks restore together by it. The work of a vote never sends messages of its own: a rank that fails before such a
message votes at once, and the others would take its vote for the answer to the message. The module communicates only
through the exchange that it is given, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lakeckpt.errors import ArenaDamaged, CheckpointDamaged, CheckpointError, LakeckptError, WireError
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.notes import error_from_text, error_to_text
from lakeckpt.tracking.tally import Tally

__all__ = ["Together", "texts", "verdict"]


class Together:
    """What one rank does with all others. All ranks call the same methods in the same order."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def do(self, work: Callable[[], Mapping[str, str] | None]) -> Tally:
        """Do ``work`` on every rank; what it raises on one is raised on all. Return the facts that it returned on each
        of them."""
        failure: Exception | None = None
        facts: dict[str, str] = {}
        try:
            facts |= work() or {}
        except Exception as error:
            failure = error
        return self.settle(facts if failure is None else {"refused": error_to_text(failure)}, failure)

    def settle(self, votes: dict[str, str], failure: Exception | None, what: str = "") -> Tally:
        """Return the votes of all ranks. A vote ``refused`` raises on all ranks: on a rank that gave it, its own
        ``failure``."""
        tally = self._exchange.everyone(votes)
        if "refused" in tally.facts:
            if failure is not None and "refused" in votes:
                raise failure
            raise _of_kind(tally.value("refused"), what + tally.describe("refused"))
        return tally

    def ask_rank_0(self, work: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Return on every rank what ``work`` returns on rank 0; what it raises there is raised on all."""
        words: dict[str, str] = {}
        failure: Exception | None = None
        if self._exchange.rank == 0:
            try:
                words = work()
            except Exception as error:
                failure, words = error, {"failed": error_to_text(error)}
        tally = self._exchange.everyone(words)
        if failure is not None:
            raise failure
        every = {name: tally.value(name) for name in tally.facts}
        if "failed" in every:
            raise _of_kind(every["failed"], f"rank 0 could not restore: {every['failed']}")
        return every


def verdict(error: Exception, *, of_memory: bool = False) -> str:
    """Return whether an older checkpoint may do. A cut in memory (``of_memory``) is never needed: if it is not
    damaged, it is ``unfit``, and a checkpoint that does not fit either says so for itself."""
    if isinstance(error, (CheckpointDamaged, ArenaDamaged)) or (of_memory and isinstance(error, WireError)):
        return "damaged"
    return "unfit" if of_memory else "refused"


def texts(tally: Tally, fact: str) -> list[str]:
    """Return the messages of the errors that ranks have stated as a fact."""
    return sorted({text.partition(": ")[2] for text in tally.facts.get(fact, ())})


def _of_kind(error: str, message: str) -> LakeckptError:
    """Return an error of the kind of ``error`` (`error_to_text`), with another message."""
    return type(error_from_text(error, otherwise=CheckpointError))(message)
