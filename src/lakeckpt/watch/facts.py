"""This module reads what ``/proc`` says of a process: its state, and what its training thread waits for.

A rank that holds up a job waits for something: the other end of a socket, a pipe that is full, a lock on a file, a
disk, a child. The kernel names the call of the system in which a thread waits, and the call's first argument is the
file. A file that is a socket leads to its peer by the tables of TCP.

Every function tolerates a process that ends meanwhile, and files that this user may not read: then less is known. One
process takes half a millisecond, and a socket or a lock some more (`benchmarks/beats.py`). Only Linux on x86-64 and ARM
has these numbers of calls. The module starts no threads.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import re
from collections.abc import Iterator

from lakeckpt.watch.looks import ProcessLook, Waits

__all__ = ["children_of", "look_at_process"]

_X86 = {
    "read": 0, "write": 1, "poll": 7, "readv": 19, "writev": 20, "select": 23, "nanosleep": 35, "connect": 42,
    "accept": 43, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "wait4": 61, "flock": 73, "fcntl": 72,
    "fsync": 74, "fdatasync": 75, "pread64": 17, "pwrite64": 18, "futex": 202, "epoll_wait": 232, "openat": 257,
    "clock_nanosleep": 230, "waitid": 247, "pselect6": 270, "ppoll": 271, "epoll_pwait": 281, "accept4": 288,
    "splice": 275, "sendfile": 40, "open": 2, "semtimedop": 220, "msgrcv": 70,
}  # fmt: skip
_ARM = {
    "read": 63, "write": 64, "readv": 65, "writev": 66, "nanosleep": 101, "connect": 203, "accept": 202, "sendto": 206,
    "recvfrom": 207, "sendmsg": 211, "recvmsg": 212, "wait4": 260, "flock": 32, "fcntl": 25, "fsync": 82,
    "fdatasync": 83, "pread64": 67, "pwrite64": 68, "futex": 98, "openat": 56, "clock_nanosleep": 115, "waitid": 95,
    "pselect6": 72, "ppoll": 73, "epoll_pwait": 22, "accept4": 242, "splice": 76, "sendfile": 71,
}  # fmt: skip
_CALLS = {number: name for name, number in (_ARM if platform.machine() == "aarch64" else _X86).items()}
_SLEEPS, _CHILDREN, _LOCKS = ("nanosleep", "clock_nanosleep"), ("wait4", "waitid"), ("flock", "fcntl")
_LOCK_ORDERS = (7, 38)  # F_SETLKW, F_OFD_SETLKW
_MANY = ("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait")
_FIRST = frozenset(
    ["read", "write", "readv", "writev", "connect", "accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg",
     "pread64", "pwrite64", "fsync", "fdatasync", "splice", "sendfile"]
)  # fmt: skip
"""Calls whose first argument is the file that they wait for."""
_PROC = "/proc"


def look_at_process(pid: int) -> ProcessLook | None:
    """Return what is seen of a process, and of its first thread; None if it is not there."""
    fields = _stat(f"{_PROC}/{pid}/stat")
    if fields is None:
        return None
    state = fields[1]
    status, thread = _table(pid, "status"), f"task/{pid}/"
    waits, waits_on = _waits(pid, thread, state)
    moved = _table(pid, "io")
    log, log_bytes = _log(pid)
    switches = _table(pid, thread + "status").get("voluntary_ctxt_switches", "0")
    return ProcessLook(
        pid=pid,
        name=fields[0],
        state=state,
        waits=waits,
        waits_on=waits_on,
        ticks=int(fields[12]) + int(fields[13]),
        switches=_number(switches),
        moved_bytes=_number(moved.get("rchar", "0")) + _number(moved.get("wchar", "0")),
        tracer=_number(status.get("TracerPid", "0")),
        log=log,
        log_bytes=log_bytes,
    )


def children_of(pid: int) -> tuple[ProcessLook, ...]:
    """Return what is seen of the child processes of a process, of all its threads."""
    found = (look_at_process(child) for child in _children(pid))
    return tuple(one for one in found if one is not None)


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"{_PROC}/{pid}/task"):
            yield from map(int, _read(pid, f"task/{task}/children").split())


def _log(pid: int) -> tuple[str, int]:
    """Return the file that the standard error of a process goes to, and how far it has come there. The kernel knows
    both: the file system, which may be what does not answer, is not asked."""
    target = _target(pid, 2)
    if not target.startswith("/") or target.startswith("/dev/"):
        return "", 0
    return target, _number(_table(pid, "fdinfo/2").get("pos", "0"))


def _waits(pid: int, thread: str, state: str) -> tuple[Waits, str]:
    """Return what the first thread of a process waits for."""
    if state == "D":
        return "disk", _read(pid, thread + "wchan").strip("0") or "an uninterruptible call"
    if state != "S":
        return "", ""
    words = _read(pid, thread + "syscall").split()
    if not words or not words[0].isdigit():
        return "", ""
    call, arguments = _CALLS.get(int(words[0]), ""), [int(one, 16) for one in words[1:7]]
    if call in _SLEEPS:
        return "sleep", call
    if call in _CHILDREN:
        return "child", call
    if call == "flock" or (call == "fcntl" and arguments[1] in _LOCK_ORDERS):
        return "lock", f"a lock on {_target(pid, arguments[0])}{_holder(pid, arguments[0])}"
    if call in _FIRST:
        return _of_file(pid, arguments[0])
    if call in _MANY:
        return _polled(pid, call)
    if call in ("open", "openat"):
        return "file", "a file that it opens"
    return ("futex", call) if call == "futex" else ("", call)


def _of_file(pid: int, descriptor: int) -> tuple[Waits, str]:
    """Return which kind of file a descriptor is, and which file."""
    target = _target(pid, descriptor)
    if target.startswith("socket:"):
        return "socket", _peer(pid, target)
    return ("pipe" if target.startswith("pipe:") or _is_fifo(pid, descriptor) else "file"), target


def _polled(pid: int, call: str) -> tuple[Waits, str]:
    """Return what a thread polls: the sockets that the process has connected. It may be any of them."""
    peers: list[str] = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{_PROC}/{pid}/fd"):
            target = _target(pid, int(name))
            if target.startswith("socket:") and (peer := _peer(pid, target)) and peer not in peers:
                peers.append(peer)
    return (
        ("socket", peers[0]) if len(peers) == 1 else ("socket", f"one of {len(peers)} sockets") if peers else ("", call)
    )


def _target(pid: int, descriptor: int) -> str:
    try:
        return os.readlink(f"{_PROC}/{pid}/fd/{descriptor}")
    except OSError:
        return f"file {descriptor}"


def _is_fifo(pid: int, descriptor: int) -> bool:
    try:
        return os.stat(f"{_PROC}/{pid}/fd/{descriptor}").st_mode & 0o170000 == 0o010000
    except OSError:
        return False


def _peer(pid: int, target: str) -> str:
    """Return the other end of a connected socket of TCP, else ''."""
    inode = target.removeprefix("socket:[").removesuffix("]")
    for table in ("tcp", "tcp6"):
        for line in _read(pid, f"net/{table}").splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[9] == inode and not words[2].endswith(":0000"):
                return _address(words[2])
    return ""


def _address(text: str) -> str:
    """Return an address of ``/proc/net/tcp`` for people.

    >>> _address("0100007F:1F90"), _address("0000000000000000FFFF00000100007F:0050")
    ('127.0.0.1:8080', '127.0.0.1:80')
    """
    host, _, port = text.partition(":")
    data = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    address = ipaddress.ip_address(data)
    mapped = getattr(address, "ipv4_mapped", None)
    return f"{mapped or (address if address.version == 4 else f'[{address}]')}:{int(port, 16)}"


def _holder(pid: int, descriptor: int) -> str:
    """Return who holds a lock on the file that a process waits for, as ``/proc/locks`` says."""
    try:
        found = os.stat(f"{_PROC}/{pid}/fd/{descriptor}")
    except OSError:
        return ""
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError), open(f"{_PROC}/locks", encoding="ascii") as locks:
        for line in locks:
            words = line.split()
            if device in words and "->" not in words and (held := re.search(r"\s(\d+)\s" + re.escape(device), line)):
                return f", held by process {held.group(1)}"
    return ""


def _stat(path: str) -> list[str] | None:
    """Return the name of a process, its state, and the words behind it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            head, _, rest = file.read().rpartition(")")
    except OSError:
        return None
    return [head.partition("(")[2], *rest.split()] if rest else None


def _read(pid: int, name: str) -> str:
    try:
        with open(f"{_PROC}/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _table(pid: int, name: str) -> dict[str, str]:
    """Return a file of lines ``name: value``."""
    lines = (line.partition(":") for line in _read(pid, name).splitlines())
    return {key: value.strip() for key, _, value in lines}


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
