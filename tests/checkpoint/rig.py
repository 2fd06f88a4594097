"""Ranks as threads, a storage in memory, a reader without a table: what the tests of checkpoints stand on.

Ranks wait for one another by events only: `Hub` is their exchange, and `EventWaiter` wakes when the storage changes.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import Ranks
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.parts import SlabRecord, TensorRecord
from lakeckpt.checkpoint.format.verified_reads import fetch_register
from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.core.identity import Identity
from lakeckpt.core.order import OrderSpec
from lakeckpt.core.receipts import Receipt
from lakeckpt.core.state import State
from lakeckpt.data.position.orders import Orders
from lakeckpt.data.position.progress import Progress
from lakeckpt.errors import MissingRanksError, ObjectExists, ObjectMissing
from lakeckpt.lake.storage.base import ObjectInfo, Storage
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.obstacles import JobObstacles
from lakeckpt.tracking.tally import Tally
from tests.checkpoint.seams import manager_with
from tests.patience import PATIENCE_S

_ONE_AT_A_TIME = threading.Lock()  # threads share torch's generator


def changed(content: bytes) -> bytes:
    """Return ``content`` with another last byte."""
    return content[:-1] + bytes([content[-1] ^ 1])


def record_of(spec: TensorSpec, digest: bytes, ranks: Ranks) -> TensorRecord:
    """Return the record of a tensor that is one slab, at byte 8 of the first file of its part."""
    slab = SlabRecord(spec=spec, start=0, digest=digest, file=0, at=8)
    return TensorRecord(spec=spec, digest=digest, slabs=(slab,), ranks=ranks)


def with_parts(storage: Storage, manifest: Manifest, parts: Mapping[int, bytes]) -> Manifest:
    """Put other documents in the place of ``parts`` (rank → document), and a register that names them. Return a
    manifest that vouches for it."""
    register = fetch_register(storage, manifest)
    digests = [register.digest(rank) for rank in range(manifest.world_size)]
    for rank, data in parts.items():
        storage.put(manifest.save.part_path(rank), [data])
        digests[rank] = short_digest(data)
    data = replace(register, digests=b"".join(digests)).to_bytes()
    storage.put(manifest.save.register_path, [data])
    return replace(manifest, register=short_digest(data))


class MemoryStorage:
    """A `Storage` in a dict, each a place of its own. ``changed`` is notified at every put."""

    def __init__(self) -> None:
        self.name = f"memory {uuid.uuid4().hex}"
        self.objects: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.count = 0

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        folder = prefix.rstrip("/")
        with self.changed:
            return [
                ObjectInfo(path=path, size_bytes=len(data))
                for path, data in sorted(self.objects.items())
                if not folder or path == folder or path.startswith(folder + "/")
            ]

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        with self.changed:
            if path not in self.objects:
                raise ObjectMissing(f"{path} is not there")
            return self.objects[path][start:stop]

    def put(self, path: str, chunks: Iterable[Any]) -> int:
        data = b"".join(bytes(chunk) for chunk in chunks)
        with self.changed:
            self.objects[path] = data
            self._notify()
        return len(data)

    def put_new(self, path: str, data: bytes) -> None:
        with self.changed:
            if path in self.objects:
                raise ObjectExists(f"{path} is there")
            self.objects[path] = bytes(data)
            self._notify()

    def delete(self, path: str) -> None:
        with self.changed:
            self.objects.pop(path, None)
            self._notify()

    def notify(self) -> None:
        """Wake who waits for a change."""
        with self.changed:
            self._notify()

    def _notify(self) -> None:
        self.count += 1
        self.changed.notify_all()


class EventWaiter:
    """A clock that stands still while ranks work, and jumps when a rank has gone: no real time passes in a test.

    One may be shared by the ranks of a job: each remembers on its own what it has seen. What a rank publishes to the
    others wakes it, as a put does.
    """

    living: ClassVar[weakref.WeakSet[EventWaiter]] = weakref.WeakSet()

    def __init__(self, storage: MemoryStorage) -> None:
        self.living.add(self)
        self.storage = storage
        self.time_s = 0.0
        self.someone_died = False
        self._mine = threading.local()

    def now(self) -> float:
        return self.time_s

    def wait(self, seconds: float) -> None:
        changed, seen = self.storage.changed, getattr(self._mine, "seen", -1)
        with changed:
            assert changed.wait_for(lambda: self.storage.count != seen or self.someone_died, PATIENCE_S), "a rank hangs"
            if self.storage.count == seen:
                self.time_s += seconds  # nothing will come any more: let the deadline pass
            self._mine.seen = self.storage.count

    def look(self) -> None:
        """Let the ranks look again: one has left a note, which is not in storage."""
        with self.storage.changed:
            self.storage._notify()

    def died(self) -> None:
        with self.storage.changed:
            self.someone_died = True
            self.storage.changed.notify_all()


class Hub:
    """The meeting place of ranks that are threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.gone: set[int] = set()
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, Mapping[str, str]]] = {}
        self.answers: dict[int, Tally | Exception] = {}
        self.notes: dict[str, bytes] = {}

    def leave(self, rank: int) -> None:
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()

    def of(self, rank: int) -> HubExchange:
        return HubExchange(self, rank)


