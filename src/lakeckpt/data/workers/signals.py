"""This module lets worker processes ignore the signals that their main process handles.

Slurm, Kubernetes and torchrun send a signal to every process of a job. If the main process handles the signal, its
workers must go on reading until the main process ends them.

A worker is started with these signals blocked: a child inherits the mask in all of its threads, however it is started,
and so does a fork server. A worker of a fork server that is older blocks them itself. Blocked signals would keep torch
from ending a worker by SIGTERM, so a thread of the worker takes them: it ends the process when the main process, or
the parent, has sent SIGTERM, and ignores all others. `end_by_main` starts this daemon thread; it ends with the process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Collection, Iterator
from multiprocessing import resource_tracker

__all__ = ["KNOWN", "blocked_signals", "end_by_main", "ignore_in_workers", "ignored_signals"]

KNOWN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that a process may handle and its workers may ignore. An agent ignores all of them."""
_ignored: frozenset[int] = frozenset()


def ignore_in_workers(numbers: Collection[int]) -> None:
    """Have the workers that this process starts from now on ignore the signals ``numbers``, some of `KNOWN`."""
    global _ignored
    _ignored = frozenset(numbers)


def ignored_signals() -> frozenset[int]:
    """Return the signals that the workers of this process are to ignore."""
    return _ignored


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the signals that workers ignore, on this thread, while the block runs: it starts workers."""
    if not _ignored:
        yield
        return
    resource_tracker.ensure_running()  # its start, which a fork server brings about, unblocks SIGTERM and SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ignored)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_by_main(ignored: Collection[int]) -> None:
    """Block the signals ``ignored`` in this worker, and start the thread that takes them; nothing if there are
    none."""
    if ignored:
        signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
        threading.Thread(target=_take, args=(ignored,), name="lakeckpt-signals", daemon=True).start()


def _take(ignored: Collection[int]) -> None:
    main = multiprocessing.parent_process()
    while True:
        found = signal.sigwaitinfo(ignored)
        senders = {os.getppid(), None if main is None else main.pid}
        if found.si_signo == signal.SIGTERM and found.si_pid in senders:
            os._exit(0)
