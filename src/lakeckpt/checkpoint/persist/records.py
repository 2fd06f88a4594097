"""How do ranks agree when none of them waits for another's process?  Through immutable records in storage.

For each round of an agreement every rank puts what it says beside the parts of the save; rank 0 reads all of it and
puts what follows (or what is wrong with it), which the others wait for: two puts deep, however many ranks there are.
Names are of the save, the round and the rank, and are written once. A rank that gives the save up leaves its note
there, and everybody who waits sees it; one that is silent is named when the deadline has passed.

It needs no process group, no port and no thread, and works between processes that never run at the same time.
Retention removes the records with the parts. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lakeckpt.checkpoint.failures import failure_published, gave_up
from lakeckpt.checkpoint.format.fields import fields_of, taken
from lakeckpt.checkpoint.format.parts import PARTS, SaveId
from lakeckpt.checkpoint.persist.agreement import Merge
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import (
    CheckpointError,
    MissingRanksError,
    ObjectMissing,
    SaveFailed,
    TrackingError,
    WireError,
    error_of,
)
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.tally import name_ranks
from lakeckpt.tracking.waiting import LONGEST_S, Waiter, poll
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["RecordTalk"]

_KIND, _VERSION = "said", (1, 0)
_READ_THREADS = 16
_T = TypeVar("_T")


class RecordTalk:
    """What one rank says of one save, and hears: a `lakeckpt.checkpoint.persist.agreement.Talk`. Made anew for
    each save.
    """

    def __init__(
        self,
        storage: Storage,
        save: SaveId,
        *,
        rank: int,
        world_size: int,
        waiter: Waiter,
        timeout_s: float,
        still: Callable[[], None] = lambda: None,
        linger_s: float = 0.0,
        pause_s: float = LONGEST_S,
    ) -> None:
        """``still``: called whenever nothing was heard yet; raises where there is nobody to wait for any more.
        ``linger_s``: how much longer than ``timeout_s`` others may take until they begin. ``pause_s``: how long it
        waits at the most before it looks again."""
        self.rank, self.world_size = rank, world_size
        self._storage, self._save = storage, save
        self._waiter, self._timeout_s = waiter, timeout_s
        self._still, self._linger_s, self._pause_s = still, linger_s, pause_s
        self._round = 0

    def combine(self, data: bytes, merge: Merge, /) -> bytes:
        """See `Talk`. Raises on every rank what ``merge`` raised on rank 0, `MissingRanksError` naming the ranks that
        did not say anything in time, and `SaveFailed` naming one that gave the save up."""
        number, self._round = self._round, self._round + 1
        if self.world_size == 1:
            return merge([data])
        if self.rank:
            self._put(f"{self.rank:05d}.says-{number}", {"data": data})
            return self._hear(number)
        try:
            said = self._collect(number)
            result = merge([data, *(said[rank] for rank in sorted(said))])
        except TrackingError as error:
            self._put(f"said-{number}", {"error": error.kind, "text": str(error)})
            raise
        self._put(f"said-{number}", {"data": result})
        return result

    def settle(self, data: bytes) -> None:
        """Say what follows, whatever others say, on rank 0; on others, what `combine` does, without hearing of it."""
        number, self._round = self._round, self._round + 1
        if self.world_size > 1:
            self._put(f"{self.rank:05d}.says-{number}" if self.rank else f"said-{number}", {"data": data})

    def _put(self, name: str, value: Mapping[str, object]) -> None:
        self._storage.put(f"{self._folder}/{name}", [dumps(dict(value), kind=_KIND, version=_VERSION)])

    @property
    def _folder(self) -> str:
        return f"{PARTS}/{self._save.folder}"

    def _collect(self, number: int) -> dict[int, bytes]:
        """What each of the other ranks says."""
        found: dict[int, bytes] = {}
        others = range(1, self.world_size)
        names = {f"{self._folder}/{rank:05d}.says-{number}": rank for rank in others}

        def look() -> bool | None:
            listed = {info.path for info in self._storage.list(self._folder)}
            try:
                self._refuse_given_up(listed)
            except CheckpointError as error:  # the others look for what rank 0 puts, and not for every rank's note
                self._put(f"said-{number}", {"error": error.kind, "text": str(error)})
                raise
            new = [path for path in listed & names.keys() if names[path] not in found]
            for path, document in zip(new, pool.map(self._read, new), strict=True):
                found[names[path]] = taken(document, "data", bytes)
            if len(found) == len(others):
                return True
            self._still()
            return None

        timeout_s = self._timeout_s + self._linger_s
        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-records") as pool:
            is_complete = self._poll(look, timeout_s)
        if is_complete is None:
            silent = Intervals.of([(rank, rank + 1) for rank in others if rank not in found])
            raise MissingRanksError(
                f"{name_ranks(silent)} of {self.world_size} said nothing of the save of step {self._save.step} within "
                f"{timeout_s:g} s: see the logs of their agents; nothing was committed"
            )
        return found

    def _hear(self, number: int) -> bytes:
        """What follows from what all say, as rank 0 has put it."""
        path = f"{self._folder}/said-{number}"

        def look() -> Mapping[str, object] | None:
            try:
                return self._read(path)
            except ObjectMissing:
                failure = failure_published(self._storage, self._save, 0)
                if failure is not None:
                    raise failure from None
                self._still()
                return None

        # Rank 0 waits for all others first, as long as it may.
        timeout_s = 2 * self._timeout_s + self._linger_s
        heard = self._poll(look, timeout_s)
        if heard is None:
            raise MissingRanksError(
                f"rank 0 of {self.world_size} did not say what follows for the save of step {self._save.step} within "
                f"{timeout_s:g} s: see the log of its agent; nothing was committed"
            )
        if "error" in heard:
            raise error_of(taken(heard, "error", str), taken(heard, "text", str), otherwise=TrackingError)
        return taken(heard, "data", bytes)

    def _read(self, path: str) -> Mapping[str, object]:
        try:
            document = loads(self._storage.read(path), kind=_KIND, supported=_VERSION)
            return fields_of(document.value, "what a rank says")
        except WireError as error:
            raise SaveFailed(f"{path} does not read back as it was written: {error}") from error

    def _poll(self, look: Callable[[], _T | None], timeout_s: float) -> _T | None:
        return poll(look, waiter=self._waiter, timeout_s=timeout_s, longest_s=self._pause_s)

    def _refuse_given_up(self, listed: set[str]) -> None:
        for rank in range(self.world_size):
            if rank != self.rank and (path := self._save.failure_path(rank)) in listed:
                raise gave_up(self._storage, path, rank)
