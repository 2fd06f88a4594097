"""This module shows that a job is there: to its own restarts by markers, and to other jobs by a note in the run.

`Presence` serves one rank of a manager. Each rank leaves the marker of its job on its node when the attempt begins, and
renews it when a checkpoint is committed; the end of the ``with`` block removes it.

With ``exclusive=True`` a job refuses to take over a run whose job is alive. A job of the same launcher is never
refused. If the newest attempt's trainer ran on this machine, its process decides. Else a note decides, the object
``alive/<attempt>`` in the run, which rank 0 renews once a minute and removes at its end: a note that is younger than
three minutes is of a job that is alive. Clocks of different machines must agree to a minute.

A daemon thread renews the note. `Presence.begin` starts the thread on rank 0 with ``exclusive=True``; `Presence.close`
stops the thread and waits for it, at most some seconds; so does the end of a manager that is never closed. The thread
cannot outlive the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from dataclasses import dataclass

from lakeckpt.checkpoint.agent.generations import digest_of_place
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.markers import Marker, began_s, launchers, leave_marker, remove_marker
from lakeckpt.checkpoint.format.manifest import Begin, said_of
from lakeckpt.checkpoint.presence.away import await_run
from lakeckpt.errors import ConfigError, RunInUse, StorageError, WireError
from lakeckpt.lake.storage.base import Storage, describe
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.waiting import Waiter
from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Presence"]

_LOG = logging.getLogger("lakeckpt")
_RENEW_S, _YOUNG_S = 60.0, 180.0
_JOIN_S = 5.0
_CLOCK_S = 1.0
"""The clocks by which the kernel and a process count differ by less."""
_FOLDER = "alive"
_KIND, _VERSION = "alive", (1, 0)
_LAUNCHERS = "launchers"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alive:
    """The note of a job: its `launchers` on all nodes, and when it was alive, by the clock of rank 0's machine."""

    launchers: tuple[str, ...]
    at_s: float


class Presence:
    """The presence of one rank at the run in ``storage``. ``arenas``: the path of the folder of arenas; None: this
    user's own. ``timeout_s``: how long a restart waits for a run that is away. One thread calls all methods."""

    def __init__(
        self,
        storage: Storage,
        exchange: Exchange,
        arenas: str | os.PathLike[str] | None,
        waiter: Waiter,
        timeout_s: float,
        exclusive: bool,
    ) -> None:
        if type(exclusive) is not bool:
            raise ConfigError(f"exclusive is True or False, got {exclusive!r}")
        self._storage, self._exchange, self._exclusive = storage, exchange, exclusive
        self._folder = ArenaFolder(arenas)
        self._place = digest_of_place(storage)
        self._is_named = bool(getattr(storage, "name", ""))  # a storage of a user's own may be any place
        self._launchers = launchers() if self._is_named else ()
        self._of_all = self._launchers
        self._waiter, self._timeout_s = waiter, timeout_s
        self._step = -1
        self._note = ""
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    # --- before the attempt begins

    def await_run(self) -> bool:
        """Wait for a run that is away. Collective; see `lakeckpt.checkpoint.presence.away`."""
        return self._is_named and await_run(
            self._storage,
            self._exchange,
            self._folder,
            self._launchers,
            waiter=self._waiter,
            timeout_s=self._timeout_s,
        )

    def meet(self) -> None:
        """Learn the launchers of all nodes, if the job is exclusive. Collective."""
        if self._exclusive:
            every = self._exchange.everyone({_LAUNCHERS: "\n".join(self._launchers)}).facts[_LAUNCHERS]
            self._of_all = tuple(sorted({one for text in every for one in text.split("\n") if one}))

    def take_over(self, begin: Begin, other: Begin) -> None:
        """Say that the attempt ``begin`` takes the run over from the ``other``, the newest one. Rank 0 calls it before
        the attempt begins. Raises `RunInUse` if the manager is exclusive and the other's job is alive."""
        age = _age(time.time() - other.created_s)
        is_dead = other.host == socket.gethostname() and not _lives(other)
        if self._exclusive and not is_dead and (why := self._why_alive(other)):
            raise RunInUse(
                f"{describe(self._storage)} is in use: {said_of(other)} began {age} ago, and {why}. Stop that job "
                "first, or give this one another place; exclusive=False takes the run over"
            )
        level = logging.INFO if is_dead else logging.WARNING
        _LOG.log(level, "%s takes the run over from %s, which began %s ago", said_of(begin), said_of(other), age)

    def _why_alive(self, other: Begin) -> str:
        """Return why the job of the other attempt is taken for alive; empty if it is not, or if it is this job."""
        note = None
        with contextlib.suppress(StorageError, WireError):
            data = self._storage.read(_note_of(other.attempt))
            note = from_plain(_Alive, loads(data, kind=_KIND, supported=_VERSION), "the note of a job that is alive")
        if note is not None and not set(note.launchers).isdisjoint(self._of_all):
            return ""
        if other.host == socket.gethostname():
            return "" if other.pid == os.getpid() else "its process lives on this machine"
        since_s = _YOUNG_S if note is None else time.time() - note.at_s
        return f"showed {since_s:.0f} s ago that it is alive" if since_s < _YOUNG_S else ""

    # --- while the attempt runs

    def begin(self, attempt: int, step: int) -> None:
        """The attempt has begun, on every rank. ``step``: of the newest checkpoint."""
        self.saved(step)
        if self._exclusive and self._exchange.rank == 0:
            self._note = _note_of(attempt)
            work = (self._storage, self._note, self._of_all, self._ends)
            self._thread = threading.Thread(target=_renew, args=work, name="lakeckpt-alive", daemon=True)
            weakref.finalize(self, self._ends.set)
            self._thread.start()

    def saved(self, step: int) -> None:
        """The newest checkpoint is of this ``step``."""
        if self._launchers and step != self._step:
            self._step = step
            marker = Marker(place=describe(self._storage), launchers=self._launchers, step=step)
            leave_marker(self._folder, self._place, marker)

    def done(self) -> None:
        """The job ended well: nobody starts it again."""
        if self._launchers:
            remove_marker(self._folder, self._place)

    def close(self) -> None:
        """End the thread, and remove the note. May be called again."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None
            with contextlib.suppress(StorageError):
                self._storage.delete(self._note)


def _renew(storage: Storage, path: str, launchers: tuple[str, ...], ends: threading.Event) -> None:
    """Write the note of a job once a minute until ``ends`` is set. Remove those of attempts that died."""
    with contextlib.suppress(StorageError):
        for one in storage.list(_FOLDER):
            if one.path < path:
                storage.delete(one.path)
    while not ends.is_set():
        note = _Alive(launchers=launchers, at_s=time.time())
        with contextlib.suppress(StorageError):  # the next minute tries again
            storage.put(path, [dumps(to_plain(note), kind=_KIND, version=_VERSION)])
        ends.wait(_RENEW_S)


def _note_of(attempt: int) -> str:
    return f"{_FOLDER}/{attempt:010d}.lkc"


def _lives(other: Begin) -> bool:
    """Return whether the process of an attempt lives on this machine. A process that began after the attempt has got
    its number later."""
    since_s = began_s(other.pid)
    return since_s is not None and since_s < other.created_s + _CLOCK_S


def _age(seconds: float) -> str:
    """Return a time for people.

    >>> _age(42.4), _age(600), _age(86_400)
    ('42 s', '10 min', '24 h')
    """
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
