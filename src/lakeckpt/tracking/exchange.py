"""This module lets the ranks of a job compare facts and leave notes, through the job's own key-value store.

torch.distributed starts a job through a store: a `TCPStore` of torchrun or of rank 0, or a `FileStore`. In each round a
rank counts itself (`lakeckpt.tracking.ballots`); only a rank that has facts writes them there. When all have come, rank
0 reads the facts and writes the answer. Waits block in the store (`lakeckpt.tracking.key_waits`); from time to time, a
rank that waits asks why it may wait in vain, and looks at the clock. A round has one answer, whoever writes it: if rank
0 is late, a rank that has waited long enough answers that rank 0 is missing, and rank 0 takes that answer as well. A
timeout closes nothing: a rank that was late takes part in the next round. Keys are removed when they were read.

The module uses no collective and never touches a GPU; its threads are those of waits. The store is gone when its host
has ended: no state that must survive a death lies in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lakeckpt.data.base.torch_private import job_store
from lakeckpt.errors import LakeckptError, MissingRanksError
from lakeckpt.tracking.ballots import READ, SILENT, Ballot
from lakeckpt.tracking.key_waits import KeyWaits
from lakeckpt.tracking.obstacles import JobObstacles, Notes, Obstacles, own_node, own_process
from lakeckpt.tracking.rounds import Rounds, answer_to_bytes, facts_from_bytes, tally_from_bytes
from lakeckpt.tracking.tally import Tally, name_ranks, ranks_of
from lakeckpt.tracking.waiting import SystemWaiter, Waiter, poll

__all__ = ["Exchange", "StoreExchange", "exchange_of_group"]

_FIRST_S, _SHORT_S, _LONG_S = 0.005, 0.1, 2.0
"""The first pause of a rank that looks for a key; and how often a rank that waits asks why it may wait in vain, in a
small job and in a large one."""
_RANKS_PER_S = 1000
"""So many ranks may ask in a second."""
_NOTHING = answer_to_bytes(Tally(facts={}))
"""The answer of a vote without objections."""
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
        self.neighbours: Sequence[int] = (rank,)
        """The ranks on this node, this rank among them, in ascending order."""

    def fetch(self, key: str, /) -> bytes:
        """Wait for a note of rank 0 and return it. All other ranks fetch it once; the last of them removes it.

        Raises `MissingRanksError` if the note does not come within the timeout, or rank 0 has stopped.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Remove the keys of the last round; no round follows. May be called again, and never raises."""


class StoreExchange(Exchange):
    """Messages between ``world_size`` ranks over ``store``. ``timeout_s`` is how long a rank waits for another one.
    ``node``: what ranks of one machine have in common, to be neighbours.

    Collective: all ranks make one. Raises `MissingRanksError` naming the ranks that do not.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        node: str = "",
        waiter: Waiter | None = None,
    ) -> None:
        super().__init__(rank=rank, world_size=world_size)
        self._timeout_s = timeout_s
        self._waiter = SystemWaiter() if waiter is None else waiter
        self._entrance = store
        self._callers: set[int] = set()  # that were not answered yet
        self._called = 0
        self._name = uuid4().hex
        self._keys: list[tuple[int, str]] = []  # that this rank removes, with the round that uses them last
        self._present: Sequence[int] = ()  # the ranks that have come to the last round that rank 0 has collected
        self._texts: Sequence[str] = ()  # the facts of the last round that rank 0 has read
        self._readers = 0  # so many ranks read the last answer of rank 0: it says something, or they came early
        self._is_gone = False
        self._waits: KeyWaits | None = None
        self.obstacles: JobObstacles = JobObstacles(self, rank)
        if rank:
            self._name = self._ask_for_the_name()
        self._store = PrefixStore(self._name, store)
        self.neighbours = self._meet(node)

    # --- meeting: the store may hold keys of ranks that have died, as torchrun keeps it while it starts ranks again

    def _ask_for_the_name(self) -> str:
        """Return the name under which rank 0 keeps the keys of this exchange. The answer is to this process alone."""
        welcome = f"welcome/{self._name}"
        with self._reaching_the_store():
            number = self._entrance.add("callers", 1)
            self._entrance.set(f"caller/{number}", self._name)
            if not self._until(welcome, 2, store=self._entrance, wake=welcome):
                raise self._missing([0])
            name: str = self._entrance.get(welcome).decode("ascii")
            self._entrance.delete_key(welcome)
            return name

    def _welcome(self) -> None:
        """Answer each rank that asks for the name. A caller that has died is answered in vain."""
        if not self._called and self._entrance.check(["callers/answered"]):
            self._called = int(self._entrance.get("callers/answered"))
        last = self._entrance.add("callers", 0)
        self._callers.update(range(self._called + 1, last + 1))
        self._called = last
        for number in sorted(self._callers):
            key = f"caller/{number}"
            if self._entrance.check([key]):
                self._entrance.set(f"welcome/{self._entrance.get(key).decode('ascii')}", self._name)
                self._entrance.delete_key(key)
                self._callers.discard(number)

    def _meet(self, node: str) -> Sequence[int]:
        """Return the neighbours of this rank when all ranks have come. Watch the processes of this machine from then
        on."""
        key = f"machine/{own_node() or uuid4().hex}"
        with self._reaching_the_store():
            place = self._store.add(key, 1)
            _set(self._store, f"{key}/{place}", f"{self.rank}\n{own_process()}\n{node}".encode())
        self._keys += [(0, f"{key}/{place}"), *([(0, key)] if place == 1 else ())]
        self.everyone({})
        with self._reaching_the_store():
            count = self._store.add(key, 0)
            found = [one.decode() for one in self._store.multi_get([f"{key}/{at + 1}" for at in range(count)])]
        every = [one.split("\n", 2) for one in found]
        self.obstacles.watch({int(rank): process for rank, process, _ in every})
        return sorted(int(rank) for rank, _, theirs in every if theirs == node)

    # --- rounds

    def _send(self, number: int, data: bytes) -> None:
        ballot = self._ballot(number)
        with self._reaching_the_store():
            if data:
                _set(self._store, ballot.text(self.rank), data)
                self._keys.append((number, ballot.text(self.rank)))
            ballot.come(self.rank, has_text=bool(data))

    def _collect(self, number: int) -> Sequence[Mapping[str, str]]:
        ballot = self._ballot(number)
        with self._reaching_the_store():
            try:
                self._await_all(number, ballot)
            except LakeckptError:
                self._present = sorted(set(range(1, self.world_size)) - set(ballot.absent()))
                raise
            self._present = range(1, self.world_size)
            ranks = ballot.with_text()
            self._texts = [ballot.text(rank) for rank in ranks]
            data = self._store.multi_get(self._texts) if ranks else []
            found = dict(zip(ranks, map(facts_from_bytes, data), strict=True))
            self._remove_before(number)  # as every rank is past the rounds before
            if number == 0:
                self._entrance.set("callers/answered", str(self._called))
        return [found.get(rank, {}) for rank in range(1, self.world_size)]

    def _await_all(self, number: int, ballot: Ballot) -> None:
        """Return when all ranks have come to a round. Raises `MissingRanksError`."""
        first = number == 0
        came = self._until(
            ballot.complete,
            1,
            ballot.absent,
            wake=None if first else ballot.complete,
            meanwhile=self._welcome if first else None,
        )
        if not came and (absent := ballot.absent()):
            raise self._missing(absent)  # if none is: a rank has died between its bit and the count
        if self._store.check([ballot.answer]):
            raise self._missing([0])  # as a rank that has waited for this one has answered

    def _answer(self, number: int, data: bytes) -> bytes:
        ballot = self._ballot(number)
        self._keys += [(number, key) for key in ballot.keys]
        with self._reaching_the_store():
            found = _put_once(self._store, ballot.answer, data)
            self._readers = len(self._present)
            if found == _NOTHING:  # ranks that have come by now read it, all others need not
                self._readers = self._store.add(ballot.read, SILENT) % SILENT % READ
            if wakes := list(map(ballot.wake, self._present)):
                self._store.multi_set(wakes, ["1"] * len(wakes))  # type: ignore[attr-defined]  # torch has it
            return found

    def _await_answer(self, number: int) -> Tally:
        ballot = self._ballot(number)
        key, wake = ballot.answer, ballot.wake(self.rank)
        with self._reaching_the_store():
            # Rank 0 may come late, and then waits for the others.
            if self._until(key, 2, lambda: [] if self._store.check([key]) else [0], wake=wake):
                says_nothing = self._store.add(ballot.read, 1) > SILENT
                answer: bytes = _NOTHING if says_nothing else self._store.get(key)
                if not says_nothing:
                    self._store.add(ballot.read, READ)
                if not answer:  # rank 0 has ended, and the answer went with it, before this rank came to read it
                    raise self._missing([0])
            else:
                answer = _put_once(self._store, key, answer_to_bytes(self._missing([0])))
                ballot.end()  # rank 0 waits for nobody, and takes this answer
                self._store.add(ballot.read, READ + 1)
            self._keys.append((number, wake))
            tally = tally_from_bytes(answer)
            self._remove_before(number)
        return tally

    def _ballot(self, number: int) -> Ballot:
        return Ballot(self._store, str(number), self.world_size)

    def _until(
        self,
        key: str,
        patience: float,
        absent: Callable[[], Sequence[int]] | None = None,
        *,
        store: Store | None = None,
        wake: str | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> bool:
        """Wait for a value of ``key``, for ``patience`` times the timeout. Return whether there is one.

        It raises if one of the ranks that are ``absent`` is gone. ``wake``: the key that is set when there is a value,
        and for which this rank alone waits; None: this rank looks again and again, and calls ``meanwhile``.
        """
        store = self._store if store is None else store
        limit_s, longest_s = patience * self._timeout_s, min(_LONG_S, max(_SHORT_S, self.world_size / _RANKS_PER_S))
        until_s, pause_s = self._waiter.now() + limit_s, _FIRST_S

        def looked(seconds: float) -> bool:
            if meanwhile is not None:
                meanwhile()
            if store.check([key]):
                return True
            self._waiter.wait(seconds)
            return False

        look: Callable[[float], bool] = looked
        with contextlib.ExitStack() as stack:
            if wake is not None and _can_block(store):
                look, pause_s = stack.enter_context(self._waits_in(store).on(wake, limit_s)), longest_s
            while not look(pause_s):
                if wake is not None and store.check([key]):  # nobody wakes a rank that comes late
                    return True
                if absent is not None:
                    self.obstacles.refuse_absent(absent)
                if self._waiter.now() >= until_s:
                    return bool(store.check([key]))
                pause_s = min(2 * pause_s, longest_s)
        return True

    def _waits_in(self, store: Store) -> KeyWaits:
        if self._waits is None or self._waits.store is not store:
            self._waits = KeyWaits(store)
        return self._waits

    def _missing(self, ranks: Sequence[int]) -> MissingRanksError:
        return MissingRanksError(
            f"{name_ranks(ranks_of(ranks))} of {self.world_size} did not answer within {self._timeout_s:g} s, and may "
            "be gone: see their logs; nothing was committed"
        )

    def _remove_before(self, number: int) -> None:
        """Remove keys of the rounds before ``number``, to which all ranks have come."""
        for _, key in [one for one in self._keys if one[0] < number]:
            self._store.delete_key(key)
        self._keys = [one for one in self._keys if one[0] >= number]

    @contextlib.contextmanager
    def _reaching_the_store(self) -> Iterator[None]:
        """Raise `MissingRanksError` if the store fails, or has failed before: torch prints a page each time."""
        gone = "the store over which the ranks of this job talk is gone: its host (rank 0, or the launcher) has ended"
        if self._is_gone:
            raise MissingRanksError(f"{gone}; see its log")
        try:
            yield
        except LakeckptError:
            raise
        except RuntimeError as error:
            self._is_gone = True
            self._refuse_ended()
            raise MissingRanksError(f"{gone}; see its log ({error})") from error

    def _refuse_ended(self) -> None:
        """Raise if the process of a rank has ended. The kernel closes its connections before it reports its end."""
        everyone = range(self.world_size)
        poll(
            lambda: None,
            waiter=self._waiter,
            timeout_s=_DEATH_S,
            longest_s=_SHORT_S,
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
        """See `Exchange`. A store that is gone is not asked again."""
        if self._is_gone:
            return None
        try:
            return self._store.get(key) if self._store.check([key]) else None
        except RuntimeError:
            self._is_gone = True
            return None

    def fetch(self, key: str, /) -> bytes:
        """See `Exchange`."""
        with self._reaching_the_store():
            if not self._until(key, 1, lambda: [] if self._store.check([key]) else [0]):
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
        if self.rank or not self._keys or self._is_gone:
            return
        last = self._ballot(self._round - 1)

        def have_read() -> bool | None:
            read, came = divmod(self._store.add(last.read, 0) % SILENT, READ)
            return (came >= len(self._present) and read >= self._readers) or None

        with contextlib.suppress(RuntimeError):
            all_have = poll(
                have_read,
                waiter=self._waiter,
                timeout_s=min(_FAREWELL_S, self._timeout_s),
                longest_s=_SHORT_S,
            )
            used = (*self._texts, *map(last.wake, self._present), *(key for _, key in self._keys))
            for key in used if all_have else ():  # a rank that reads a key that is gone would wait for ever
                self._store.delete_key(key)
        self._keys, self._texts = [], ()


def exchange_of_group(group: dist.ProcessGroup | None, *, timeout_s: float, node: str = "") -> Exchange:
    """Return the exchange between the ranks of ``group`` (None: all ranks of the job), whatever its backend is.
    ``node``: see `StoreExchange`."""
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    if len(ranks) == 1:
        return Exchange()
    name = blake2b(" ".join(map(str, ranks)).encode(), digest_size=8).hexdigest()
    return StoreExchange(
        PrefixStore(f"lakeckpt/{name}", job_store(len(ranks))),
        rank=dist.get_rank(group),
        world_size=len(ranks),
        timeout_s=timeout_s,
        node=node,
    )


def _can_block(store: Store) -> bool:
    """Return whether waits block in the store: not so in a file, at which torch looks a hundred times a second, and in
    torch before 2.8, which cannot open a second connection."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return hasattr(store, "clone") and not isinstance(store, dist.FileStore)  # type: ignore[attr-defined]


def _set(store: Store, key: str, data: bytes) -> None:
    store.set(key, data)  # type: ignore[arg-type]  # torch takes bytes, too


def _put_once(store: Store, key: str, data: bytes) -> bytes:
    """Set a key that has no value, and return its value, which another rank may have set before."""
    found: bytes = store.compare_set(key, "", data)  # type: ignore[arg-type]
    return found
