"""This module keeps the log of a run: numbered slots, each taken once by a begin, a restore, a commit or a roll-back.

Entry ``log/0000000007.lkc`` took slot 7, by a put that succeeds only if nothing is there. An attempt begins by taking
the slot after the last slot. From then on it commits only into the slot after the last slot that it knows: if another
attempt, or a roll-back, has taken that slot meanwhile, our attempt is superseded and must stop. Entries are never
changed or deleted.

If the answer to a put was lost, the slot is read back: the entry is ours if its bytes are ours. The module imports
without torch; `read_log` starts and joins the threads that read.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lakeckpt import __version__
from lakeckpt.checkpoint.format.manifest import Begin, Entry, Manifest, Restored, entry_from_bytes, entry_to_bytes
from lakeckpt.errors import NewerFormat, ObjectExists, ObjectMissing, StorageError, WireError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.progress import Progress

__all__ = [
    "LOG",
    "Damage",
    "LogView",
    "SlotTaken",
    "is_taken",
    "list_slots",
    "put_entry",
    "read_entry",
    "read_log",
    "signed",
    "slot_path",
]

LOG = "log"
_NAME = re.compile(r"log/([0-9]{10})\.lkc", re.ASCII)
_READ_THREADS = 16
_PUT_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """An object of a run that is not as it was written."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class SlotTaken(Exception):
    """The slot holds another entry: ``found``, or None if the entry cannot be read."""

    def __init__(self, slot: int, found: Entry | None) -> None:
        super().__init__(f"slot {slot} is taken")
        self.slot = slot
        self.found = found


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """The log as it was read: intact entries, damaged entries, and the last slot that is taken (-1: none)."""

    entries: Mapping[int, Entry]
    damaged: tuple[Damage, ...]
    last: int

    @property
    def manifests(self) -> list[Manifest]:
        """The commits that can be read, newest first."""
        return [entry for _, entry in sorted(self.entries.items(), reverse=True) if isinstance(entry, Manifest)]

    @property
    def begins(self) -> list[Begin]:
        """The begins that can be read, oldest first."""
        return [entry for _, entry in sorted(self.entries.items()) if isinstance(entry, Begin)]

    @property
    def restores(self) -> list[Restored]:
        """The restores of attempts, and roll-backs, oldest first; the first attempt of a run restored nothing."""
        first = self.entries.get(0)
        by_first = [Restored.by_first(first)] if isinstance(first, Begin) else []
        return by_first + [entry for _, entry in sorted(self.entries.items()) if isinstance(entry, Restored)]

    @property
    def run(self) -> str | None:
        """The identity of the run, or None if nothing can be read."""
        return next((entry.run for _, entry in sorted(self.entries.items())), None)

    def until(self, slot: int) -> LogView:
        """The log as it was when ``slot`` was its last one."""
        return LogView(
            entries={at: entry for at, entry in self.entries.items() if at <= slot},
            damaged=tuple(one for one in self.damaged if one.path <= slot_path(slot)),
            last=min(self.last, slot),
        )


def slot_path(slot: int) -> str:
    """Return the path of the entry of a slot."""
    return f"{LOG}/{slot:010d}.lkc"


def list_slots(storage: Storage, *, taken: int = -1) -> list[int]:
    """Return the slots that are taken, in order. Other names in the folder are skipped.

    ``taken`` is a slot that a put has found taken. If the listing ends before it, the listing is stale, as caches in
    front of stores return them: then all slots up to ``taken`` are taken, and later slots are read one by one.
    """
    found = (_NAME.fullmatch(info.path) for info in storage.list(LOG))
    listed = sorted(int(match.group(1)) for match in found if match is not None)
    if taken < 0 or (listed and listed[-1] >= taken):
        return listed
    while is_taken(storage, taken + 1):
        taken += 1
    return list(range(taken + 1))


def is_taken(storage: Storage, slot: int) -> bool:
    """Return whether a slot has an entry. It reads one byte."""
    try:
        storage.read(slot_path(slot), 0, 1)
    except ObjectMissing:
        return False
    return True


def read_entry(storage: Storage, slot: int) -> Entry:
    """Return the entry of a slot. Raises `WireError` if it is damaged, and `ObjectMissing` if there is none."""
    entry = entry_from_bytes(storage.read(slot_path(slot)))
    if entry.slot != slot:
        raise WireError(f"this is the entry of slot {entry.slot}: a file is in another's place")
    return entry


def read_log(
    storage: Storage,
    *,
    slots: Iterable[int] | None = None,
    taken: int = -1,
    known: Mapping[int, Entry] | None = None,
    progress: Progress | None = None,
) -> LogView:
    """Read the whole log (or ``slots``) with several requests at once; report damaged and missing entries.

    ``taken``: see `list_slots`. ``known`` entries are not read again, because entries never change. ``progress`` counts
    the entries.

    Raises `NewerFormat` if a newer major version has written an entry, and `StorageError` if the store fails.
    """
    listed = list_slots(storage, taken=taken) if slots is None else sorted(slots)
    entries: dict[int, Entry] = {slot: known[slot] for slot in listed if slot in known} if known else {}
    unread = [slot for slot in listed if slot not in entries]
    damaged: list[Damage] = []
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-log") as pool:
        every = zip(unread, pool.map(lambda slot: _entry_or_damage(storage, slot), unread), strict=True)
        for done, (slot, found) in enumerate(every, 1):
            if progress is not None:
                progress(done, len(unread), "log")
            if isinstance(found, Damage):
                damaged.append(found)
            else:
                entries[slot] = found
    if slots is None and listed:
        holes = sorted(set(range(listed[-1])) - set(listed))
        damaged += [Damage(path=slot_path(slot), reason="the entry is missing") for slot in holes]
    runs = sorted({entry.run for entry in entries.values()})
    if len(runs) > 1:
        damaged.append(Damage(path=LOG, reason=f"entries of {len(runs)} runs ({', '.join(runs)}) lie in one log"))
    return LogView(entries=entries, damaged=tuple(damaged), last=listed[-1] if listed else -1)


def _entry_or_damage(storage: Storage, slot: int) -> Entry | Damage:
    try:
        return read_entry(storage, slot)
    except NewerFormat:
        raise
    except (WireError, ObjectMissing) as error:
        return Damage(path=slot_path(slot), reason=str(error))


def signed(clock: Callable[[], float]) -> dict[str, Any]:
    """Return the fields of an entry that say who writes it, and when."""
    return {
        "library": __version__,
        "created_s": float(clock()),
        "write_id": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def put_entry(storage: Storage, entry: Entry) -> None:
    """Put an entry into its slot. Raises `SlotTaken` if the slot holds another entry, and `StorageError` if the store
    fails.

    A put that failed may have happened all the same. It is safe to repeat: the slot is read back, and our bytes in it
    mean success.
    """
    path, data = slot_path(entry.slot), entry_to_bytes(entry)
    for tries_left in range(_PUT_TRIES - 1, -1, -1):
        try:
            storage.put_new(path, data)
            return
        except ObjectExists:
            if storage.read(path) == data:
                return
            raise SlotTaken(entry.slot, _found(storage, entry.slot)) from None
        except StorageError:
            if _lies_there(storage, path, data):
                return
            if not tries_left:
                raise


def _lies_there(storage: Storage, path: str, data: bytes) -> bool:
    try:
        return storage.read(path) == data
    except StorageError:
        return False


def _found(storage: Storage, slot: int) -> Entry | None:
    try:
        return read_entry(storage, slot)
    except (WireError, StorageError):
        return None
