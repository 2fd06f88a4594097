"""This module holds the obstacles of a job: why a rank waits in vain. Every wait for another rank asks it.

A save may fail on a rank, and a rank may stop, leave, or die. A rank that lives adds its obstacle to a list that all
ranks of the job share, in the order in which obstacles became known. The kernel reports the end of a process of this
node through a pidfd at once, even if its parent has not collected it yet; a rank that sees it adds the obstacle. Nobody
sees it if ranks run in process namespaces of their own, or the system has no pidfds (before Linux 5.3).

`Obstacles` serves a process that cannot reach the list: another one passes obstacles on to it, as a trainer does to its
agent. `JobObstacles` reads and writes the list. The module imports without torch and starts no threads; any thread may
call it.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lakeckpt.errors import LakeckptError, MissingRanksError, SaveFailed, SaveRefused
from lakeckpt.tracking.notes import error_to_text, save_error

__all__ = [
    "ABORTED",
    "FAILED",
    "LATE",
    "LEFT",
    "STOPPED",
    "JobObstacles",
    "Notes",
    "Obstacle",
    "Obstacles",
    "own_node",
    "own_process",
]

FAILED, STOPPED, LEFT, ABORTED, LATE = "failed", "stopped", "left", "aborted", "late"
_MOST_BYTES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why it is in vain to wait for ``rank``. The ``kind`` says for what:

    `FAILED`: for its part in the save number ``first``. `STOPPED`: for anything, and in the saves from number ``first``
    on. `LEFT`: as `STOPPED`, but the rank has closed its manager well: its process may end, and nothing has failed.
    `ABORTED`: for the last save after a signal. `LATE`: as `ABORTED`, but all ranks live, and one comes to no cut.
    """

    kind: str
    rank: int
    error: str
    """The cause, as `error_to_text` returns it."""
    first: int = 0

    @property
    def cause(self) -> str:
        """The message of the error."""
        return self.error.partition(": ")[2]

    @property
    def is_gone(self) -> bool:
        """True if the rank takes part in nothing any more."""
        return self.kind in (STOPPED, LEFT)

    def ends(self, number: float) -> bool:
        """Return whether the save ``number`` cannot be made."""
        return number == self.first if self.kind == FAILED else self.is_gone and number >= self.first

    def repeats(self, other: Obstacle) -> bool:
        """Return whether ``other`` says what this says: of all causes, the first one counts."""
        return self.kind == other.kind and (self.kind != FAILED or self.first == other.first)

    def to_error(self) -> LakeckptError:
        """Return the error of a save that cannot be made."""
        if not self.is_gone:
            names_rank = self.cause.startswith("rank ")
            return save_error(self.error, prefix="" if names_rank else f"rank {self.rank} dropped the save: ")
        error = save_error(self.error, prefix=f"rank {self.rank} has stopped: ")
        return SaveRefused(str(error)) if isinstance(error, SaveFailed) else error  # no retry brings the rank back

    def to_bytes(self) -> bytes:
        """Return the obstacle as bytes; a long text is cut off."""
        return f"{self.kind} {self.rank} {self.first}\n{self.error}".encode("utf-8", "replace")[:_MOST_BYTES]

    @classmethod
    def from_bytes(cls, data: bytes) -> Obstacle:
        """Return the obstacle that `to_bytes` made ``data`` of. Raises ValueError for other bytes."""
        head, _, error = data.decode("utf-8", "replace").partition("\n")
        kind, rank, first = head.split()
        return cls(kind=kind, rank=int(rank), first=int(first), error=error)


