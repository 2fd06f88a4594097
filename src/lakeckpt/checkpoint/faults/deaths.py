"""This module notes the death of a trainer, in its agent: by whom it was ended, and what it was doing.

Lines of the kernel's log about the process or the node's devices are added, if this user may read that log. The module
imports without torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
import time

from lakeckpt.checkpoint.faults.causes import cause_of_status, exit_status, killed_for_memory
from lakeckpt.checkpoint.faults.notes import add_evidence, leave_note, note_at, note_of
from lakeckpt.checkpoint.faults.records import put_note
from lakeckpt.errors import StorageError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.watch.beat import read_page
from lakeckpt.watch.system.kernel_log import UNREADABLE, fault_lines

__all__ = ["note_death"]

_SEEN = "its agent saw it end"
_STATUS_S = 2.0
"""How long the parent of a process may take to collect its exit status."""


def note_death(storage: Storage, page_path: str, attempt: int, pidfd: int) -> str:
    """Note why the process of ``pidfd`` (-1: there is none) has died, from its page, beside the page; and in the run at
    ``storage``, if it died of its own. Returns what was noted; empty if there is no page, or if the process lives on.
    """
    at_s = time.time()
    note, page = note_at(page_path), read_page(page_path)
    if note is None and page is not None and page.phase != "ended":
        status = exit_status(pidfd, timeout_s=_STATUS_S) if pidfd >= 0 else None
        if status is None and page.lives:
            return ""
        cause, what = cause_of_status(status, killed=killed_for_memory() - page.killed)
        note = leave_note(page_path, note_of(page, attempt, cause=cause, what=what, text=_SEEN, at_s=at_s))
    if note is None:
        return ""
    if page is not None:
        lines = fault_lines(page.pid)
        note = add_evidence(page_path, note, lines if lines is not None else [UNREADABLE] if note.text == _SEEN else [])
    if note.is_own:
        with contextlib.suppress(StorageError):
            put_note(storage, note)
    return note.name
