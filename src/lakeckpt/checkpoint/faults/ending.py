"""This module ends a trainer that does not come on, after a note of that: the launcher then starts all ranks again.

It is killed hard: a rank that hangs in a collective, or holds the interpreter's lock, does not answer a gentler signal.
Its agent then persists the newest cut, as after each death. The module starts no threads.
"""

from __future__ import annotations

import os
import signal

from lakeckpt.checkpoint.faults.notes import leave_note, note_of
from lakeckpt.recovery.faults import BY_AGENT, Cause
from lakeckpt.watch.beat import Page

__all__ = ["end_trainer", "is_started_again"]


def is_started_again() -> bool:
    """Return whether the launcher starts the job again after a death, by the environment of this process."""
    done, most = (os.environ.get(f"TORCHELASTIC_{one}") for one in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done is not None and most is not None and int(done) < int(most)


def end_trainer(
    path: str,
    page: Page,
    attempt: int,
    pidfd: int,
    *,
    text: str,
    cause: Cause = "signal",
    what: str = BY_AGENT,
    at_s: float = 0.0,
) -> None:
    """Kill the process of ``pidfd``, whose ``page`` lies at ``path``. The note of its death says the ``cause``, and
    ``text``: why it is ended. ``at_s``: when the fault began; now, if that is 0."""
    note = note_of(page, attempt, cause=cause, what=what, text=f"its agent ended it: {text}", at_s=at_s)
    leave_note(path, note)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
