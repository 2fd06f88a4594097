"""How do the ranks of a job tell each other small things, without pickle and without touching the GPU?

`Exchange` is the seam: combine one message of every rank (a tally), and publish a note that others fetch. `Solo` is a
job of one; `GlooExchange` sends bytes over a gloo group of its own through node leaders: a node's ranks send to their
leader, leaders to the first of them, and the result goes back the same way. A rank that is gone is named to all the
others, and so is what a merge refused, so that every rank raises the same error. Where a rank was silent for too long,
gloo closes the connections of whoever waited: all of them connect again at their next message, also with that rank.

It knows nothing of checkpoints, and its messages are never larger than a tally.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Literal, Protocol
from uuid import uuid4

import torch
import torch.distributed as dist

from lakeckpt import errors
from lakeckpt.core.intervals import Intervals
from lakeckpt.errors import MissingRanksError, TrackingError
from lakeckpt.tracking.tally import name_ranks
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Exchange", "GlooExchange", "Merge", "Solo", "this_node"]

Merge = Callable[[Sequence[bytes]], bytes]
_VERSION = (1, 0)
_LARGEST_BYTES = 2**30
_NOTE_S = 3.0
"""How long a rank whose connection was closed waits to hear whether another one did so, as it had waited too long."""
_KINDS: dict[str, type[TrackingError]] = {
    one.kind: one
    for one in (
        errors.TrackingError,
        errors.MissingRanksError,
    )
}


class Exchange(Protocol):
    """Messages between the ranks of a job. Called by one thread of each rank, in the same order on every rank."""

    rank: int
    world_size: int

    def combine(self, data: bytes, merge: Merge) -> bytes:
        """The ``merge`` of the data of all ranks, on every rank; ``merge`` is associative and commutative.

        Raises on every rank what ``merge`` raised on one (`TrackingError` only), and `MissingRanksError` naming the
        ranks that are gone or did not call within the deadline.
        """
        ...

    def publish(self, key: str, data: bytes) -> None:
        """Leave a note that every rank can fetch; never waits for anyone."""
        ...

    def fetch(self, key: str, *, readers: int | None = None) -> bytes:
        """The note of that key, waiting for it; `MissingRanksError` if it does not come within the deadline.

        With ``readers``, the last of so many removes the note.
        """
        ...

    def peek(self, key: str) -> bytes | None:
        """The note of that key; None where there is none yet, and where the store that held it is gone."""
        ...

    def close(self) -> None:
        """Let go of what the exchange holds; never communicates."""
        ...


class Solo:
    """The exchange of a job of one rank."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}

    def combine(self, data: bytes, merge: Merge) -> bytes:
        """See `Exchange`."""
        return merge([data])

    def publish(self, key: str, data: bytes) -> None:
        """See `Exchange`."""
        self._notes = {key: data}

    def fetch(self, key: str, *, readers: int | None = None) -> bytes:
        """See `Exchange`."""
        return self._notes[key]

    def peek(self, key: str) -> bytes | None:
        """See `Exchange`."""
        return self._notes.get(key)

    def close(self) -> None:
        """See `Exchange`."""
        self._notes = {}


