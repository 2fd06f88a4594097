"""This module keeps the pages and the fault notes of a run on a node, beside the arenas.

They are files of one name, ``<digest of the run>.<attempt>.<rank>``: the page with ``.beat``, the note with ``.fault``.
A rank whose loop ends by an exception leaves its note itself. A rank that is killed cannot: its agent, and `lakeckpt
run`, leave the note from its page. If nobody did, the next attempt makes a note of an unknown cause from the page. Of
several notes of one death, the one that knows most stays.

A folder that cannot be written has no pages and no notes. The module imports without torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.faults.causes import killed_for_memory
from lakeckpt.errors import ArenaError, WireError
from lakeckpt.recovery.faults import BatchAt, Cause, FaultNote, cut_off, explained
from lakeckpt.watch.beat import COMPUTES, Beat, Page, read_page
from lakeckpt.watch.recorder import socket_path
from lakeckpt.watch.stacks import stacks_path

__all__ = [
    "add_evidence",
    "attempt_of",
    "begin_page",
    "leave_note",
    "living_pages",
    "mates_of",
    "note_at",
    "note_of",
    "notes_in",
    "page_beside",
    "page_path",
    "remove_notes",
    "remove_old_notes",
]

_PAGE, _NOTE = ".beat", ".fault"
_NAME = re.compile(r"([0-9a-f]{32})\.(\d+)\.(\d+)\.(beat|fault)", re.ASCII)
_OLD_S = 30 * 86_400.0
_KNOWS: dict[Cause, int] = {"unknown": 0, "exit": 1, "signal": 2, "out of memory": 3, "exception": 4}


def page_path(folder: str, digest: bytes, attempt: int, rank: int) -> str:
    """Return where the page of ``rank`` lies in an attempt of the run with this digest."""
    return os.path.join(folder, f"{digest.hex()}.{attempt}.{rank}{_PAGE}")


def attempt_of(page: str) -> int:
    """Return the attempt of the page at this path."""
    return int(os.path.basename(page).split(".")[1])


def page_beside(page: str, rank: int) -> str:
    """Return where the page of another ``rank`` lies, in the attempt of the ``page`` at this path."""
    folder, name = os.path.split(page)
    return page_path(folder, bytes.fromhex(name.split(".")[0]), attempt_of(page), rank)


def mates_of(page: str) -> list[str]:
    """Return the paths of the pages of the other ranks of this node, in the attempt of the ``page`` at this path."""
    folder, name = os.path.split(page)
    every = _pages_in(folder, bytes.fromhex(name.split(".")[0]))
    return [path for path, its in every if its == attempt_of(page) and path != page]


def begin_page(folder: ArenaFolder, digest: bytes, attempt: int, rank: int, world: int) -> Beat | None:
    """Begin the page of a rank; None if the folder cannot hold it."""
    try:
        folder.make()
        path = page_path(folder.path, digest, attempt, rank)
        return Beat(path, rank=rank, world=world, killed=killed_for_memory())
    except (OSError, ArenaError):
        return None


def note_of(page: Page, attempt: int, *, cause: Cause, what: str, text: object = "", at_s: float = 0.0) -> FaultNote:
    """Return the note of the death of the rank whose ``page`` this is; ``at_s``: now."""
    step = page.next_step if page.phase == "data" else page.next_step - 1
    batch = None
    if page.reader and (page.phase == "data" or page.phase in COMPUTES) and step >= 0:
        batch = BatchAt(reader=page.reader, epoch=page.epoch, step=step, rank=page.dealt, world=max(page.of_ranks, 1))
    note = FaultNote(
        attempt=attempt,
        rank=page.rank,
        world=max(page.world, 1),
        node=socket.gethostname(),
        at_s=at_s or time.time(),
        cause=cause,
        what=what,
        text=cut_off(text),
        phase=page.phase,
        step=page.step,
        begun=page.begun,
        batch=batch,
        batches=max(0, page.batches - page.used),
        rows=page.rows,
        step_s=page.step_s,
        stalled_s=page.stalled_s,
    )
    return explained(note)


def leave_note(page: str, note: FaultNote) -> FaultNote:
    """Write the note beside the page at this path, unless a note that knows more is there. Returns the one that
    stays."""
    known = note_at(page)
    if known is not None and _KNOWS.get(known.cause, 9) >= _KNOWS.get(note.cause, 9):
        return known
    if known is not None:
        note = replace(note, at_s=min(note.at_s, known.at_s))
    _write(page, note)
    return note


def add_evidence(page: str, note: FaultNote, lines: Sequence[str]) -> FaultNote:
    """Add ``lines`` of the kernel's log to the note beside the page at this path, and explain it anew. An error that is
    the script's own, or that a restart meets again, stays as it is. Returns the note."""
    says = note.explicit
    if not lines or (says is not None and (not says.is_sure or says.restart == "stop")):
        return note
    note = explained(replace(note, text=cut_off("; ".join((note.text, *lines)))))
    _write(page, note)
    return note


