"""Points at which a process can be ended: every line of modules that are watched, and the midst of copies and updates.

A point has a label and is met many times; a `Doom` names one meeting of one label. What a run has met without one is
the list that sweeps choose from. Threads come as they please, so a doom may not be met: what is to hold holds all the
same.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

__all__ = ["MOST_RANKS", "Doom", "Notes", "Points", "agent", "trainer"]

MOST_RANKS = 4
_BY_NUMBER = ("trainer", "agent", "restored", "completed", "committed")


def trainer(rank: int) -> str:
    """The name of the process that trains as ``rank``."""
    return f"trainer {rank}"


def agent(rank: int) -> str:
    """The name of the agent of ``rank``."""
    return f"agent {rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doom:
    """Who is sent SIGKILL when ``process`` comes to the ``hit``-th meeting of ``label``.

    ``awaits``: and when another rank, which is ahead then, has completed a step.
    """

    process: str
    label: str
    hit: int
    victims: tuple[str, ...]
    awaits: tuple[int, int] | None = None


class Notes:
    """Numbers in memory that outlives whoever wrote them; processes that are forked share it."""

    NAMES = ("killed", *(f"{what} {number}" for what in _BY_NUMBER for number in range(MOST_RANKS)))

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(self.NAMES))

    def __getitem__(self, name: str) -> int:
        return int(struct.unpack_from("q", self._memory, 8 * self.NAMES.index(name))[0])

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * self.NAMES.index(name), value)

    def of_ranks(self, what: str, ranks: int) -> list[int]:
        """What each rank has noted."""
        return [self[f"{what} {rank}"] for rank in range(ranks)]


class Points:
    """Counts the points that this process meets, and ends whom that of the ``dooms`` names which is its own.

    ``after``: points count when this many kills have happened.
    """

    def __init__(self, notes: Notes, process: str, dooms: Iterable[Doom], *, after: int = 0) -> None:
        self._after = after
        self.met: Counter[str] = Counter()
        self._notes, self.doom = notes, next((one for one in dooms if one.process == process), None)
        self._lock = threading.Lock()
        self._files: dict[str, str] = {}

    def meet(self, label: str) -> None:
        """This point is met."""
        if self._notes["killed"] < self._after:
            return
        with self._lock:
            self.met[label] += 1
            doom = self.doom
            if doom is None or (label, self.met[label]) != (doom.label, doom.hit):
                return
            self.doom = None
            while doom.awaits is not None and not self._notes[f"completed {doom.awaits[0]}"] >> doom.awaits[1] & 1:
                os.sched_yield()
            self._notes["killed"] += 1
            for process in sorted(doom.victims, key=lambda one: self._notes[one] == os.getpid()):  # oneself last
                if self._notes[process]:
                    os.kill(self._notes[process], signal.SIGKILL)

    def watch(self, modules: Iterable[ModuleType]) -> None:
        """Every line of ``modules`` is a point, in this thread and in those that start from now on. Where there is a
        doom, only those of its module."""
        for one in modules:
            assert one.__file__ is not None
            name = one.__name__.removeprefix("lakeckpt.checkpoint.")
            if self.doom is None or self.doom.label.startswith(f"{name}:"):
                self._files[one.__file__] = name
        if not self._files:
            return
        threading.settrace(self._called)
        sys.settrace(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._traced if frame.f_code.co_filename in self._files else None

    def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.meet(f"{self._files[frame.f_code.co_filename]}:{frame.f_lineno}")
        return self._traced
