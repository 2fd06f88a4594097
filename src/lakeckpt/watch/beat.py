"""This module writes and reads the page of a rank: a file of 4 KiB in memory that says where the rank is.

The rank stores a few words at each micro-batch and each step, in about a microsecond, and no call of the system. Other
processes of the node read the page while the rank lives, and after its death: its last step, what it was doing, and
which micro-batch it was at. The page lies beside the arenas, ``<digest of the run>.<attempt>.<rank>.beat``, also if
nothing is captured.

A page is an array of 512 words (u64, little endian). There is one writer, and readers tolerate that a word is newer
than another one. A ring of 64 words says how many micro-batches there were at the end of each of the newest
steps; further words add up the nanoseconds of each phase. The module imports without
torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

__all__ = [
    "COMPUTES",
    "PAGE_BYTES",
    "Beat",
    "Page",
    "Phase",
    "ReaderBeat",
    "process_start",
    "process_state",
    "read_page",
]

PAGE_BYTES = 4096
_MAGIC = 0x6C6B_6265_6174_0001
Phase = Literal[
    "start", "restore", "data", "compute", "save", "between", "ended", "own", "closing", "forward", "backward",
    "optimizer",
]  # fmt: skip
"""What the rank does: it waits for a batch (data), works on one (compute; and if the state has the model and optimizer:
forward, then backward, optimizer), is in the manager (save), in a phase that the script has named (own), such as its
evaluation, or saves for the last time (closing)."""
_PHASES: tuple[Phase, ...] = get_args(Phase)
COMPUTES: frozenset[Phase] = frozenset(("compute", "forward", "backward", "optimizer"))
"""The phases in which a rank works on a micro-batch; models and optimizers of the state tell them apart."""
_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_COMPUTE, _SAVE = _NUMBERS["compute"], _NUMBERS["save"]

_PID, _STARTED, _RANK, _WORLD, _LOCAL_RANK, _BEATS, _PHASE = 1, 2, 3, 4, 5, 6, 7
_SINCE, _STEP, _BATCHES, _STACKS = 8, 9, 11, 14
_TAKEN, _RING = 144, 64
_SPENT = 208
_READER, _EPOCH, _NEXT, _DEALT, _OF, _USED, _BEGUN, _ROWS, _ROWS_USED = range(224, 233)
_FIRST, _LAST, _STALLED, _KILLED = range(233, 237)
_NAME, _TEXT = 240 * 8, 256 * 8
_LOCAL = "LOCAL_RANK"


class _Delivered(Protocol):
    """A receipt, as far as the page needs it."""

    @property
    def epoch(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def rows(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a page says."""

    pid: int
    started: int
    """When the process began, in ticks since the machine did: another process may have its number later."""
    rank: int
    world: int
    phase: Phase
    since_s: float
    """When the phase began, by CLOCK_MONOTONIC of the machine."""
    begun: int
    """The optimizer step at which the attempt began."""
    step: int
    """Optimizer steps that the rank has finished."""
    batches: int
    """Micro-batches that the loop got in this attempt."""
    used: int
    """Those that finished steps have used."""
    reader: str
    """The reader that delivered last."""
    epoch: int
    next_step: int
    """The step of the reader, in this epoch, that follows the last delivery."""
    dealt: int
    """The data-parallel rank to which its micro-batches are dealt."""
    of_ranks: int
    """How many data-parallel ranks there are."""
    rows: int
    """Rows of the micro-batches that finished steps have used."""
    first_step_s: float
    """When the first step of the attempt was finished, in seconds since 1970; 0: none was."""
    last_step_s: float
    stalled_s: float
    """For how long saves have held up the training thread, up to the last step."""
    killed: int
    """How many processes the control group had lost for want of memory when the page was made."""
    beats: int = 0
    """How often the rank has said what it does."""
    name: str = ""
    """The name of the phase, if the script has named it."""
    stacks: int = 0
    """The signal on which the process writes its stacks into a file beside the page; 0: none."""
    taken: tuple[tuple[int, int], ...] = ()
    """The newest steps, the oldest first: (step, micro-batches of this attempt at its end)."""
    spent_s: Mapping[Phase, float] = field(default_factory=dict)
    """Seconds of each phase in this attempt."""

    @property
    def doing(self) -> str:
        """The phase, by the name that the script has given it, if it has."""
        return self.name if self.phase == "own" and self.name else self.phase

    @property
    def lives(self) -> bool:
        """Whether the process that writes the page lives."""
        return process_start(self.pid) == self.started

    @property
    def step_s(self) -> float:
        """Seconds of a step on average; 0 if that is not known."""
        steps = self.step - self.begun - 1
        return max(0.0, (self.last_step_s - self.first_step_s) / steps) if steps > 0 else 0.0