def _write(page: str, note: FaultNote) -> None:
    path = _note_path(page)
    written = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(note.to_bytes())
        os.replace(written, path)


def note_at(page: str) -> FaultNote | None:
    """Return the note beside the page at this path, or None."""
    with contextlib.suppress(OSError, WireError), open(_note_path(page), "rb") as file:
        return FaultNote.from_bytes(file.read())
    return None


def notes_in(folder: str, digest: bytes) -> list[FaultNote]:
    """Return the notes of all deaths that this node knows of the run with this digest."""
    found = []
    for path, attempt in _pages_in(folder, digest):
        note, page = note_at(path), read_page(path)
        if note is None and page is not None and page.phase != "ended" and not page.lives:
            note = note_of(page, attempt, cause="unknown", what="", at_s=_changed_s(path))
        if note is not None:
            found.append(note)
    return found


def living_pages(folder: str, digest: bytes) -> list[Page]:
    """Return the pages of the ranks of this node that train the run with this digest, with their histories."""
    pages = (read_page(path, histories=True) for path, _ in _pages_in(folder, digest))
    return sorted((page for page in pages if page is not None and page.lives), key=lambda page: page.rank)


def remove_notes(folder: str, digest: bytes, *, before: float = math.inf) -> None:
    """Remove the pages and notes of the attempts before ``before`` of the run with this digest, or of all runs at the
    place whose digest it begins with."""
    for path, attempt in _pages_in(folder, digest):
        if attempt < before:
            _remove(path)


def remove_old_notes(folder: str) -> None:
    """Remove the pages of dead processes, and notes, that are a month old: their runs were not started again."""
    for path, _ in _pages_in(folder, b""):
        page = read_page(path)
        if _changed_s(path) < time.time() - _OLD_S and not (page is not None and page.lives):
            _remove(path)


def _remove(path: str) -> None:
    for one in (path, _note_path(path), stacks_path(path), socket_path(path)):
        with contextlib.suppress(OSError):
            os.unlink(one)


def _note_path(page: str) -> str:
    return page.removesuffix(_PAGE) + _NOTE


def _pages_in(folder: str, digest: bytes) -> Iterator[tuple[str, int]]:
    """Yield the path of each page, whether or not it is there still, and its attempt; of runs whose digest begins
    so."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    matches = [match for name in names if (match := _NAME.fullmatch(name)) is not None]
    every = {one.groups()[:3] for one in matches if one.group(1).startswith(digest.hex())}
    for run, attempt, rank in sorted(every, key=lambda one: (one[0], int(one[1]), int(one[2]))):
        yield page_path(folder, bytes.fromhex(run), int(attempt), int(rank)), int(attempt)


def _changed_s(path: str) -> float:
    """Return when a page, or its note, was last written, as far as the file system says; writes to memory may not
    change that."""
    page = read_page(path)
    for one in (path, _note_path(path)):
        with contextlib.suppress(OSError):
            return max(os.stat(one).st_mtime, 0.0 if page is None else page.last_step_s)
    return time.time()