def this_node() -> bytes:
    """16 bytes that tell this machine (since its last start) from others."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read()
    return blake2b(f"{socket.gethostname()}\0{boot}".encode(), digest_size=16).digest()


class GlooExchange:
    """Messages over a gloo group that has the ranks of ``group`` (None: all), whatever backend that one has.

    Made by all of these ranks together; ``timeout_s`` is how long a rank waits for another one. ``node`` (16 bytes,
    by default `this_node`) tells which ranks share a node. `TrackingError` where the ranks cannot connect.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0, node: bytes | None = None
    ) -> None:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        self._timeout_s = timeout_s
        self._stays = ranks is not None
        self._group = _connected(ranks, timedelta(seconds=4 * timeout_s))
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        facts = self._of_every_rank((this_node() if node is None else node) + uuid4().bytes)
        self._nodes = _by_node([fact[:16] for fact in facts])
        self._mine = next(members for members in self._nodes if self.rank in members)
        # The store may hold notes of ranks that are dead: torchrun keeps its own while it starts ranks again.
        name = f"lakeckpt/{facts[0][16:].hex()}"
        self._store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._store_is_gone = False
        self._connection = 0  # how often the ranks connected again
        self._is_closed = False
        self._waited = False  # in vain, at this message

    def _of_every_rank(self, data: bytes) -> list[bytes]:
        """The ``data`` of each rank, which are of one size."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(every, mine, group=self._group)
        return [bytes(found.tolist()) for found in every]

    def combine(self, data: bytes, merge: Merge) -> bytes:
        """See `Exchange`. A leader waits for its node once the deadline, the first leader twice, and so on down."""
        if self._is_closed:
            self._connect_again()
        self._waited = False
        message = self._combined(data, merge)
        self._is_closed = self._waited or bool(message.missing)
        return message.result(self._timeout_s)

    def _combined(self, data: bytes, merge: Merge) -> _Message:
        if self.rank != self._mine[0]:
            self._send(self._mine[0], _Message(data=data).pack(), 4)
            return self._answer(self._mine[0], 4, [self._mine[0]])
        message = self._gather([[rank] for rank in self._mine], data, merge, 1)
        message = self._across_nodes(message, merge)
        for rank in self._mine[1:]:
            self._send(rank, message.pack(), 1)
        return message

    def _across_nodes(self, message: _Message, merge: Merge) -> _Message:
        first = self._nodes[0][0]
        if self.rank != first:
            self._send(first, message.pack(), 3)
            return self._answer(first, 3, self._nodes[0])
        message = self._gather(self._nodes, message.data, merge, 2, mine=message)
        for members in self._nodes[1:]:
            self._send(members[0], message.pack(), 1)
        return message

    def _gather(
        self, groups: list[list[int]], data: bytes, merge: Merge, patience: int, mine: _Message | None = None
    ) -> _Message:
        """Merge my message with one of the first rank of each of the other ``groups``."""
        messages = [_Message(data=data) if mine is None else mine]
        whole = {members[0]: members for members in groups[1:]}
        heard, silent = self._receive(list(whole), patience)
        messages += [_Message.unpack(one) for one in heard]
        if silent:
            missing = [rank for leader in silent for rank in whole[leader]]
            messages.append(_Message(missing=self._silent(missing)))
        return _merged(messages, merge)

    def _answer(self, rank: int, patience: int, stands_for: list[int]) -> _Message:
        """What ``rank`` says; or that those are missing for whom it stands."""
        heard, silent = self._receive([rank], patience)
        if silent:
            return _Message(missing=self._silent(stands_for))
        return _Message.unpack(heard[0])

    def _silent(self, ranks: list[int]) -> tuple[int, ...]:
        """Who is missing where ``ranks`` were not heard of: they, or those for whom another rank had waited too long,
        whose connections were closed thereby. Whoever waited tells the others."""
        note, patience = f"silent/{self._connection}", timedelta(seconds=min(_NOTE_S, self._timeout_s))
        try:
            if self._waited and not self._store.check([note]):  # what is in vain after the first follows from that
                self._store.set(note, " ".join(map(str, ranks)))
            self._store.wait([note], patience)
            return tuple(map(int, self._store.get(note).split()))
        except RuntimeError:
            return tuple(ranks)

    def _send(self, rank: int, data: bytes, patience: int) -> None:
        """Send, which waits for ``rank`` to receive; one that is gone is noticed by who waits for its answer."""
        size = torch.tensor([len(data)], dtype=torch.int64)
        for tensor in (size, torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            if not self._is_done(self._begun("send", tensor, rank), patience):
                return

    def _receive(self, ranks: list[int], patience: int) -> tuple[list[bytes], list[int]]:
        """The messages of ``ranks``; and those of them that are gone, or silent for ``patience`` deadlines. All are
        waited for at once: after a wait in vain, nothing more comes."""
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in ranks}
        asked = {rank: self._begun("recv", size, rank) for rank, size in sizes.items()}
        here = [rank for rank, work in asked.items() if self._is_done(work, patience)]
        heard = {rank: self._data(rank, int(sizes[rank])) for rank in here}
        silent = [rank for rank in ranks if rank not in heard] or [rank for rank in ranks if heard[rank] is None]
        return [data for data in heard.values() if data is not None], silent

    def _data(self, rank: int, size: int) -> bytes | None:
        if not 0 <= size <= _LARGEST_BYTES:
            raise TrackingError(f"rank {rank} announces a message of {size} bytes: that is no lakeckpt message")
        data = torch.empty(size, dtype=torch.uint8)
        return data.numpy().tobytes() if self._is_done(self._begun("recv", data, rank), 1) else None

    def _begun(self, what: Literal["send", "recv"], tensor: torch.Tensor, rank: int) -> dist.Work | None:
        try:
            work: dist.Work = getattr(self._group, what)([tensor], rank, 0)
        except RuntimeError:
            return None
        return work

    def _is_done(self, work: dist.Work | None, patience: int) -> bool:
        """Wait for ``work``; False where that is in vain."""
        begun_s, longest_s = time.monotonic(), patience * self._timeout_s
        try:
            return work is not None and bool(work.wait(timedelta(seconds=longest_s)))
        except RuntimeError:
            self._waited |= time.monotonic() - begun_s >= 0.9 * longest_s
            return False

    # --- after a silence

    def _connect_again(self) -> None:
        """A new connection of all ranks. Rank 0 says which it is: one that was silent may have missed some."""
        timeout, missing = timedelta(seconds=self._timeout_s), [0]
        try:
            self._agree_on_a_connection(timeout)
            place = dist.distributed_c10d.PrefixStore(f"connection {self._connection}", self._store)
            place.set(f"here/{self.rank}", "")
            missing = []
            group = dist.ProcessGroupGloo(place, self.rank, self.world_size, timeout)
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):
                missing = missing or [one for one in range(self.world_size) if not place.check([f"here/{one}"])]
            if missing:
                raise MissingRanksError(_gone(_intervals(missing), self._timeout_s)) from error
            raise MissingRanksError(f"the ranks cannot connect again after one was silent: {error}") from error
        self._let_go()
        self._group, self._is_closed, self._stays = group, False, True

    def _agree_on_a_connection(self, timeout: timedelta) -> None:
        if self.rank == 0:
            self._connection += 1
            self._store.set(f"connection/{self._connection}", "")
            return
        self._store.wait([f"connection/{self._connection + 1}"], timeout)
        while self._store.check([f"connection/{self._connection + 1}"]):
            self._connection += 1

    def publish(self, key: str, data: bytes) -> None:
        """See `Exchange`."""
        self._store.set(key, data.hex())

    def fetch(self, key: str, *, readers: int | None = None) -> bytes:
        """See `Exchange`."""
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
            data = bytes.fromhex(self._store.get(key).decode("ascii"))
            if readers is not None and self._store.add(f"{key}/read", 1) == readers:
                for used in (key, f"{key}/read"):
                    self._store.delete_key(used)
            return data
        except RuntimeError as error:
            raise MissingRanksError(
                f"rank 0 did not announce {key!r} within {self._timeout_s:g} s: see its log ({error})"
            ) from error

    def peek(self, key: str) -> bytes | None:
        """See `Exchange`. A store that is gone is not asked again: torch prints a page each time."""
        if self._store_is_gone:
            return None
        try:
            return bytes.fromhex(self._store.get(key).decode("ascii")) if self._store.check([key]) else None
        except RuntimeError:
            self._store_is_gone = True
            return None

    def close(self) -> None:
        """See `Exchange`. A group of some of the ranks stays until all groups go: torch would give the next one of
        these ranks its name, and the new group would look for the old one's addresses."""
        self._let_go()

    def _let_go(self) -> None:
        group, self._group = self._group, None
        if group is not None and not self._stays and dist.is_initialized():
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)


