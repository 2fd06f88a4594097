"""This module reads and writes what a run says of its faults: entries of the log, and the folder ``faults/``.

The entry `Restored` of an attempt names the faults that ended the attempts before. A fault after which no attempt began
stands in ``faults/`` alone, as the note of a rank that an agent has put there. How long the first step of an attempt
took is known when its entry is written: rank 0 puts it into ``faults/`` as well. Stalls lie in ``watch/``, with the
looks of nodes that are judged together. The module imports without torch; `looks_of` reads with threads, which end
with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from lakeckpt.checkpoint.format.manifest import Manifest, Restored
from lakeckpt.checkpoint.persist.history import History
from lakeckpt.errors import ObjectMissing, StorageError, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.recovery.account import Account, account_of
from lakeckpt.recovery.faults import Fault, FaultNote, explained, first_cause
from lakeckpt.watch.limits import Habits
from lakeckpt.watch.slow import SlowRank
from lakeckpt.watch.stalls import NodeLooks, Stall
from lakeckpt.watch.system.explicit import FaultTable
from lakeckpt.wire.documents import Count, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = [
    "FAULTS",
    "WATCH",
    "FirstStep",
    "faults_of",
    "habits_of",
    "looks_of",
    "put_first_step",
    "put_habits",
    "put_looks",
    "put_note",
    "put_slow",
    "put_stall",
    "slow_of",
    "stalls_of",
]

FAULTS, WATCH = "faults", "watch"
_STALLS, _LOOKS, _HABITS = f"{WATCH}/stalls", f"{WATCH}/looks", f"{WATCH}/habits"
_SLOW = f"{WATCH}/slow"
_KIND, _VERSION = "first-step", (1, 0)
_AT_A_TIME = 16
_STEP = ".step"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The first step of an ``attempt`` was finished, so many ``seconds`` after its restore."""

    attempt: Count
    seconds: float


def put_note(storage: Storage, note: FaultNote) -> None:
    """Put the note of a death into the run. Raises `StorageError`."""
    storage.put(f"{FAULTS}/{note.attempt:010d}.{note.rank:05d}", [note.to_bytes()])


def put_first_step(storage: Storage, first: FirstStep) -> None:
    """Put the time of a first step into the run. Raises `StorageError`."""
    storage.put(f"{FAULTS}/{first.attempt:010d}{_STEP}", [dumps(to_plain(first), kind=_KIND, version=_VERSION)])


def put_stall(storage: Storage, stall: Stall) -> str:
    """Put a stall into the run, or replace it. Returns where it lies. Raises `StorageError`."""
    path = f"{_STALLS}/{stall.attempt:010d}.{round(1000 * stall.began_s):015d}"
    storage.put(path, [stall.to_bytes()])
    return path


def stalls_of(storage: Storage) -> list[tuple[str, Stall]]:
    """Return the stalls of the run, the oldest first, each with its path. Those that cannot be read are left out."""
    found = []
    with contextlib.suppress(StorageError):
        for info in sorted(storage.list(_STALLS), key=lambda one: one.path):
            with contextlib.suppress(StorageError, WireError):
                found.append((info.path, Stall.from_bytes(storage.read(info.path))))
    return found


def put_looks(storage: Storage, attempt: int, looks: NodeLooks) -> None:
    """Give the looks of a node to the other nodes. Raises `StorageError`."""
    storage.put(f"{_LOOKS}/{attempt:010d}.{looks.here[0]:05d}", [looks.to_bytes()])


def looks_of(storage: Storage, attempt: int, *, known: Container[int] = ()) -> list[NodeLooks]:
    """Return the newest looks of the nodes of an attempt that gave theirs, but for nodes whose first rank is ``known``.
    So many are read at a time that a thousand nodes take some seconds. Raises `StorageError`."""
    begin = f"{_LOOKS}/{attempt:010d}."
    paths = [info.path for info in storage.list(_LOOKS) if info.path.startswith(begin)]
    wanted = [path for path in paths if int(path.removeprefix(begin)) not in known]

    def read(path: str) -> NodeLooks | None:
        with contextlib.suppress(WireError, ObjectMissing):
            return NodeLooks.from_bytes(storage.read(path))
        return None

    with ThreadPoolExecutor(max_workers=_AT_A_TIME) as pool:
        return [one for one in pool.map(read, wanted) if one is not None]


