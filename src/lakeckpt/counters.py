"""This module keeps the counters of this process, which `lakeckpt.metrics` reads.

A loader, a store or a manager adds to plain numbers here where it does what is counted. Nothing is computed before a
metric is read. The numbers of a loader or a manager have one thread that adds to them, and no lock. A store has a lock,
which it takes once for each request. If an owner is gone, its numbers are added to a sum for its name, so that no
counter falls, and nothing else of it stays.

A forked process begins with empty counters. The counts of stores in a loader's worker processes come to the main
process with the micro-batches that they send. The module starts no threads.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any, ClassVar, Generic, TypeVar

__all__ = [
    "READERS",
    "RUNS",
    "Counters",
    "Facts",
    "Living",
    "ReaderCounters",
    "RunCounters",
    "StoreCounters",
    "add_stores",
    "store_counters",
    "stores",
    "take_stores",
]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Counters:
    """Numbers of one owner. ``TOTALS`` are those that only grow."""

    TOTALS: ClassVar[tuple[str, ...]] = ()

    name: str = ""
    """The name of the owner in metrics."""
    rank: int = 0
    """The data-parallel rank."""

    def add(self, other: Counters) -> None:
        """Add the totals of ``other``."""
        for one in self.TOTALS:
            setattr(self, one, getattr(self, one) + getattr(other, one))

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return type(self), ()  # in another process nothing was counted


@dataclass(slots=True, eq=False)
class ReaderCounters(Counters):
    """The deliveries of one loader. The thread that iterates it adds."""

    TOTALS: ClassVar[tuple[str, ...]] = ("rows", "batches", "wait_s")

    rows: int = 0
    batches: int = 0
    wait_s: float = 0.0
    """Seconds for which the training loop was inside of the loader."""

    def pull(self, found: Iterator[T]) -> T | None:
        """Return the next of ``found``, None at its end, and count the time that it takes."""
        begin_s = perf_counter()
        pulled = next(found, None)
        self.wait_s += perf_counter() - begin_s
        return pulled

    def delivered(self, rows: int) -> None:
        """Count a micro-batch of ``rows`` rows that the loop gets."""
        self.rows += rows
        self.batches += 1


@dataclass(slots=True, eq=False)
class RunCounters(Counters):
    """The saves of one manager. The training thread adds, and to the numbers of captures the copier."""

    TOTALS: ClassVar[tuple[str, ...]] = (
        "commits",
        "failed",
        "persist_s",
        "stall_s",
        "captures",
        "capture_s",
        "bubble_bytes",
        "fence_bytes",
        "beside_bytes",
    )

    step: int = 0
    """Optimizer steps done."""
    committed_step: int = 0
    """The optimizer step of the newest commit; 0 before the first."""
    committed_s: float = 0.0
    """The time of the newest commit, in seconds since 1970; before the first, the time at which the attempt began."""
    commits: int = 0
    failed: int = 0
    persist_s: float = 0.0
    stall_s: float = 0.0
    """Seconds for which saves and captures have held up the training thread."""
    captures: int = 0
    captured_s: float = 0.0
    """The time of the newest complete capture, in seconds since 1970; before the first, the time at which the attempt
    began."""
    copies: bool = False
    """Nodes keep copies of each other's shares."""
    protected_step: int = -1
    """The step of the newest cut whose share lies on another node, too; -1: there is none."""
    protected_s: float = 0.0
    """The time since which it does, in seconds since 1970; before the first, the time at which the attempt began."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Cause → how many faults ended the attempts before this one, since the last restore; on rank 0."""
    capture_s: float = 0.0
    bubble_bytes: int = 0
    """Bytes that were copied in idle windows."""
    fence_bytes: int = 0
    """Bytes for which an optimizer step waited."""
    beside_bytes: int = 0
    """Bytes that were copied beside training, if no idle windows are watched."""
    waits: Callable[[], Iterable[Any]] = tuple
    """Returns the last waits by site (``site``, ``median_s``, ``share``). Any thread may call it."""

    spent: Callable[[], Mapping[str, float]] = dict
    """Returns phase → seconds of the training thread in this attempt. Any thread may call it."""

    def begin(self, step: int, committed_step: int, restored: Any) -> None:
        """Note where an attempt begins; ``restored`` is the commit that it restored (``created_s``), None: now."""
        self.step, self.committed_step, self.captured_s = step, committed_step, time()
        self.protected_step, self.protected_s = -1, time()
        self.committed_s = time() if restored is None else restored.created_s

    def protected(self, step: int, at_s: float) -> None:
        """Note that the share of the cut of ``step`` lies on another node, too."""
        self.protected_step, self.protected_s = step, at_s

    def committed(self, step: int, created_s: float, took_s: float) -> None:
        """Count a commit of the cut of ``step``."""
        self.commits += 1
        self.persist_s += took_s
        self.committed_step, self.committed_s = step, created_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that are known of a loader when somebody looks."""

    name: str
    ready: int | None
    """Micro-batches that would come without a wait; None if that is not known."""
    epochs: Mapping[str, float]
    """Reader → the epochs that the job has consumed of it; of a mixture, each source is a reader."""
    skipped: Mapping[tuple[str, str], int]
    """(reader, reason) → rows of the table version that are not read."""


C = TypeVar("C", bound=Counters)


class Living(Generic[C]):
    """The counters of owners that live, and the sums of those that are gone, by name and rank. Any thread may call."""

    def __init__(self, kind: type[C]) -> None:
        self._kind = kind
        self.renew()

    def renew(self) -> None:
        """Begin with no owner."""
        self._lock = threading.RLock()  # the garbage collector may end an owner inside of a method
        self._living: dict[int, tuple[weakref.ref[Any], C, Callable[[Any], Facts] | None]] = {}
        self._gone: dict[tuple[str, int], C] = {}

    def follow(self, owner: object, counters: C, look: Callable[[Any], Facts] | None = None) -> Callable[[], object]:
        """Take ``counters`` into the metrics until ``owner`` is gone, or the function that is returned was called.

        ``look(owner)`` returns what is known of the owner then; any thread may call it.
        """
        key = id(counters)
        with self._lock:
            self._living[key] = weakref.ref(owner), counters, look
        end = weakref.finalize(owner, self._leave, key)
        end.atexit = False
        return end

    def _leave(self, key: int) -> None:
        with self._lock:
            if (found := self._living.pop(key, None)) is not None:
                self._sum(self._gone, found[1])

    def _sum(self, sums: dict[tuple[str, int], C], one: C) -> None:
        key = one.name, one.rank
        if key not in sums:
            sums[key] = self._kind(*key)
        sums[key].add(one)

    @property
    def living(self) -> list[C]:
        """The counters of those that live, the newest last."""
        with self._lock:
            return [counters for _, counters, _ in self._living.values()]

    def looked(self) -> list[tuple[C, Facts]]:
        """Return what is known of those that live, the newest last, and give their counters the names of now."""
        with self._lock:
            every = list(self._living.values())
        found = []
        for owner, counters, look in every:
            if look is not None and (one := owner()) is not None:
                try:
                    facts = look(one)
                except Exception:  # its place changed while it was looked at: the next look finds it
                    continue
                counters.name = facts.name
                found.append((counters, facts))
        return found

    def sums(self) -> list[C]:
        """Return the totals of all that live or lived, one for each name and rank."""
        with self._lock:
            sums: dict[tuple[str, int], C] = {}
            for one in [*self._gone.values(), *(counters for _, counters, _ in self._living.values())]:
                self._sum(sums, one)
            return list(sums.values())


READERS: Living[ReaderCounters] = Living(ReaderCounters)
RUNS: Living[RunCounters] = Living(RunCounters)


@dataclass(slots=True, eq=False)
class StoreCounters:
    """The reads of this process from the stores of one ``kind``. Any thread adds."""

    kind: str
    bytes_read: int = 0
    retries: int = 0
    _lock: Any = field(default_factory=threading.RLock)

    def read(self, size_bytes: int) -> None:
        """Count a request that brought ``size_bytes``."""
        self.add(size_bytes, 0)

    def retried(self) -> None:
        """Count an attempt that is made once more."""
        self.add(0, 1)

    def add(self, size_bytes: int, retries: int) -> None:
        """Count bytes and attempts."""
        with self._lock:
            self.bytes_read += size_bytes
            self.retries += retries

    def take(self) -> tuple[str, int, int]:
        """Return (kind, bytes, retries), and begin again from 0."""
        with self._lock:
            found = self.kind, self.bytes_read, self.retries
            self.bytes_read = self.retries = 0
        return found

    def renew(self) -> None:
        """Begin from 0, with a lock that nobody holds."""
        self.bytes_read = self.retries = 0
        self._lock = threading.RLock()


_stores: dict[str, StoreCounters] = {}


def store_counters(kind: str) -> StoreCounters:
    """Return the counters of the stores of ``kind``: local, s3, gs, az, or fsspec."""
    return _stores.get(kind) or _stores.setdefault(kind, StoreCounters(kind))


def stores() -> list[StoreCounters]:
    """Return the counters of all kinds of stores that were opened."""
    return list(_stores.values())


def take_stores() -> list[tuple[str, int, int]]:
    """In a worker process: return (kind, bytes, retries) of each kind of stores since the last call."""
    return [found for one in stores() if any((found := one.take())[1:])]


def add_stores(taken: Iterable[tuple[str, int, int]]) -> None:
    """In the main process: add what `take_stores` has returned in a worker."""
    for kind, size_bytes, retries in taken:
        store_counters(kind).add(size_bytes, retries)


def _after_fork() -> None:
    READERS.renew()
    RUNS.renew()
    for one in stores():
        one.renew()


os.register_at_fork(after_in_child=_after_fork)