def _connected(ranks: list[int] | None, timeout: timedelta) -> Any:
    """A new gloo group of ``ranks`` (None: all)."""
    try:
        return dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=ranks is not None)
    except RuntimeError as error:
        raise TrackingError(
            f"rank {dist.get_rank()} could not connect to the others, for what they tell each other at a cut: {error}. "
            "Where torchrun has started the ranks again, its store may still have the addresses of those that died: "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        ) from error


def _by_node(nodes: Sequence[bytes]) -> list[list[int]]:
    """The ranks of each node, in order, by what each rank calls its own; the first of each leads it."""
    found: dict[bytes, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return list(found.values())


class _Message:
    """What goes up and down: merged data, or why there is none."""

    __slots__ = ("data", "error", "missing")

    def __init__(
        self, *, data: bytes = b"", missing: tuple[int, ...] = (), error: tuple[str, str] | None = None
    ) -> None:
        self.data = data
        self.missing = missing
        self.error = error

    def pack(self) -> bytes:
        plain = {"data": self.data, "missing": list(self.missing), "error": list(self.error) if self.error else None}
        return dumps(plain, kind="message", version=_VERSION)

    @classmethod
    def unpack(cls, data: bytes) -> _Message:
        plain: dict[str, Any] = loads(data, kind="message", supported=_VERSION).value
        error = plain["error"]
        return cls(data=plain["data"], missing=tuple(plain["missing"]), error=tuple(error) if error else None)

    def result(self, timeout_s: float) -> bytes:
        if self.missing:
            raise MissingRanksError(_gone(_intervals(self.missing), timeout_s))
        if self.error is not None:
            kind, text = self.error
            raise _KINDS.get(kind, TrackingError)(text)
        return self.data


def _merged(messages: list[_Message], merge: Merge) -> _Message:
    missing = tuple(sorted({rank for message in messages for rank in message.missing}))
    failed = next((message.error for message in messages if message.error is not None), None)
    if missing or failed:
        return _Message(missing=missing, error=failed)
    try:
        return _Message(data=merge([message.data for message in messages]))
    except TrackingError as error:
        return _Message(error=(error.kind, str(error)))


def _intervals(ranks: Sequence[int]) -> Intervals:
    return Intervals.of([(rank, rank + 1) for rank in ranks])


def _gone(ranks: Intervals, timeout_s: float) -> str:
    return (
        f"{name_ranks(ranks)} did not report for this cut (gone, or silent for {timeout_s:g} s): see their logs; "
        "nothing was committed"
    )