class Beat:
    """Writes the page at ``path``, of ``rank`` of ``world``, whose attempt begins at optimizer step ``begun``.

    ``killed``: as in `Page`. Raises ``OSError``. Any thread may call.
    """

    def __init__(self, path: str, *, rank: int, world: int, begun: int = 0, killed: int = 0) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)  # a page that is missing later would end the process
            self._map = mmap.mmap(descriptor, PAGE_BYTES)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("Q")
        self._pid = os.getpid()
        words = self._words
        words[_PID], words[_STARTED] = self._pid, process_start(self._pid) or 0
        words[_DEALT], words[_OF] = rank, world
        words[_RANK], words[_WORLD], words[_LOCAL_RANK] = rank, world, int(os.environ.get(_LOCAL) or 0)
        words[_BEGUN] = words[_STEP] = begun
        words[_KILLED] = killed
        words[_PHASE], words[_SINCE] = _NUMBERS["start"], time.monotonic_ns()
        words[0] = _MAGIC  # last: until then it is no page

    def begins(self, step: int, readers: Mapping[str, tuple[int, int]]) -> None:
        """The attempt goes on after optimizer ``step``. ``readers``: name → (epoch, the step that comes next)."""
        words = self._words
        words[_BEGUN] = words[_STEP] = step
        names = "\n".join(readers).encode()[: PAGE_BYTES - _TEXT - 8]
        self._map[_TEXT : _TEXT + 8 + len(names)] = struct.pack("<Q", len(names)) + names
        if readers:
            words[_READER], (words[_EPOCH], words[_NEXT]) = 0, next(iter(readers.values()))
        self.phase("between")

    def phase(self, phase: Phase) -> None:
        """The rank does something else now."""
        self._turn(_NUMBERS[phase])

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """The rank saves, and goes on with what it did before. While it saves for the last time, it stays in that
        phase; in a forked process nothing happens."""
        before = self._words[_PHASE]
        if before in (_NUMBERS["closing"], _SAVE) or self._pid != os.getpid():
            yield
            return
        self._turn(_SAVE)
        try:
            yield
        finally:
            if self._words[_PHASE] == _SAVE:
                self._turn(before)

    def own_phase(self, name: str) -> None:
        """The script begins a phase that it calls ``name``."""
        data = name.encode()[: _TEXT - _NAME - 1]
        self._map[_NAME : _NAME + 1 + len(data)] = bytes([len(data)]) + data
        self.phase("own")

    def _turn(self, number: int) -> None:
        """The rank begins the phase with this number."""
        words, now = self._words, time.monotonic_ns()
        words[_SPENT + words[_PHASE]] += max(0, now - words[_SINCE])
        words[_PHASE], words[_SINCE] = number, now
        words[_BEATS] += 1

    def writes_stacks(self, number: int) -> None:
        """The process writes its stacks into `stacks_path` whenever it gets the signal with this number."""
        self._words[_STACKS] = number

    def of_reader(self, number: int) -> ReaderBeat:
        """Return what the reader with this number calls."""
        return ReaderBeat(self, number)

    def delivered(self, number: int, receipt: _Delivered) -> None:
        """The loop got the micro-batch of ``receipt`` from the reader with this number."""
        words = self._words
        words[_READER], words[_EPOCH], words[_NEXT] = number, receipt.epoch, receipt.step + 1
        words[_DEALT], words[_OF] = receipt.rank, receipt.world_size
        words[_BATCHES] += 1
        words[_ROWS] += receipt.rows
        self._turn(_COMPUTE)

    def stepped(self, step: int, stalled_s: float) -> None:
        """An optimizer step is finished, and the manager may save. Saves have stalled the loop for so long before."""
        words = self._words
        words[_STEP] = step
        words[_USED], words[_ROWS_USED] = words[_BATCHES], words[_ROWS]
        words[_LAST] = now = time.time_ns()
        words[_FIRST] = words[_FIRST] or now
        words[_STALLED] = int(1e9 * stalled_s)
        words[_TAKEN + step % _RING] = words[_BATCHES]
        self._turn(_SAVE)

    def close(self, *, well: bool) -> None:
        """Stop writing. A rank that ends ``well`` removes its page; in a forked process nothing happens."""
        if self._pid != os.getpid() or self._words.nbytes == 0:
            return
        if well:
            self.phase("ended")
            with contextlib.suppress(OSError):
                os.unlink(self.path)


