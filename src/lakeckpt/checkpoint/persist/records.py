"""This module lets the agents of a job compare facts through immutable records in the storage of the run.

In each round every rank puts its facts beside the parts of the save; rank 0 reads them all and puts the answer, which
the other ranks wait for: two puts deep, however many ranks there are. Names are of the save, the round and the rank,
and are written once. A rank that writes nothing is named when the time is over.

The records need no process group and no port, and serve processes that never run at the same time. Retention removes
them with the parts. The module imports without torch; threads that read are started and joined within a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from lakeckpt.checkpoint.format.parts import PARTS, SaveId
from lakeckpt.errors import MissingRanksError, ObjectMissing, SaveFailed, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.rounds import (
    Rounds,
    answer_to_bytes,
    facts_from_bytes,
    facts_to_bytes,
    tally_from_bytes,
)
from lakeckpt.tracking.tally import Tally, name_ranks, ranks_of
from lakeckpt.tracking.waiting import LONGEST_S, Waiter, poll

__all__ = ["RecordTalk"]

_READ_THREADS = 16
_T = TypeVar("_T")


class RecordTalk(Rounds):
    """The rounds of one rank for one save."""

    def __init__(
        self,
        storage: Storage,
        save: SaveId,
        *,
        rank: int,
        world_size: int,
        waiter: Waiter,
        timeout_s: float,
        obstacles: Callable[[], None] = lambda: None,
        pause_s: float = LONGEST_S,
    ) -> None:
        """``obstacles``: called whenever nothing was found yet; raises if waiting is in vain.
        ``pause_s``: the longest pause between two looks."""
        super().__init__(rank=rank, world_size=world_size)
        self._storage, self._save = storage, save
        self._folder = f"{PARTS}/{save.folder}"
        self._timeout_s = timeout_s
        self._poll = partial(poll, waiter=waiter, longest_s=pause_s, obstacles=obstacles)

    def state_alone(self, facts: Mapping[str, str]) -> None:
        """Take part in a round without waiting for it: rank 0 answers with its own facts."""
        number = self._next_round()
        if self.rank:
            self._send(number, facts_to_bytes(facts))
        elif self.world_size > 1:
            self._answer(number, answer_to_bytes(Tally.of([facts])))

    def _send(self, number: int, data: bytes) -> None:
        self._storage.put(f"{self._folder}/{self.rank:05d}.facts-{number}", [data])

    def _answer(self, number: int, data: bytes) -> bytes:
        self._storage.put(f"{self._folder}/answer-{number}", [data])
        return data

    def _collect(self, number: int) -> Sequence[Mapping[str, str]]:
        names = {f"{self._folder}/{rank:05d}.facts-{number}": rank for rank in range(1, self.world_size)}
        found: dict[str, Mapping[str, str]] = {}

        def look() -> bool | None:
            listed = {info.path for info in self._storage.list(self._folder)}
            new = [path for path in names if path in listed and path not in found]
            found.update(zip(new, pool.map(lambda path: self._read(path, facts_from_bytes), new), strict=True))
            return len(found) == len(names) or None

        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-records") as pool:
            is_complete = self._poll(look, timeout_s=self._timeout_s)
        if is_complete is None:
            silent = ranks_of(rank for path, rank in names.items() if path not in found)
            raise MissingRanksError(
                f"{name_ranks(silent)} of {self.world_size} wrote nothing of the save of step {self._save.step} within "
                f"{self._timeout_s:g} s: see the logs of their agents; nothing was committed"
            )
        return [found[path] for path in names]

    def _await_answer(self, number: int) -> Tally:
        def look() -> Tally | None:
            try:
                return self._read(f"{self._folder}/answer-{number}", tally_from_bytes)
            except ObjectMissing:
                return None

        timeout_s = 2 * self._timeout_s  # rank 0 waits for all others first, as long as it may
        answer = self._poll(look, timeout_s=timeout_s)
        if answer is None:
            raise MissingRanksError(
                f"rank 0 of {self.world_size} did not answer for the save of step {self._save.step} within "
                f"{timeout_s:g} s: see the log of its agent; nothing was committed"
            )
        return answer

    def _read(self, path: str, decode: Callable[[bytes], _T]) -> _T:
        try:
            return decode(self._storage.read(path))
        except WireError as error:
            raise SaveFailed(f"{path} does not read back as it was written: {error}") from error
