"""This module opens the log file of each rank's agent, whose lock shows whether such an agent lives.

The file lies in the folder of the arenas: ``<digest of the run>.<rank>.log``. A trainer opens it, takes a shared lock
and hands the open file to its agent as standard error. The lock belongs to the open file, so that the kernel releases
it when the agent ends. A process that holds the exclusive lock may remove the file: no agent of that rank lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator

__all__ = ["agents_of", "log_path", "logs_in", "open_log", "unused"]

_NAME = re.compile(r"[0-9a-f]{32}\.\d+\.log", re.ASCII)
_PROCESS = re.compile(rb"^\S+ \S+ \[(\d+)\] begins", re.MULTILINE)
_LONG_BYTES = 2**20


def log_path(folder: str, digest: str, rank: int) -> str:
    """Return where the agents of ``rank`` write their log; ``digest`` is `digest_of_run` in hexadecimal digits."""
    return os.path.join(folder, f"{digest}.{rank}.log")


def logs_in(folder: str) -> list[str]:
    """Return the paths of the logs in ``folder``."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if _NAME.fullmatch(name)]


def open_log(path: str) -> int:
    """Open the log for an agent, with the shared lock. A long log that no living agent writes begins anew."""
    while True:
        log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if os.fstat(log).st_size > _LONG_BYTES and _locked(log, fcntl.LOCK_EX):
            os.truncate(log, 0)
        if _locked(log, fcntl.LOCK_SH) and _is_at(log, path):
            return log
        os.close(log)  # it was removed meanwhile


@contextlib.contextmanager
def unused(path: str) -> Iterator[bool]:
    """Yield whether no agent of this log lives; none can begin while the block runs."""
    try:
        log = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _locked(log, fcntl.LOCK_EX)
    finally:
        os.close(log)


def agents_of(path: str) -> list[int]:
    """Return the processes of the living agents of this log, as far as it names them."""
    with unused(path) as free:
        if free:
            return []
        with open(path, "rb") as log:
            named = [int(one) for one in _PROCESS.findall(log.read())]
    return [one for one in dict.fromkeys(named) if os.path.exists(f"/proc/{one}")]


def _locked(log: int, kind: int) -> bool:
    try:
        fcntl.flock(log, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(opened: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