class ReaderBeat:
    """What one reader calls, on the thread that iterates it."""

    __slots__ = ("_beat", "_number")

    def __init__(self, beat: Beat, number: int) -> None:
        self._beat, self._number = beat, number

    def waits(self) -> None:
        """The loop asks for its next micro-batch."""
        self._beat.phase("data")

    def delivered(self, receipt: _Delivered) -> None:
        """The loop got the micro-batch of ``receipt``."""
        self._beat.delivered(self._number, receipt)

    def ended(self) -> None:
        """The loop saw the end of the rows."""
        self._beat.phase("between")


def read_page(path: str, *, histories: bool = False) -> Page | None:
    """Return what the page at ``path`` says; None if there is none. ``histories``: `Page.taken` and `Page.spent_s`,
    too."""
    try:
        with open(path, "rb") as file:
            data = file.read(PAGE_BYTES)
    except OSError:
        return None
    if len(data) < PAGE_BYTES:
        return None
    words = struct.unpack(f"<{PAGE_BYTES // 8}Q", data)
    if words[0] != _MAGIC:
        return None
    names = data[_TEXT + 8 : _TEXT + 8 + min(words[_TEXT // 8], PAGE_BYTES - _TEXT - 8)].decode("utf-8", "replace")
    readers = names.split("\n")
    return Page(
        pid=words[_PID],
        started=words[_STARTED],
        rank=words[_RANK],
        world=words[_WORLD],
        phase=_PHASES[min(words[_PHASE], len(_PHASES) - 1)],
        since_s=words[_SINCE] / 1e9,
        begun=words[_BEGUN],
        step=words[_STEP],
        batches=words[_BATCHES],
        used=words[_USED],
        reader=readers[min(words[_READER], len(readers) - 1)],
        epoch=words[_EPOCH],
        next_step=words[_NEXT],
        dealt=words[_DEALT],
        of_ranks=words[_OF],
        rows=words[_ROWS_USED],
        first_step_s=words[_FIRST] / 1e9,
        last_step_s=words[_LAST] / 1e9,
        stalled_s=words[_STALLED] / 1e9,
        killed=words[_KILLED],
        beats=words[_BEATS],
        name=data[_NAME + 1 : _NAME + 1 + data[_NAME]].decode("utf-8", "replace"),
        stacks=words[_STACKS],
        taken=_taken(words) if histories else (),
        spent_s={name: words[_SPENT + at] / 1e9 for at, name in enumerate(_PHASES)} if histories else {},
    )


def _taken(words: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the newest steps of a page, and the micro-batches at the end of each."""
    last = words[_STEP]
    return tuple(
        (step, words[_TAKEN + step % _RING]) for step in range(max(words[_BEGUN], last - _RING + 1) + 1, last + 1)
    )


def process_start(pid: int) -> int | None:
    """Return when a process of this machine began, in ticks since the machine did; None if it does not live."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def process_state(pid: int) -> str:
    """Return the state of a process as the kernel writes it, such as ``R``, or ``T`` if a signal has stopped it; empty
    if there is none."""
    fields = _stat(pid)
    return "" if fields is None else fields[0]


def _stat(pid: int) -> list[str] | None:
    """Return the words that the kernel says of a process behind its name."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return None
