"""This module makes checkpoint managers that talk over a given exchange and wait by a given clock.

A storage of the tests gets a URL where cuts are captured, as capturing needs one. Whoever opens that URL in this
process gets the storage, and a `ThreadAgent` stands in for the agent, which is another process.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lakeckpt import CheckpointManager
from lakeckpt.checkpoint import opening
from lakeckpt.checkpoint.agent.generations import Generations, identity_of
from lakeckpt.checkpoint.agent.link import AgentLink
from lakeckpt.checkpoint.agent.orders import Bye, Hello, Order, Outcome, TableDocuments
from lakeckpt.checkpoint.agent.persister import Persister
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.errors import SaveFailed
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.obstacles import Obstacle
from lakeckpt.tracking.waiting import SystemWaiter, Waiter

__all__ = ["ThreadAgent", "believing", "manager_with"]

_places: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_waiters: dict[str, Waiter] = {}


def manager_with(
    uri: Any, state: Any, *, exchange: Exchange | None = None, waiter: Waiter | None = None, **options: Any
) -> CheckpointManager:
    """Return a `CheckpointManager` with ``options``, and with these in place of its own exchange and clock."""

    class Manager(CheckpointManager):
        @staticmethod
        def _talk(group: Any, timeout_s: float, **how: Any) -> tuple[Exchange, Waiter]:
            own = CheckpointManager._talk(group, timeout_s, **how) if exchange is None or waiter is None else None
            return exchange or own[0], waiter or own[1]  # type: ignore[index]

    place = uri
    if options.get("capture_every") is not None and not isinstance(uri, (str, os.PathLike, LocalStorage)):
        place = f"tests://{id(uri)}/{id(waiter)}"
        _places[place], _waiters[place] = uri, waiter or SystemWaiter()
    return Manager(place, state, **options)


def believing(saver: CheckpointManager) -> CheckpointManager:
    """Return ``saver``, which takes its attempt for one that has saved: failures of its first save are warnings."""
    saver._reporter._outage.committed()
    return saver


def _open(uri: Any, *, storage_options: Mapping[str, Any] | None = None) -> Storage:
    place: Storage | None = _places.get(os.fspath(uri))
    return open_storage(uri, storage_options=storage_options) if place is None else place


def _agent(begin: Hello) -> AgentLink | ThreadAgent:
    return ThreadAgent(begin) if begin.uri in _places else AgentLink(begin)


opening.open_storage = _open  # type: ignore[attr-defined]
opening.AgentLink = _agent  # type: ignore[assignment,misc]


class ThreadAgent:
    """An agent that is a thread of its trainer, and ends with it: an `AgentLink` to nowhere."""

    def __init__(self, begin: Hello) -> None:
        self.begin, self.rank, self._timeout_s = begin, begin.rank, begin.settings.timeout_s
        self._got: deque[Outcome] = deque()
        self._came = threading.Event()
        identity = identity_of(begin.digest, rank=begin.rank, world_size=begin.world_size)
        self._generations = Generations(ArenaFolder(begin.arenas), identity)
        self._persister = Persister(
            _places[begin.uri],
            self._generations,
            replace(begin.attempt, pending={}),
            rank=begin.rank,
            world_size=begin.world_size,
            settings=begin.settings,
            waiter=_waiters[begin.uri],
            report=self.report,
        )
        name = f"lakeckpt-persister-{begin.rank}"
        self._thread = threading.Thread(target=self._persister.run, name=name, daemon=True)
        self._thread.start()

    def order(self, order: Order, /) -> None:
        self._persister.take(order)

    def keep(self, documents: TableDocuments, /) -> None:
        self._persister.take(documents)

    def pass_on(self, obstacle: Obstacle, /) -> None:
        self._persister.take(obstacle)

    def report(self, outcome: Outcome) -> None:
        self._got.append(outcome)
        self._came.set()

    def outcomes(self) -> list[Outcome]:
        self._came.clear()
        return [self._got.popleft() for _ in range(len(self._got))]

    def wait(self, timeout_s: float, /) -> bool:
        return bool(self._got) or self._came.wait(timeout_s)

    def close(self, *, well: bool) -> None:
        """What was ordered is persisted; there is no final save, as no process is left to make it."""
        self._persister.take(Bye())
        self._thread.join(2 * self._timeout_s)
        if self._thread.is_alive():
            if well:
                raise SaveFailed("what was ordered is not in storage: its store is stuck")
            return
        if well:
            self._generations.remove()
        self._generations.close()
