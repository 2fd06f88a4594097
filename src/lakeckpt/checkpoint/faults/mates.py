"""This module ends a trainer that is stuck after another rank of its node has died, in the trainer's agent.

A launcher asks the ranks that are left to end, and waits: torchelastic for 30 s. A rank that is stopped, or stuck in a
collective, uses all of this time. Two conditions must hold, never one:

* another rank of the node has died: its process is gone, its page says that it had not ended, and its exit status is
  not 0 or a note of its fault lies beside the page;
* this trainer is stopped (SIGSTOP), or has stood still for three of its usual steps and at least 5 s. While it saves,
  restores, or ends by an exception of its own, for 60 s.

Then the trainer is killed, after a note of that. Nobody who trains is ever killed: its page moves. Where nobody starts
the job again, it is only logged. Time during which this agent itself was stopped counts for nothing.

One daemon thread does this. As long as all ranks live, it sleeps: the kernel wakes it by their pidfds.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lakeckpt.checkpoint.faults.causes import exit_status
from lakeckpt.checkpoint.faults.ending import end_trainer, is_started_again
from lakeckpt.checkpoint.faults.notes import mates_of, note_at
from lakeckpt.watch.beat import Page, Phase, process_state, read_page

__all__ = ["Seen", "seen_of", "watch_mates", "why_stuck"]

_LOOK_S, _LATE_S = 0.5, 2.0
_STATUS_S = 2.0
_STILL_S, _STEPS = 5.0, 3.0
_SPARED_S = 60.0
_STOPPED = "it was stopped"
_SPARED: frozenset[Phase] = frozenset(("start", "restore", "save", "closing", "ended"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is seen of a trainer after the death of another rank, or the loss of another node. ``stopped``: how many
    times in a row it was found stopped. ``still_s``: for how long its page has not moved. ``fails``: it ends by an
    exception of its own."""

    phase: Phase
    step_s: float
    still_s: float
    stopped: int = 0
    fails: bool = False


def why_stuck(seen: Seen) -> str:
    """Return why the trainer is taken for stuck; empty if it is not.

    >>> why_stuck(Seen(phase="compute", step_s=0.1, still_s=5.5))
    'it had stood still for 6 s in compute'
    >>> why_stuck(Seen(phase="compute", step_s=4.0, still_s=5.5)), why_stuck(Seen(phase="save", step_s=0.1, still_s=50))
    ('', '')
    """
    if seen.stopped > 1:
        return _STOPPED
    spared = seen.fails or seen.phase in _SPARED
    if seen.still_s > max(_SPARED_S if spared else _STILL_S, _STEPS * seen.step_s):
        return f"it had stood still for {seen.still_s:.0f} s in {seen.phase}"
    return ""


def watch_mates(page_path: str, attempt: int, trainer: int, *, log: Callable[[str], None]) -> None:
    """Watch the other ranks of this node, on a thread of its own, for the process of the pidfd ``trainer``, whose page
    is ``page_path``."""
    mates = _opened(page_path)  # now: of a rank that dies before, nobody would hear
    work = (page_path, attempt, trainer, mates, is_started_again(), log)
    threading.Thread(target=_watch, args=work, name="lakeckpt-mates", daemon=True).start()


def _watch(
    page_path: str,
    attempt: int,
    trainer: int,
    mates: dict[int, tuple[str, Page]],
    acts: bool,
    log: Callable[[str], None],
) -> None:
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        for pidfd in mates:
            stack.callback(os.close, pidfd)
        dead = _wait_for_death(mates, trainer)
        if dead is None or (seen := _wait_until_stuck(page_path, trainer)) is None:
            return
        page, why = seen
        text = f"rank {dead} of this node had died, and {why}"
        if not acts:
            log(f"its trainer is stuck: {text}. Nobody starts the job again, so that it is left alone")
            return
        log(f"ends its trainer: {text}")
        if why == _STOPPED:  # it was the first to stand still: the others waited for it, and died
            at_s = time.time() - (time.monotonic() - page.since_s)
            end_trainer(page_path, page, attempt, trainer, text=text, cause="hang", what="SIGSTOP", at_s=at_s)
        else:
            end_trainer(page_path, page, attempt, trainer, text=text)


def _opened(page_path: str) -> dict[int, tuple[str, Page]]:
    """Return a pidfd of each other rank of this node that lives → its page, by path and content."""
    mates: dict[int, tuple[str, Page]] = {}
    for path in mates_of(page_path):
        page = read_page(path)
        if page is None or not page.lives:
            continue
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(page.pid)
            if page.lives:
                mates[pidfd] = path, page
            else:  # its number was given to another process before
                os.close(pidfd)
    return mates


def _wait_for_death(mates: dict[int, tuple[str, Page]], trainer: int) -> int | None:
    """Return the first of the other ranks of this node that dies; None if the trainer ends first, or all end well."""
    mates = dict(mates)
    poll = select.poll()
    for pidfd in (trainer, *mates):
        poll.register(pidfd, select.POLLIN)
    while mates:
        for one, _ in poll.poll():
            if one == trainer:
                return None
            path, page = mates.pop(one)
            poll.unregister(one)
            if _died(path, one):
                return page.rank
    return None


def _died(path: str, pidfd: int) -> bool:
    """Return whether the process of a page that is gone has died, and not ended."""
    page = read_page(path)
    if page is None or page.phase == "ended":
        return False
    status = exit_status(pidfd, timeout_s=_STATUS_S)
    note = note_at(path)
    return bool(status) if status is not None else note is not None and note.cause != "unknown"


def _wait_until_stuck(page_path: str, trainer: int) -> tuple[Page, str] | None:
    """Return the page of the trainer when it is stuck, and why; None if it ends before."""
    since_s = looked_s = time.monotonic()
    stopped, poll = 0, select.poll()
    poll.register(trainer, select.POLLIN)
    while not poll.poll(1000 * _LOOK_S):
        now_s = time.monotonic()
        if now_s - looked_s > _LOOK_S + _LATE_S:  # this agent did not run: nor, perhaps, did the trainer
            since_s, stopped = now_s, 0
        looked_s = now_s
        page = read_page(page_path)
        if page is None:
            return None
        stopped = stopped + 1 if process_state(page.pid) == "T" else 0
        if why := why_stuck(seen_of(page, page_path, since_s=since_s, stopped=stopped)):
            return page, why
    return None


def seen_of(page: Page, page_path: str, *, since_s: float, stopped: int = 0) -> Seen:
    """Return what is seen of the trainer whose ``page`` lies at this path. Time before ``since_s`` does not count."""
    still_s = time.monotonic() - max(page.since_s, since_s)
    fails = note_at(page_path) is not None
    return Seen(phase=page.phase, step_s=page.step_s, still_s=still_s, stopped=stopped, fails=fails)
