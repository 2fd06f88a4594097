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
from hashlib import blake2b
from typing import TypeVar
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lakeckpt.data.base.torch_private import job_store
from lakeckpt.errors import LakeckptError, MissingRanksError
from lakeckpt.tracking.notes import LEFT, STOPPED, Note, error_to_text
from lakeckpt.tracking.peers import PROCESS, Peers, own_process
from lakeckpt.tracking.rounds import Rounds, answer_to_bytes, facts_from_bytes, tally_from_bytes
from lakeckpt.tracking.tally import Tally, name_ranks, ranks_of
from lakeckpt.tracking.waiting import SystemWaiter, Waiter, poll

__all__ = ["Exchange", "StoreExchange", "exchange_of_group"]

_T = TypeVar("_T")
_PAUSE_S = 0.1
"""The longest pause between two looks into the store."""
_FAREWELL_S = 5.0


class Exchange(Rounds):
    """Messages between the ranks of a job. One thread of each rank calls it, in the same order on every rank.

    This class serves a job of one rank, which has nobody to leave notes for.
    """

    def publish(self, key: str, data: bytes, /) -> None:
        """Write a note that every rank can read; never waits for another rank."""

    def peek(self, key: str, /) -> bytes | None:
        """Return the note of that key; None if there is none, and if the store that held it is gone."""
        return None

    def fetch(self, key: str, /) -> bytes:
        """Wait for a note of rank 0 and return it. All other ranks fetch it once; the last of them removes it.

        Raises `MissingRanksError` if the note does not come within the timeout, or rank 0 has stopped.
        """
        raise NotImplementedError

    def ended(self) -> int | None:
        """Return a rank of this node whose process has ended; None if none is known. Any thread may call it."""
        return None

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
        self._peers: Peers | None = None
        if rank:
            self._name = self._ask_for_the_name()
        self._store = PrefixStore(self._name, store)
        self._peers = Peers(self.everyone({PROCESS: own_process()}), rank=rank)

    # --- meeting: the store may hold keys of ranks that have died, as torchrun keeps it while it starts ranks again

    def _ask_for_the_name(self) -> str:
        """Return the name under which rank 0 keeps the keys of this exchange. The answer is to this process alone."""
        welcome = f"welcome/{self._name}"
        with _reaching_the_store():
            self._entrance.set(f"hello/{self.rank}", self._name)
            if self._poll(lambda: self._entrance.check([welcome]) or None, 2) is None:
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
        with _reaching_the_store():
            _set(self._store, _message(number, self.rank), data)
            if number:  # it is there where this rank has waited for rank 0 in vain
                self._store.delete_key(_message(number - 1, self.rank))

    def _collect(self, number: int) -> Sequence[Mapping[str, str]]:
        keys = {rank: _message(number, rank) for rank in range(1, self.world_size)}

        def look() -> bool | None:
            if number == 0:
                self._welcome()
            if self._store.check(list(keys.values())) or self._store.check([_answer(number)]):
                return True
            self._refuse_stopped(absent)
            return None

        def absent() -> list[int]:
            return [rank for rank, key in keys.items() if not self._store.check([key])]

        with _reaching_the_store():
            if self._poll(look, 1) is None:
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
        with _reaching_the_store():
            return _put_once(self._store, _answer(number), data)

    def _await_answer(self, number: int) -> Tally:
        def look() -> bytes | None:
            if self._store.check([_answer(number)]):
                found: bytes = self._store.get(_answer(number))
                return found
            self._refuse_stopped(lambda: [] if self._store.check([_answer(number)]) else [0])
            return None

        with _reaching_the_store():
            answer = self._poll(look, 2)  # rank 0 may come late, and then waits for the others
            if answer is None:
                answer = _put_once(self._store, _answer(number), answer_to_bytes(self._missing([0])))
            else:
                self._store.delete_key(_message(number, self.rank))  # rank 0 sees by this that the answer was read
        return tally_from_bytes(answer)

    def _poll(self, look: Callable[[], _T | None], patience: int) -> _T | None:
        return poll(look, waiter=self._waiter, timeout_s=patience * self._timeout_s, longest_s=_PAUSE_S)

    def _refuse_stopped(self, absent: Callable[[], list[int]]) -> None:
        """Raise if one of the ranks that are waited for has stopped. A rank may do its part and then stop."""
        self._note_ended()
        for key in (STOPPED, LEFT):
            if self._store.check([key]):
                note = Note.from_bytes(self._store.get(key))
                if note.rank in absent():
                    raise MissingRanksError(f"rank {note.rank} has stopped: {note.cause}")

    def _note_ended(self) -> None:
        """Leave the note of a rank whose process has ended without one. After a rank has left, the others may end."""
        if (rank := self.ended()) is not None and not any(self._store.check([key]) for key in (STOPPED, LEFT)):
            error = MissingRanksError(f"the process of rank {rank} has ended: see its log")
            _set(self._store, STOPPED, Note(rank=rank, error=error_to_text(error)).to_bytes())

    def ended(self) -> int | None:
        """See `Exchange`."""
        return None if self._peers is None else self._peers.ended()

    def _missing(self, ranks: Sequence[int]) -> MissingRanksError:
        return MissingRanksError(
            f"{name_ranks(ranks_of(ranks))} of {self.world_size} did not answer within {self._timeout_s:g} s, and may "
            "be gone: see their logs; nothing was committed"
        )

    def _remove_answers(self) -> None:
        for key in self._answers:
            self._store.delete_key(key)
        self._answers.clear()

    # --- notes

    def publish(self, key: str, data: bytes, /) -> None:
        """See `Exchange`."""
        with _reaching_the_store():
            _set(self._store, key, data)

    def peek(self, key: str, /) -> bytes | None:
        """See `Exchange`. A store that is gone is not asked again, because torch then prints a page each time."""
        if self._is_gone:
            return None
        try:
            if key == STOPPED:
                self._note_ended()
            return self._store.get(key) if self._store.check([key]) else None
        except RuntimeError:
            self._is_gone = True
            return None

    def fetch(self, key: str, /) -> bytes:
        """See `Exchange`."""

        def look() -> bool | None:
            if self._store.check([key]):
                return True
            self._refuse_stopped(lambda: [] if self._store.check([key]) else [0])
            return None

        with _reaching_the_store():
            if self._poll(look, 1) is None:
                raise MissingRanksError(f"rank 0 did not announce {key!r} within {self._timeout_s:g} s: see its log")
            data: bytes = self._store.get(key)
            if self._store.add(f"{key}/readers", 1) == self.world_size - 1:
                for used in (key, f"{key}/readers"):
                    self._store.delete_key(used)
            return data

    def close(self) -> None:
        """See `Exchange`. Rank 0, whose process may host the store, waits a moment for ranks that have not read the
        last answer yet."""
        if self._peers is not None:
            self._peers.close()
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


@contextlib.contextmanager
def _reaching_the_store() -> Iterator[None]:
    """Raise `MissingRanksError` if the store fails."""
    try:
        yield
    except LakeckptError:
        raise
    except RuntimeError as error:
        raise MissingRanksError(
            "the store over which the ranks of this job talk is gone: its host (rank 0, or the launcher) has ended; "
            f"see its log ({error})"
        ) from error