def put_slow(storage: Storage, slow: SlowRank) -> None:
    """Put what is known of a slow rank into the run, or replace it. Raises `StorageError`."""
    storage.put(f"{_SLOW}/{slow.attempt:010d}.{slow.rank:05d}", [slow.to_bytes()])


def slow_of(storage: Storage, attempt: int) -> list[SlowRank]:
    """Return the ranks of an attempt that are slow, or were. Those that cannot be read are left out."""
    found = []
    with contextlib.suppress(StorageError):
        begin = f"{_SLOW}/{attempt:010d}."
        for info in sorted(storage.list(_SLOW), key=lambda one: one.path):
            if info.path.startswith(begin):
                with contextlib.suppress(WireError, ObjectMissing):
                    found.append(SlowRank.from_bytes(storage.read(info.path)))
    return found


def put_habits(storage: Storage, habits: Habits) -> None:
    """Put what is known of the job's habits into the run. Raises `StorageError`."""
    storage.put(_HABITS, [habits.to_bytes()])


def habits_of(storage: Storage) -> Habits | None:
    """Return what earlier attempts knew of the job's habits; None: nothing, or it cannot be read."""
    with contextlib.suppress(StorageError, WireError):
        return Habits.from_bytes(storage.read(_HABITS))
    return None


def faults_of(storage: Storage, history: History, table: FaultTable | None = None) -> tuple[list[Fault], Account]:
    """Return the faults of the run, in the order of their attempts, and the account. Documents in ``faults/`` that
    cannot be read are skipped. ``table``: explains all faults anew."""
    steps, notes = _documents(storage)
    if table is not None:
        notes = [explained(note, table) for note in notes]
    found = {fault.first.attempt: fault for entry in history.restores for fault in _with_first_step(entry, steps)}
    begun = max((one.attempt for one in history.begins), default=-1)
    for attempt in sorted({note.attempt for note in notes} - found.keys()):
        if attempt == begun:  # what no attempt has joined yet
            found[attempt] = Fault(first=first_cause([note for note in notes if note.attempt == attempt]))
    faults = [found[attempt] for attempt in sorted(found)]
    if table is not None:
        faults = [replace(one, first=explained(one.first, table)) for one in faults]
    entries: list[Manifest | Restored] = [*history.chain, *history.abandoned, *history.restores]
    times = [one.created_s for one in (*entries, *history.begins)] + [one.first.at_s for one in faults]
    elapsed_s = max(times) - min(times) if times else 0.0
    stalled_s = sum(one.length_s for _, one in stalls_of(storage) if one.ended_s and not one.acted)
    return faults, account_of(faults, elapsed_s=elapsed_s, stalled_s=stalled_s)


def _with_first_step(entry: Restored, steps: dict[int, float]) -> list[Fault]:
    """Return the faults of an entry; the newest of them with the first step of the attempt that wrote the entry."""
    faults = list(entry.faults)
    if faults and entry.attempt in steps:
        phases = {**faults[-1].phases, "first step": steps[entry.attempt]}
        faults[-1] = replace(faults[-1], phases=phases)
    return faults


def _documents(storage: Storage) -> tuple[dict[int, float], list[FaultNote]]:
    """Return attempt → seconds of its first step, and all notes."""
    steps: dict[int, float] = {}
    notes: list[FaultNote] = []
    with contextlib.suppress(StorageError):
        for info in storage.list(FAULTS):
            with contextlib.suppress(StorageError, WireError):
                data = storage.read(info.path)
                if info.path.endswith(_STEP):
                    plain = loads(data, kind=_KIND, supported=_VERSION)
                    first: FirstStep = from_plain(FirstStep, plain, "the time of a first step")
                    steps[first.attempt] = first.seconds
                else:
                    notes.append(FaultNote.from_bytes(data))
    return steps, notes
