"""This module puts faults into a rank of a job, and has healthy ranks do what looks like a fault.

Each function runs on the training thread of the rank, with the folder of the job. `FAULTS` are the kinds that hold up
the job or end it, `HEALTHY` those that do neither. `tests/jobs/stalls.py` runs the job.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

HOLDS_S = 8.0
"""For so long a healthy job stands still."""
DISK, FIFO, ADDED, SLOW = "disk", "fifo", "added", "slow"
"""Of the folder of the job: the disk that freezes, the pipe, the file that the table grows by, and the file that makes
the storage slow."""


def stopped(folder: Path) -> None:
    """Stop by a signal."""
    os.kill(os.getpid(), signal.SIGSTOP)


def two_locks(folder: Path) -> None:
    """Two threads take two locks in different orders."""
    one, other, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take_other() -> None:
        with other:
            both.wait()
            one.acquire()

    threading.Thread(target=take_other, daemon=True).start()
    with one:
        both.wait()
        other.acquire()


def loop(folder: Path) -> None:
    """An endless loop of Python."""
    while True:
        pass


def loop_in_c(folder: Path) -> None:
    """An endless call of C that holds the interpreter's lock."""
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def busy_in_c(folder: Path) -> None:
    """A long call of C that holds the interpreter's lock and computes."""
    sum(range(1 << 62))


def sleep_in_c(folder: Path) -> None:
    """An endless call of C without the interpreter's lock."""
    ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def silent_socket(folder: Path) -> None:
    """Read from a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.recv(1)


def full_pipe(folder: Path) -> None:
    """Write into a pipe that nobody reads."""
    _, end = os.pipe()
    while True:
        os.write(end, bytes(4096))


def file_lock(folder: Path) -> None:
    """Wait for a lock on a file that another opening holds."""
    with (folder / "locked").open("w") as one, (folder / "locked").open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)


def child(folder: Path) -> None:
    """Wait for a child process that does not end."""
    subprocess.run(["sleep", "1000"], check=False)


def dead_child(folder: Path) -> None:
    """Wait for the answer of a child process that has died."""
    process = subprocess.Popen(["true"])  # which nobody waits for
    threading.Event().wait()
    process.wait()


def swapped(folder: Path) -> None:
    """Enter another collective than the others."""
    import torch
    import torch.distributed as dist

    dist.all_gather([torch.zeros(3) for _ in range(dist.get_world_size())], torch.zeros(3))


def leaves(folder: Path) -> None:
    """Leave the loop before the others."""
    raise StopIteration


def skips(folder: Path) -> None:
    """Take a micro-batch more than the others; the loop does it."""


def sleeps(folder: Path) -> None:
    """Sleep."""
    time.sleep(1000)


def frozen_disk(folder: Path) -> None:
    """Write to a file system that is frozen."""
    subprocess.run(["fsfreeze", "-f", folder / DISK], check=True)
    (folder / DISK / "file").write_text("x")


def stopped_worker(folder: Path) -> None:
    """Stop the worker process of the loader."""
    for one in multiprocessing.active_children():
        os.kill(one.pid or 0, signal.SIGSTOP)


def silent_fifo(folder: Path) -> None:
    """Open a named pipe that nobody writes."""
    os.mkfifo(folder / FIFO)
    (folder / FIFO).read_bytes()


def other_size(folder: Path) -> None:
    """Enter a collective with a smaller size than the others: gloo ends the rank that gets too many bytes."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(3))


def killed(folder: Path) -> None:
    """Die by a signal."""
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(folder: Path) -> None:
    """Die by a fault of memory."""
    ctypes.string_at(0)


def raises(folder: Path) -> None:
    """Raise an exception."""
    raise ValueError("this micro-batch is bad")


def naps(folder: Path) -> None:
    """Sleep for a while."""
    time.sleep(HOLDS_S)


def evaluates(folder: Path) -> None:
    """Evaluate for a while."""
    until_s, data = time.monotonic() + HOLDS_S, bytes(1000)
    while time.monotonic() < until_s:
        data = bytes(reversed(data))


def all_stop(folder: Path) -> None:
    """Stop with all other ranks; a process lets each of them go on."""
    subprocess.Popen(["sh", "-c", f"sleep {HOLDS_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


_TRACER = """
import ctypes, sys, time
SEIZE, INTERRUPT = 0x4206, 0x4207
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
for order in SEIZE, INTERRUPT:
    if ptrace(order, int(sys.argv[1]), None, None):
        raise OSError(ctypes.get_errno(), "ptrace")
time.sleep(float(sys.argv[2]))
"""
_PR_SET_PTRACER, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)


def debugged(folder: Path) -> None:
    """Be stopped by a debugger for a while. It lets the rank go on as it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)
    subprocess.run([sys.executable, "-c", _TRACER, str(os.getpid()), str(HOLDS_S)], check=True)


def long_save(folder: Path) -> None:
    """Have a storage that takes a second for each request, while all ranks save; the loop does it."""
    (folder / SLOW).touch()


def grows(folder: Path) -> None:
    """Have read nearly all of a table that is followed; a file comes after a while."""

    def add() -> None:
        time.sleep(1.5 * HOLDS_S)
        (folder / ADDED).rename(folder / "table" / "part-99.parquet")

    threading.Thread(target=add, daemon=True).start()


def slow(folder: Path) -> None:
    """Take three times as long for each step from now on; the loop does it."""


FAULTS: dict[str, tuple[Callable[[Path], None], frozenset[str]]] = {
    "stopped": (stopped, frozenset({"stopped"})),
    "two locks": (two_locks, frozenset({"lock"})),
    "loop": (loop, frozenset({"loop"})),
    "in C with the lock": (loop_in_c, frozenset({"gil", "pipe"})),
    "computes in C with the lock": (busy_in_c, frozenset({"loop", "gil"})),
    "in C without the lock": (sleep_in_c, frozenset({"pipe"})),
    "silent socket": (silent_socket, frozenset({"socket"})),
    "full pipe": (full_pipe, frozenset({"pipe"})),
    "file lock": (file_lock, frozenset({"file"})),
    "child": (child, frozenset({"child"})),
    "dead child": (dead_child, frozenset({"child"})),
    "swapped collective": (swapped, frozenset({"mismatch"})),
    "leaves": (leaves, frozenset({"out of step"})),
    "skips": (skips, frozenset({"out of step"})),
    "sleeps": (sleeps, frozenset({"sleep"})),
    "frozen disk": (frozen_disk, frozenset({"disk"})),
    "stopped worker": (stopped_worker, frozenset({"worker"})),
    "silent FIFO": (silent_fifo, frozenset({"file", "pipe"})),
    "other size": (other_size, frozenset({"signal SIGABRT"})),
    "killed": (killed, frozenset({"signal SIGKILL"})),
    "crashes": (crashes, frozenset({"signal SIGSEGV"})),
    "raises": (raises, frozenset({"exception ValueError"})),
}
"""Name → what holds up the job, and the kinds of verdict that are right."""
DEATHS = frozenset(("other size", "killed", "crashes", "raises"))
"""Faults that end the job at once: the launcher starts it again, and the run says which rank died first, of what."""
HEALTHY: dict[str, Callable[[Path], None]] = {
    "naps": naps,
    "evaluates": evaluates,
    "all stop": all_stop,
    "debugged": debugged,
    "long save": long_save,
    "grows": grows,
    "slow": slow,
}
EVERYWHERE = frozenset(("all stop",))
"""Kinds that happen on all ranks."""
