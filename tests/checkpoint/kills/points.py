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
from typing import Any, Literal

__all__ = ["Doom", "Notes", "Points"]

Process = Literal["trainer", "agent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doom:
    """Who is sent SIGKILL when ``process`` comes to the ``hit``-th meeting of ``label``."""

    process: Process
    label: str
    hit: int
    victims: tuple[Process, ...]


class Notes:
    """Numbers in memory that outlives whoever wrote them; processes that are forked share it."""

    NAMES = ("trainer", "agent", "killed", "restored", "completed", "committed")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(self.NAMES))

    def __getitem__(self, name: str) -> int:
        return int(struct.unpack_from("q", self._memory, 8 * self.NAMES.index(name))[0])

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * self.NAMES.index(name), value)


class Points:
    """Counts the points that this process meets, and ends whom ``doom`` names."""

    def __init__(self, notes: Notes, process: Process, doom: Doom | None) -> None:
        self.met: Counter[str] = Counter()
        self._notes, self._doom = notes, doom if doom is not None and doom.process == process else None
        self._lock = threading.Lock()
        self._files: dict[str, str] = {}

    def meet(self, label: str) -> None:
        """This point is met."""
        with self._lock:
            self.met[label] += 1
            doom = self._doom
            if doom is None or (label, self.met[label]) != (doom.label, doom.hit):
                return
            self._doom = None
            self._notes["killed"] = 1
            for process in sorted(doom.victims, key=lambda one: self._notes[one] == os.getpid()):  # oneself last
                if self._notes[process]:
                    os.kill(self._notes[process], signal.SIGKILL)

    def watch(self, modules: Iterable[ModuleType]) -> None:
        """Every line of ``modules`` is a point, in this thread and in those that start from now on. Where there is a
        doom, only those of its module."""
        for one in modules:
            assert one.__file__ is not None
            name = one.__name__.removeprefix("lakeckpt.checkpoint.")
            if self._doom is None or self._doom.label.startswith(f"{name}:"):
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
