"""This module defines what a look at the ranks of a job sees: values, without torch.

A watcher looks at each rank of its node from outside: at its page, its process in ``/proc``, the stacks of its threads
and the collectives that it has entered. `lakeckpt.watch.verdict` judges from the looks of all nodes which ranks hold up
the others, and why. The looks of a node travel to the other nodes as a document (`RankLook`, by
`lakeckpt.wire.documents`). The module reads nothing, and starts no threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lakeckpt.wire.documents import Count

__all__ = ["Collective", "Frame", "GpuLook", "ProcessLook", "RankLook", "ThreadLook", "Waits"]

Waits = Literal["", "socket", "file", "pipe", "lock", "disk", "sleep", "child", "gil", "futex"]
"""What a process waits for in a call of the system; empty: it runs, or that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLook:
    """A process of a node, from ``/proc``."""

    pid: Count
    name: str = ""
    state: str = ""
    """As the kernel writes it: R runs, S sleeps, D waits for a disk, T is stopped, t is traced, Z has ended."""
    waits: Waits = ""
    """What the training thread waits for."""
    waits_on: str = ""
    """The peer of the socket, the path of the file or pipe, the holder of the lock, or the kernel's function."""
    ticks: Count = 0
    """Processor time of all threads, in ticks of the clock."""
    switches: Count = 0
    """Voluntary switches of the training thread: a thread that works makes some, one that sleeps makes none."""
    moved_bytes: Count = 0
    """Bytes that it has read and written by calls of the system (``rchar`` and ``wchar``)."""
    tracer: Count = 0
    """The process that traces it, such as a debugger; 0: none."""
    log: str = ""
    """The file that its standard error goes to, as where torchelastic writes logs; empty: it goes to no file."""
    log_bytes: Count = 0
    """How far that file was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLook:
    """A GPU of a node, from NVML."""

    index: Count
    use_percent: float | None = None
    """The share of the newest second or less in which a kernel ran; None: it is not measured."""
    watts: float | None = None

    def __str__(self) -> str:
        if self.use_percent is None:
            return f"GPU {self.index} is not measured"
        power = "" if self.watts is None else f", with {self.watts:.0f} W"
        return f"GPU {self.index} is used at {self.use_percent:.0f} %{power}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame of a stack."""

    function: str
    file: str
    line: Count

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadLook:
    """One thread of a rank. ``frames``: the innermost first."""

    name: str = ""
    is_main: bool = False
    owns_gil: bool = False
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The newest collective of a rank in one process group, as torch's flight recorder has it."""

    group: str
    members: tuple[int, ...]
    """Ranks of the job."""
    number: Count
    """The number of the newest collective that the rank has entered, from 1; 0: none."""
    completed: Count
    """The newest that it has completed."""
    operation: str = ""
    """Such as ``all_reduce``."""
    sizes: str = ""
    """The shapes of its inputs, such as ``[[131584]]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLook:
    """What is seen of one rank at one moment."""

    rank: Count
    node: str
    pid: Count
    phase: str = ""
    """What its page says that it does; empty: it has no page."""
    still_s: float = 0.0
    """For how long its page has not moved."""
    beats: Count = 0
    step: Count = 0
    batches: Count = 0
    """Micro-batches that it got in this attempt."""
    taken: tuple[tuple[int, int], ...] = ()
    """The newest steps, the oldest first: (step, micro-batches of this attempt at its end)."""
    reads: str = ""
    """The reader that it waits for; empty: it waits for none."""
    ended: float = 0.0
    """When it died, in seconds since 1970; 0: it lives."""
    error: str = ""
    """Why it has ended, as the note of its death says."""
    process: ProcessLook | None = None
    children: tuple[ProcessLook, ...] = ()
    """Its child processes, such as loader workers; those that have ended and were not reaped have state Z."""
    threads: tuple[ThreadLook, ...] = ()
    """Empty: its stacks cannot be read."""
    recorded: tuple[Collective, ...] = ()
    """Its newest collective in each group; empty: there is no recorder."""
    gpu: GpuLook | None = None

    @property
    def main(self) -> ThreadLook | None:
        """The training thread, if its stack was read."""
        return next((one for one in self.threads if one.is_main), None)