class HubExchange(Exchange):
    """An `Exchange` of one rank."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(rank=rank, world_size=hub.world_size)
        self.obstacles = JobObstacles(self, rank)
        self.hub = hub
        self.fetched: list[str] = []

    def answered(self, facts: Mapping[str, str], answer: Callable[[Tally], Tally]) -> Tally:
        hub, number = self.hub, self._next_round()
        with hub.changed:
            stated = hub.rounds.setdefault(number, {})
            stated[self.rank] = facts
            hub.changed.notify_all()
            assert hub.changed.wait_for(lambda: len(stated.keys() | hub.gone) == hub.world_size, PATIENCE_S)
            if len(stated) < hub.world_size:
                raise MissingRanksError(f"rank {sorted(set(range(hub.world_size)) - set(stated))} is gone")
            if number not in hub.answers:
                self._answer_all(number, answer)
            found = hub.answers[number]
        if isinstance(found, Exception):
            raise found
        return found

    def _answer_all(self, number: int, answer: Callable[[Tally], Tally]) -> None:
        """Rank 0 answers, and the others wait for its answer."""
        hub = self.hub
        if self.rank:
            assert hub.changed.wait_for(lambda: number in hub.answers, PATIENCE_S)
            return
        try:
            hub.answers[number] = answer(Tally.of([hub.rounds[number][rank] for rank in range(hub.world_size)]))
        except Exception as error:
            hub.answers[number] = error
        hub.changed.notify_all()

    def publish(self, key: str, data: bytes, /) -> None:
        with self.hub.changed:
            self.hub.notes[key] = data
            self.hub.changed.notify_all()
        for waiter in list(EventWaiter.living):
            waiter.storage.notify()

    def publish_once(self, key: str, data: bytes, /) -> None:
        with self.hub.changed:
            if key in self.hub.notes:
                return
            self.hub.notes[key] = data
        self.publish(key, data)

    def fetch(self, key: str, /) -> bytes:
        self.fetched.append(key)
        with self.hub.changed:
            assert self.hub.changed.wait_for(lambda: key in self.hub.notes or 0 in self.hub.gone, PATIENCE_S)
            if key not in self.hub.notes:
                raise MissingRanksError("rank 0 is gone")
            return self.hub.notes[key]

    def peek(self, key: str, /) -> bytes | None:
        with self.hub.changed:
            return self.hub.notes.get(key)


class Gone(BaseException):
    """This rank dies here."""


def run_ranks(world_size: int, body: Callable[[int, HubExchange], Any], *, waiters: Sequence[EventWaiter] = ()) -> list:
    """Run ``body(rank, exchange)`` on threads; what each returned or raised (`Gone` counts as dying: None)."""
    hub = Hub(world_size)
    results: list[Any] = [None] * world_size

    def one(rank: int) -> None:
        try:
            results[rank] = body(rank, hub.of(rank))
        except Gone:
            hub.leave(rank)
            for waiter in waiters:
                waiter.died()
        except BaseException as error:
            results[rank] = error
            hub.leave(rank)
            for waiter in waiters:
                waiter.look()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a rank hangs"
    return results


def good(results: list[Any]) -> list[Any]:
    """The results, if no rank raised; else what a rank raised by itself, not what others found it gone by."""
    raised = [one for one in results if isinstance(one, BaseException)]
    for error in sorted(raised, key=lambda one: isinstance(one, MissingRanksError)):
        raise error
    return results


class Reader:
    """A tracked reader of 1000 rows that delivers receipts and no rows."""

    def __init__(
        self, *, rank: int = 0, world_size: int = 1, batch_size: int = 10, rows: int = 1000, seed: int = 3
    ) -> None:
        spec = OrderSpec(seed=seed, shuffle=True, window=2)
        identity = Identity(table="t", selection="", rows=rows, spec=spec, tail="short", endless=False)
        self.progress = Progress(Orders([identity]), batch_size=batch_size, num_lanes=None)
        self.progress.deliveries.saved()  # a manager saves its state, and counts nothing of it
        self.rank, self.world_size = rank, world_size
        self.lie = 0

    def __iter__(self) -> Any:
        self._settle()
        for assignment in self.progress.assignments(self.rank):
            self.progress.delivered(assignment.receipt)
            yield assignment.receipt
        self.progress.finish()

    def _settle(self) -> None:
        self.progress.settle(self.world_size, 0)

    @property
    def epoch(self) -> int:
        return self.progress.epoch

    @property
    def last_receipt(self) -> Receipt | None:
        return self.progress.last_receipt

    def state_dict(self, at: Receipt | None = None) -> dict[str, Any]:
        self._settle()
        state = self.progress.at(at).to_plain()
        return state | {"epoch": state["epoch"] + self.lie} if self.lie else state

    def load_state_dict(self, state: Any) -> None:
        self.progress.load(State.from_plain(state))

    def mark(self, at: Receipt | None = None) -> None:
        self._settle()
        self.progress.runs.mark(at)

    def stretches(self, at: Receipt | None = None) -> list[tuple[State, State]]:
        self._settle()
        return self.progress.runs.stretches(at)


class Counter:
    """A small object with a state."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def training(*, seed: int = 0, width: int = 8) -> dict[str, Any]:
    """A model, an optimizer and a scheduler."""
    with _ONE_AT_A_TIME, torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6])
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train_step(objects: dict[str, Any], data: torch.Tensor | None = None) -> float:
    """One step on random data (or ``data``); the loss."""
    model, optimizer = objects["model"], objects["optimizer"]
    loss = model(torch.randn(16, 8) if data is None else data).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    objects["scheduler"].step()
    return loss.item()


def manager(storage: Any, state: dict[str, Any], **options: Any) -> CheckpointManager:
    """A manager that saves when told to."""
    return manager_with(storage, state, **{"persist_every": 10**9, **options})