class Obstacles:
    """The obstacles that the process of ``rank`` knows. What this rank adds goes nowhere."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._known: list[Obstacle] = []

    def look(self) -> Sequence[Obstacle]:
        """Return all obstacles, in the order in which they became known. It never waits for another rank."""
        return self._known

    def take(self, obstacle: Obstacle) -> None:
        """Take an obstacle that another process passes on."""
        self._known.append(obstacle)

    def clear(self) -> None:
        """Forget all obstacles."""
        self._known.clear()

    def of_save(self, number: float) -> Obstacle | None:
        """Return why the save ``number`` cannot be made; None if nothing is known against it."""
        return next((one for one in self.look() if one.ends(number)), None)

    def refuse(self, number: float) -> None:
        """Raise the error for which the save ``number`` cannot be made, if one is known."""
        if (found := self.of_save(number)) is not None:
            raise found.to_error()

    def fail(self, number: int, error: Exception) -> None:
        """Add that the save ``number`` fails on this rank."""
        self._add(FAILED, error, first=number)

    def stop(self, error: BaseException, *, first: int = 0) -> None:
        """Add that this rank stops, and takes part in no save from number ``first`` on."""
        self._add(STOPPED, error, first=first)

    def leave(self, step: int, *, first: int) -> None:
        """Add that this rank ends well after ``step``, and takes part in no save from number ``first`` on."""
        text = f"it closed its manager after step {step}. Let the loops of all ranks end at one step"
        self._add(LEFT, SaveFailed(text), first=first)

    def abort(self, reason: str, *, is_late: bool) -> None:
        """Add that this rank cannot make the last save after a signal."""
        self._add(LATE if is_late else ABORTED, SaveFailed(reason))

    def _add(self, kind: str, error: BaseException, *, first: int = 0) -> None:
        self._share(Obstacle(kind=kind, rank=self._rank, error=error_to_text(error), first=first))

    def _share(self, obstacle: Obstacle) -> None:
        """Add an obstacle to the list that all ranks share, if there is one."""


class Notes:
    """Notes that the ranks of a job leave for each other, by key. This class serves a job of one rank."""

    def publish(self, key: str, data: bytes, /) -> None:
        """Write a note that every rank can read; never waits for another rank."""

    def publish_once(self, key: str, data: bytes, /) -> None:
        """Write a note as `publish` does, unless there is one of that key."""

    def peek(self, key: str, /) -> bytes | None:
        """Return the note of that key; None if there is none, and if the store that held it is gone."""
        return None


class JobObstacles(Obstacles):
    """The obstacles of a job, which its ranks share over ``notes``."""

    def __init__(self, notes: Notes, rank: int) -> None:
        super().__init__(rank)
        self._notes = notes
        self._lock = threading.RLock()
        self._deaths: dict[int, Obstacle] = {}
        self._watched: dict[int, int] = {}  # pidfd → rank
        self._close = weakref.finalize(self, _close_all, self._watched)

    def watch(self, processes: Mapping[int, str]) -> None:
        """Watch the processes of other ranks on this node; ``processes``: rank → its `own_process`."""
        node = own_node()
        for other, text in processes.items():
            where, _, pid = text.rpartition(" ")
            if where == node and node and other != self._rank:
                with suppress(AttributeError, OSError):  # no pidfds, or no more descriptors for this process
                    self._watched[os.pidfd_open(int(pid))] = other

    def close(self) -> None:
        """Close the pidfds."""
        self._close()

    def look(self) -> Sequence[Obstacle]:
        """See `Obstacles`."""
        with self._lock:
            ended = self._ended()  # before notes are read: a rank leaves its note, and ends
            self._catch_up()
            for rank in ended - self._deaths.keys():
                self._record_end(rank)
            return *self._known, *self._deaths.values()

    def refuse_absent(self, absent: Callable[[], Sequence[int]]) -> None:
        """Raise `MissingRanksError` if one of the ranks that are ``absent`` is gone. A rank may do its part, and then
        stop."""
        if gone := {one.rank: one for one in self.look() if one.is_gone}:
            for rank in absent():
                if found := gone.get(rank) or self._note_of(rank):
                    raise MissingRanksError(f"rank {rank} has stopped: {found.cause}")

    def _share(self, obstacle: Obstacle) -> None:
        """Add an obstacle to the shared list, unless one there says the same: thousands of ranks may stop for one
        cause. Each that is gone leaves a note of its own beside the list, which those read that wait for it."""
        with self._lock, suppress(MissingRanksError):  # the store of the job is gone, and the ranks with it
            if obstacle.is_gone:
                self._notes.publish(f"gone/{obstacle.rank}", obstacle.to_bytes())
            self._catch_up()
            while not any(map(obstacle.repeats, self._known)):
                known = len(self._known)
                self._notes.publish_once(f"obstacle/{known}", obstacle.to_bytes())
                self._catch_up()
                if len(self._known) == known:  # the store has failed, and is not read any more
                    return

    def _catch_up(self) -> None:
        """Read what is new in the shared list."""
        while (found := self._notes.peek(f"obstacle/{len(self._known)}")) is not None:
            self._known.append(Obstacle.from_bytes(found))

    def _note_of(self, rank: int) -> Obstacle | None:
        found = self._notes.peek(f"gone/{rank}")
        return None if found is None else Obstacle.from_bytes(found)

    def _ended(self) -> set[int]:
        """Return the ranks whose processes have ended. It never waits."""
        waits, watched = select.poll(), dict(self._watched)
        for descriptor in watched:
            waits.register(descriptor, select.POLLIN)
        return {watched[one] for one, event in waits.poll(0) if event & select.POLLIN}

    def _record_end(self, rank: int) -> None:
        """Record why the process of ``rank`` has ended. If the rank has left no note, it has died."""
        error = MissingRanksError(f"the process of rank {rank} has ended: see its log")
        died = Obstacle(kind=STOPPED, rank=rank, error=error_to_text(error))
        self._deaths[rank] = found = self._note_of(rank) or died
        if found is died:
            self._share(died)


def own_process() -> str:
    """Return the text that names this process to the other ranks."""
    return f"{own_node()} {os.getpid()}"


def own_node() -> str:
    """Return an identity of this boot of this machine and of the process namespace; empty if it is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _close_all(watched: dict[int, int]) -> None:
    while watched:
        os.close(watched.popitem()[0])
