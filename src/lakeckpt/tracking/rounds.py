"""This module compares facts of all ranks in rounds: every rank sends its facts, rank 0 adds them up and answers.

`Rounds` is the common part of two transports: the store of a torch.distributed job (`lakeckpt.tracking.exchange`) for
trainers, and records in the storage of a run (`lakeckpt.checkpoint.persist.records`) for agents. All ranks take the
answer of rank 0, which is a tally or an error, so that all ranks return the same tally or raise the same error.

The module imports without torch and starts no threads. All ranks call `Rounds.everyone` equally often, in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lakeckpt.errors import LakeckptError, TrackingError, WireDamaged, WireError
from lakeckpt.tracking.notes import error_from_text, error_to_text
from lakeckpt.tracking.tally import Tally
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "Rounds",
    "facts_from_bytes",
    "facts_to_bytes",
    "failure_to_bytes",
    "tally_from_bytes",
    "tally_to_bytes",
]

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
        number = self._next_round()
        if self.world_size == 1:
            return Tally.of([facts])
        if self.rank:
            self._send(number, facts_to_bytes(facts))
            return self._await_answer(number)
        try:
            tally = Tally.of([facts, *self._collect(number)])
        except TrackingError as error:
            self._answer(number, failure_to_bytes(error))
            raise
        return tally_from_bytes(self._answer(number, tally_to_bytes(tally)))

    def _next_round(self) -> int:
        self._round += 1
        return self._round - 1

    def _send(self, number: int, data: bytes) -> None:
        """Send ``data`` to rank 0, without waiting for it. Called on the other ranks."""
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


def facts_to_bytes(facts: Mapping[str, str]) -> bytes:
    """Return the facts of one rank as a message."""
    return dumps(dict(facts), kind="facts", version=_VERSION)


def facts_from_bytes(data: bytes) -> Mapping[str, str]:
    """Return the facts that `facts_to_bytes` made ``data`` of. Raises `WireError` for anything else."""
    facts = loads(data, kind="facts", supported=_VERSION).value
    if not isinstance(facts, dict) or not all(isinstance(one, str) for pair in facts.items() for one in pair):
        raise WireDamaged(f"the facts of a rank are texts by name, got {facts!r:.80}")
    return facts


def tally_to_bytes(tally: Tally) -> bytes:
    """Return the answer of a round in which all ranks took part."""
    return dumps({"tally": tally.to_plain()}, kind="answer", version=_VERSION)


def failure_to_bytes(error: LakeckptError) -> bytes:
    """Return the answer of a round that failed."""
    return dumps({"error": error_to_text(error)}, kind="answer", version=_VERSION)


def tally_from_bytes(answer: bytes) -> Tally:
    """Return the tally of an answer, or raise its error. Raises `WireError` for anything else."""
    plain = loads(answer, kind="answer", supported=_VERSION).value
    try:
        if "error" in plain:
            raise error_from_text(plain["error"])
        return Tally.from_plain(plain["tally"])
    except WireError:
        raise
    except (AttributeError, KeyError, TypeError) as error:
        raise WireDamaged(f"this document is no answer of rank 0: {error!r}") from error
