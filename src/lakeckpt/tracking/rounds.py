"""This module compares facts of all ranks in rounds: every rank sends its facts, rank 0 adds them up and answers.

`Rounds` is the common part of two transports: the store of a torch.distributed job (`lakeckpt.tracking.exchange`) for
trainers, and records in the storage of a run (`lakeckpt.checkpoint.persist.records`) for agents. All ranks take the
answer of rank 0, which is a tally or an error, so that all ranks return the same tally or raise the same error.

The module imports without torch and starts no threads. All ranks call `Rounds.everyone` equally often, in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.errors import TrackingError
from lakeckpt.tracking.notes import error_from_text, error_to_text
from lakeckpt.tracking.tally import Tally
from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Rounds", "answer_to_bytes", "facts_from_bytes", "facts_to_bytes", "tally_from_bytes"]

_VERSION = (1, 0)


class Rounds:
    """The rounds of one rank. A subclass sends and receives; without one, it serves a job of one rank."""

    def __init__(self, *, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self._round = 0

    def everyone(self, facts: Mapping[str, str]) -> Tally:
        """Return the ``facts`` of all ranks.

        Raises, on every rank, `MissingRanksError` naming the ranks that are gone or did not answer within the timeout.
        """
        return self.answered(facts, lambda tally: tally)

    def answered(self, facts: Mapping[str, str], answer: Callable[[Tally], Tally]) -> Tally:
        """Return, on every rank, what ``answer`` makes of the ``facts`` of all ranks on rank 0. What it raises there is
        raised on all. Raises as `everyone` does."""
        number = self._next_round()
        if self.world_size == 1:
            return answer(Tally.of([facts]))
        if self.rank:
            self._send(number, facts_to_bytes(facts) if facts else b"")
            return self._await_answer(number)
        try:
            tally = Tally.of([facts, *self._collect(number)])
        except TrackingError as error:
            self._answer(number, answer_to_bytes(error))
            raise
        try:
            found = answer_to_bytes(answer(tally))
        except Exception as error:
            self._answer(number, answer_to_bytes(error))
            raise
        return tally_from_bytes(self._answer(number, found))

    def _next_round(self) -> int:
        self._round += 1
        return self._round - 1

    def _send(self, number: int, data: bytes) -> None:
        """Send ``data`` (empty: no facts) to rank 0, without waiting for it. Called on the other ranks."""
        raise NotImplementedError

    def _collect(self, number: int) -> Sequence[Mapping[str, str]]:
        """Return the facts that rank 1, rank 2, … have sent. Called on rank 0."""
        raise NotImplementedError

    def _answer(self, number: int, data: bytes) -> bytes:
        """Send ``data`` to all other ranks, and return the answer that counts. Called on rank 0."""
        raise NotImplementedError

    def _await_answer(self, number: int) -> Tally:
        """Return the tally that rank 0 answers, or raise the error. Called on the other ranks."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The answer of a round: the facts of all ranks, or the error of rank 0."""

    tally: Tally | None = None
    error: str = ""


def facts_to_bytes(facts: Mapping[str, str]) -> bytes:
    """Return the facts of one rank as a message."""
    return dumps(dict(facts), kind="facts", version=_VERSION)


def facts_from_bytes(data: bytes) -> Mapping[str, str]:
    """Return the facts that `facts_to_bytes` made ``data`` of; none if it is empty. Raises `WireError` for anything
    else."""
    if not data:
        return {}
    plain = loads(data, kind="facts", supported=_VERSION)
    facts: Mapping[str, str] = from_plain(Mapping[str, str], plain, "the facts of a rank")
    return facts


def answer_to_bytes(answer: Tally | Exception) -> bytes:
    """Return the answer of a round as a message."""
    found = _Answer(tally=answer) if isinstance(answer, Tally) else _Answer(error=error_to_text(answer))
    return dumps(to_plain(found), kind="answer", version=_VERSION)


def tally_from_bytes(data: bytes) -> Tally:
    """Return the tally of the answer in ``data``, or raise its error. Raises `WireError` for anything else."""
    answer: _Answer = from_plain(_Answer, loads(data, kind="answer", supported=_VERSION), "an answer of rank 0")
    if answer.tally is None:
        raise error_from_text(answer.error)
    return answer.tally
