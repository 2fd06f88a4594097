"""This module lets the ranks of a job compare facts and leave notes, through the job's own key-value store.

torch.distributed starts a job through a store: a `TCPStore` of torchrun or of rank 0, or a `FileStore`. In each round a
rank writes its facts there; rank 0 reads them all, adds them up and writes the answer. A round has one answer, whoever
writes it: if rank 0 is late, a rank that has waited long enough answers that rank 0 is missing, and rank 0 takes that
answer as well. A timeout closes nothing: a rank that was late takes part in the next round. Keys are removed when they
were read.

The module opens no connection, starts no threads, uses no collective and never touches a GPU. The store is gone when
its host has ended: no state that must survive a death lies in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lakeckpt.data.base.torch_private import job_store
from lakeckpt.errors import LakeckptError, MissingRanksError
from lakeckpt.tracking.obstacles import PROCESS, JobObstacles, Notes, Obstacles, own_process
from lakeckpt.tracking.rounds import Rounds, answer_to_bytes, facts_from_bytes, tally_from_bytes
from lakeckpt.tracking.tally import Tally, name_ranks, ranks_of
from lakeckpt.tracking.waiting import SystemWaiter, Waiter, poll

__all__ = ["Exchange", "StoreExchange", "exchange_of_group"]

_PAUSE_S = 0.1
"""The longest pause between two looks into the store."""
_FAREWELL_S = 5.0
_DEATH_S = 0.5
"""How long the end of a process may take, whose store is gone."""


class Exchange(Rounds, Notes):
    """Messages between the ranks of a job. One thread of each rank calls it, in the same order on every rank.

    This class serves a job of one rank.
    """

    def __init__(self, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(rank=rank, world_size=world_size)
        self.obstacles = Obstacles(rank)
        """Why waiting for other ranks is in vain. Any thread may ask."""

    def fetch(self, key: str, /) -> bytes:
        """Wait for a note of rank 0 and return it. All other ranks fetch it once; the last of them removes it.

        Raises `MissingRanksError` if the note does not come within the timeout, or rank 0 has stopped.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Remove the keys of the last round; no round follows. May be called again, and never raises."""


class StoreExchange(Exchange):
    """Messages between ``world_size`` ranks over ``store``. ``timeout_s`` is how long a rank waits for another one.

    Collective: all ranks make one. Raises `MissingRanksError` naming the ranks that do not.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, timeout_s: float, waiter: Waiter | None = None
    ) -> None:
        super().__init__(rank=rank, world_size=world_size)
        self._timeout_s = timeout_s
        self._waiter = SystemWaiter() if waiter is None else waiter
        self._entrance = store
        self._callers: dict[int, bytes] = {}
        self._name = uuid4().hex
        self._answers: list[str] = []  # keys of answers that are still in the store
        self._is_gone = False
        self.obstacles: JobObstacles = JobObstacles(self, rank)
        if rank:
            self._name = self._ask_for_the_name()
        self._store = PrefixStore(self._name, store)
        self.obstacles.watch(self.everyone({PROCESS: own_process()}))

    # --- meeting: the store may hold keys of ranks that have died, as torchrun keeps it while it starts ranks again

    def _ask_for_the_name(self) -> str:
        """Return the name under which rank 0 keeps the keys of this exchange. The answer is to this process alone."""
        welcome = f"welcome/{self._name}"
        with self._reaching_the_store():
            self._entrance.set(f"hello/{self.rank}", self._name)
            look = partial(_checked, self._entrance, welcome)
            if poll(look, waiter=self._waiter, timeout_s=2 * self._timeout_s, longest_s=_PAUSE_S) is None:
                raise self._missing([0])
            name: str = self._entrance.get(welcome).decode("ascii")
            self._entrance.delete_key(welcome)
            return name

    def _welcome(self) -> None:
        """Answer each rank that asks for the name. A caller that has died is answered in vain."""
        for rank in range(1, self.world_size):
            key = f"hello/{rank}"
            if self._entrance.check([key]) and (caller := self._entrance.get(key)) != self._callers.get(rank):
                self._callers[rank] = caller
                self._entrance.set(f"welcome/{caller.decode('ascii')}", self._name)

    # --- rounds

    def _send(self, number: int, data: bytes) -> None:
        with self._reaching_the_store():
            _set(self._store, _message(number, self.rank), data)
            if number:  # it is there where this rank has waited for rank 0 in vain
                self._store.delete_key(_message(number - 1, self.rank))

    def _collect(self, number: int) -> Sequence[Mapping[str, str]]:
        keys = {rank: _message(number, rank) for rank in range(1, self.world_size)}

        def look() -> bool | None:
            if number == 0:
                self._welcome()
            return self._store.check(list(keys.values())) or self._store.check([_answer(number)]) or None

        def absent() -> list[int]:
            return [rank for rank, key in keys.items() if not self._store.check([key])]

        with self._reaching_the_store():
            if self._poll(look, 1, absent) is None:
                raise self._missing(absent())
            if self._store.check([_answer(number)]):
                raise self._missing([0])  # as a rank that has waited for this one has answered
            found = list(map(facts_from_bytes, self._store.multi_get(list(keys.values()))))
            self._remove_answers()  # as every rank is past the rounds before
            for rank in self._callers:
                self._entrance.delete_key(f"hello/{rank}")
            self._callers.clear()
        return found

    def _answer(self, number: int, data: bytes) -> bytes:
        self._answers.append(_answer(number))
        with self._reaching_the_store():
            return _put_once(self._store, _answer(number), data)

    def _await_answer(self, number: int) -> Tally:
        look = partial(_checked, self._store, _answer(number))
        with self._reaching_the_store():
            # Rank 0 may come late, and then waits for the others.
            if self._poll(look, 2, lambda: [] if look() else [0]):
                answer: bytes = self._store.get(_answer(number))
                self._store.delete_key(_message(number, self.rank))  # rank 0 sees by this that the answer was read
            else:
                answer = _put_once(self._store, _answer(number), answer_to_bytes(self._missing([0])))
        return tally_from_bytes(answer)

    def _poll(self, look: Callable[[], bool | None], patience: int, absent: Callable[[], Sequence[int]]) -> bool | None:
        """Wait for the ranks that are ``absent``, which raises if one of them is gone."""
        return poll(
            look,
            waiter=self._waiter,
            timeout_s=patience * self._timeout_s,
            longest_s=_PAUSE_S,
            obstacles=lambda: self.obstacles.refuse_absent(absent),
        )

    def _missing(self, ranks: Sequence[int]) -> MissingRanksError:
        return MissingRanksError(
            f"{name_ranks(ranks_of(ranks))} of {self.world_size} did not answer within {self._timeout_s:g} s, and may "
            "be gone: see their logs; nothing was committed"
        )

    def _remove_answers(self) -> None:
        for key in self._answers:
            self._store.delete_key(key)
        self._answers.clear()

    @contextlib.contextmanager
    def _reaching_the_store(self) -> Iterator[None]:
        """Raise `MissingRanksError` if the store fails."""
        try:
            yield
        except LakeckptError:
            raise
        except RuntimeError as error:
            self._is_gone = True
            self._refuse_ended()
            raise MissingRanksError(
                "the store over which the ranks of this job talk is gone: its host (rank 0, or the launcher) has "
                f"ended; see its log ({error})"
            ) from error

    def _refuse_ended(self) -> None:
        """Raise if the process of a rank has ended. The kernel closes its connections before it reports its end."""
        everyone = range(self.world_size)
        poll(
            lambda: None,
            waiter=self._waiter,
            timeout_s=_DEATH_S,
            longest_s=_PAUSE_S,
            obstacles=lambda: self.obstacles.refuse_absent(lambda: everyone),
        )

    # --- notes

    def publish(self, key: str, data: bytes, /) -> None:
        """See `Exchange`."""
        with self._reaching_the_store():
            _set(self._store, key, data)

    def publish_once(self, key: str, data: bytes, /) -> None:
        """See `Exchange`."""
        with self._reaching_the_store():
            _put_once(self._store, key, data)

    def peek(self, key: str, /) -> bytes | None:
        """See `Exchange`. A store that is gone is not asked again, because torch then prints a page each time."""
        if self._is_gone:
            return None
        try:
            return self._store.get(key) if self._store.check([key]) else None
        except RuntimeError:
            self._is_gone = True
            return None

    def fetch(self, key: str, /) -> bytes:
        """See `Exchange`."""
        look = partial(_checked, self._store, key)
        with self._reaching_the_store():
            if self._poll(look, 1, lambda: [] if look() else [0]) is None:
                raise MissingRanksError(f"rank 0 did not announce {key!r} within {self._timeout_s:g} s: see its log")
            data: bytes = self._store.get(key)
            if self._store.add(f"{key}/readers", 1) == self.world_size - 1:
                for used in (key, f"{key}/readers"):
                    self._store.delete_key(used)
            return data

    def close(self) -> None:
        """See `Exchange`. Rank 0, whose process may host the store, waits a moment for ranks that have not read the
        last answer yet."""
        self.obstacles.close()
        if self.rank or not self._answers:
            return
        last = [_message(self._round - 1, rank) for rank in range(1, self.world_size)]
        with contextlib.suppress(RuntimeError):
            poll(
                lambda: not any(self._store.check([key]) for key in last) or None,
                waiter=self._waiter,
                timeout_s=min(_FAREWELL_S, self._timeout_s),
                longest_s=_PAUSE_S,
            )
            self._remove_answers()
        self._answers.clear()


def exchange_of_group(group: dist.ProcessGroup | None, *, timeout_s: float) -> Exchange:
    """Return the exchange between the ranks of ``group`` (None: all ranks of the job), whatever its backend is."""
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    if len(ranks) == 1:
        return Exchange()
    name = blake2b(" ".join(map(str, ranks)).encode(), digest_size=8).hexdigest()
    return StoreExchange(
        PrefixStore(f"lakeckpt/{name}", job_store(len(ranks))),
        rank=dist.get_rank(group),
        world_size=len(ranks),
        timeout_s=timeout_s,
    )


def _message(number: int, rank: int) -> str:
    return f"{number}/{rank}"


def _answer(number: int) -> str:
    return f"{number}/answer"


def _set(store: Store, key: str, data: bytes) -> None:
    store.set(key, data)  # type: ignore[arg-type]  # torch takes bytes, too


def _put_once(store: Store, key: str, data: bytes) -> bytes:
    """Set a key that has no value, and return its value, which another rank may have set before."""
    found: bytes = store.compare_set(key, "", data)  # type: ignore[arg-type]
    return found


def _checked(store: Store, key: str) -> bool | None:
    """Return True if there is a value of that key, else None."""
    return store.check([key]) or None
