"""This module reads the stacks of the threads of another process of this machine.

Two ways lead to them, the better one first:

* py-spy (``pip install lakeckpt[watch]``) reads the memory of the process, which goes on. It also works if the process
  is stopped or holds the lock of the interpreter, and says which thread holds it.
* faulthandler, of the standard library: `write_on_signal` lets a process write its stacks into a file whenever it gets
  a signal, also while it holds the lock of the interpreter in C. A process that is stopped writes nothing.

The training thread is the main thread of the process. The module starts no threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from lakeckpt.watch.looks import Frame, ThreadLook

__all__ = ["parse_faulthandler", "parse_pyspy", "stacks_of", "stacks_path", "write_on_signal"]

_SPY_S, _SIGNAL_S, _PAUSE_S = 5.0, 1.0, 0.02
_MOST_FRAMES = 60
_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def stacks_path(page: str) -> str:
    """Return where the process of the page at this path writes its stacks."""
    return page.removesuffix(".beat") + ".stacks"


_written: list[int] = []
"""The file that this process writes its stacks to."""


def write_on_signal(path: str) -> int:
    """Let this process write the stacks of all its threads to ``path`` on a signal. Returns its number; 0 if no signal
    is free, or the file cannot be written. A later call changes the file."""
    for number in range(signal.SIGRTMAX - 3, signal.SIGRTMIN + 3, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError:
                return 0
            faulthandler.register(number, file=descriptor, all_threads=True)
            while _written:
                os.close(_written.pop())
            _written.append(descriptor)
            return number
    return 0


def stacks_of(pid: int, page: str, number: int) -> tuple[ThreadLook, ...]:
    """Return the stacks of a process, whose page lies at ``page``, and which writes them on the signal ``number`` (0:
    on none). Empty: neither way leads to them."""
    return _by_pyspy(pid) or (_by_signal(pid, stacks_path(page), number) if number else ())


def _by_pyspy(pid: int) -> tuple[ThreadLook, ...]:
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    spy = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if spy is None:
        return ()
    command = [spy, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(command, capture_output=True, timeout=_SPY_S, stdin=subprocess.DEVNULL, check=True)
        return parse_pyspy(json.loads(done.stdout), pid)
    return ()


def parse_pyspy(threads: Iterable[Any], pid: int) -> tuple[ThreadLook, ...]:
    """Return the stacks in what ``py-spy dump --json`` has printed of a process."""
    found = []
    for one in threads:
        frames = [
            Frame(function=str(at["name"]), file=str(at["filename"]), line=max(0, int(at["line"])))
            for at in one["frames"][:_MOST_FRAMES]
        ]
        is_main = one.get("os_thread_id") == pid or one.get("thread_name") == "MainThread"
        name = str(one.get("thread_name") or "")
        look = ThreadLook(name=name, is_main=is_main, owns_gil=bool(one.get("owns_gil")), frames=tuple(frames))
        found.append(look)
    return tuple(found)


def _by_signal(pid: int, path: str, number: int) -> tuple[ThreadLook, ...]:
    try:
        before = os.stat(path).st_size
        os.kill(pid, number)
        until_s, size = time.monotonic() + _SIGNAL_S, before
        while time.monotonic() < until_s:
            time.sleep(_PAUSE_S)
            last, size = size, os.stat(path).st_size
            if size == last > before:  # it has written, and stopped to
                break
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(before)
            return parse_faulthandler(file.read().splitlines())
    except OSError:
        return ()


def parse_faulthandler(lines: Sequence[str]) -> tuple[ThreadLook, ...]:
    """Return the stacks in what faulthandler has written. The main thread is the last of them, as threads stand in the
    order of their creation, the newest first."""
    found: list[ThreadLook] = []
    frames: list[Frame] = []

    def close(is_main: bool) -> None:
        if frames:
            found.append(ThreadLook(is_main=is_main, frames=tuple(frames[:_MOST_FRAMES])))
            frames.clear()

    for line in lines:
        if _THREAD.match(line):
            close(False)
        elif match := _FRAME.match(line):
            file, number, function = match.groups()
            frames.append(Frame(function=function, file=file, line=int(number) if number.isdigit() else 0))
    close(True)
    return tuple(found)
