"""This module asks the kernel what happens to processes: it runs four scripts of bpftrace and reads what they print.

| script | an event |
| --- | --- |
| ``signals`` | a process sent SIGKILL, SIGTERM or SIGSTOP to another one |
| ``blocked`` | a thread was, or is, in state D for more than five seconds |
| ``disk`` | a process gave bytes to a disk within half a second |
| ``calls`` | a process called a listed function of CUDA, NCCL, libibverbs or gloo |

`EventLines` reads what a script prints, without I/O. `trace` runs the scripts, which needs root; a caller asks
`missing` first. ``calls`` costs 11 microseconds a call and may need 15 seconds to start: it is for a person who waits.
The module imports without torch, and starts no threads; each script is a child that has ended when the generator
`trace` is closed.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lakeckpt.errors import ConfigError

__all__ = ["READY", "SCRIPTS", "EventLines", "KernelEvent", "missing", "trace"]

SCRIPTS = ("signals", "blocked", "disk", "calls")
READY = "ready"
"""The kind of the event that says that the scripts see what happens from now on."""
_BLOCKED_MS = 5000
_START_S, _END_S = 90.0, 10.0
_EVENTS = Path("/sys/kernel/tracing/events"), Path("/sys/kernel/debug/tracing/events")
_FUNCTIONS = {
    "libcuda.so": ("cuStreamSynchronize", "cuEventSynchronize", "cuMemAlloc_v2"),
    "libnccl.so": ("ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclGroupEnd"),
    "libibverbs.so": ("ibv_reg_mr", "ibv_create_qp"),
    "libtorch_cpu.so": ("_ZN4gloo9allreduceERKNS_16AllreduceOptionsE",),
}
_DISK = {"R": "read", "W": "wrote", "F": "flushed", "D": "discarded"}
_MAPPED = re.compile(r"(/\S+/(" + "|".join(map(re.escape, _FUNCTIONS)) + r")[.\d]*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEvent:
    """Something that the kernel saw of the process (``blocked``: the thread) ``pid``."""

    kind: str
    pid: int = 0
    process: str = ""
    text: str = ""
    amount: int = 0
    """``signals``: the pid that got the signal; ``blocked``: milliseconds; ``disk``: bytes; ``calls``: microseconds."""


class EventLines:
    """Reads the lines of one script. Pure: it keeps the kernel's time, and which threads were reported as blocked."""

    def __init__(self, blocked_ms: int = _BLOCKED_MS) -> None:
        self._blocked_ms = blocked_ms
        self._now = 0
        self._seen: set[tuple[str, int]] = set()

    def events(self, line: str | bytes) -> list[KernelEvent]:
        """Return the events of a line of JSON, the event `READY` with the first tick. A line of another form has none.

        >>> lines = EventLines()
        >>> lines.events('{"type": "value", "data": ["tick", 17]}')[0].kind
        'ready'
        >>> lines.events('{"type": "value", "data": ["signal", 7, "bash", 9, 8, "python"]}')[0].text
        'sent SIGKILL to 8 (python)'
        """
        try:
            said = json.loads(line)
            data = said["data"]
            if said["type"] == "value":
                return self._value(data)
            if said["type"] in ("map", "stats"):
                return [one for name, values in data.items() for one in self._summed(name, values)]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            pass
        return []

    def _value(self, data: list[Any]) -> list[KernelEvent]:
        if data[0] == "tick":
            was, self._now = self._now, int(data[1])
            return [] if was else [KernelEvent(kind=READY)]
        if data[0] == "blocked":
            return [_blocked(int(data[1]), data[2], int(data[3]), "was blocked")]
        _, pid, process, number, target, name = data
        text = f"sent {signal.Signals(number).name} to {target} ({name})"
        return [KernelEvent(kind="signals", pid=int(pid), process=process, text=text, amount=int(target))]

    def _summed(self, name: str, values: dict[str, Any]) -> list[KernelEvent]:
        if name == "@since":
            return [one for key, since in values.items() if (one := self._still_blocked(key, int(since))) is not None]
        found = []
        for key, value in values.items():
            pid, process, what = _split(key)
            if name == "@bytes":
                kind, amount, text = "disk", int(value), f"{_DISK.get(what[:1], what)} {int(value):,} bytes"
            else:
                kind, amount = "calls", int(value["total"])
                text = f"called {what} {value['count']:,} times, {value['average']:,} us each"
            found.append(KernelEvent(kind=kind, pid=pid, process=process, text=text, amount=amount))
        return found

    def _still_blocked(self, key: str, since: int) -> KernelEvent | None:
        """Return the event of a thread that has not gone on, once."""
        ms = (self._now - since) // 1_000_000
        if ms <= self._blocked_ms or (key, since) in self._seen:
            return None
        self._seen.add((key, since))
        pid, _, process = key.partition(",")
        return _blocked(int(pid), process, ms, "is blocked")


def _blocked(pid: int, process: str, ms: int, text: str) -> KernelEvent:
    return KernelEvent(kind="blocked", pid=pid, process=process, text=f"{text} in state D, {ms:,} ms", amount=ms)


def _split(key: str) -> tuple[int, str, str]:
    """Return pid, name of the process, and the last word of a key ``pid,name,word``; the name may have commas."""
    pid, _, rest = key.partition(",")
    process, _, word = rest.rpartition(",")
    return int(pid), process, word


def missing() -> str:
    """Return why this process cannot run the scripts; empty if nothing is missing."""
    if os.geteuid() != 0:
        return "the scripts need root"
    if shutil.which("bpftrace") is None:
        return "bpftrace is not installed: it is a package of that name in most distributions"
    if not any(folder.is_dir() for folder in _EVENTS):
        return "the kernel's events are not there: mount them by `mount -t tracefs tracefs /sys/kernel/tracing`"
    return ""


def trace(
    scripts: Sequence[str], seconds: float, *, blocked_ms: int = _BLOCKED_MS
) -> Generator[KernelEvent, None, None]:
    """Run scripts until ``seconds`` have passed since the last of them was ready, and yield their events as they come.

    Raises `ConfigError` if a script cannot be started.
    """
    running: list[_Script] = []
    try:
        with selectors.DefaultSelector() as selector:
            for name in scripts:
                running.append(_Script(name, blocked_ms))
                selector.register(running[-1].output, selectors.EVENT_READ, running[-1])
            until, is_starting = time.monotonic() + _START_S, True
            while (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    yield from (event for event in key.data.events() if event.kind != READY)
                if is_starting and all(one.is_ready for one in running):
                    until, is_starting = time.monotonic() + seconds, False
                    yield KernelEvent(kind=READY)
            if is_starting:
                raise ConfigError(f"bpftrace did not start within {_START_S:.0f} s: try one script alone, by --script")
    finally:
        for one in running:
            one.end()


class _Script:
    """One script that runs in a child."""

    def __init__(self, name: str, blocked_ms: int) -> None:
        self.name, self.is_ready = name, False
        self._lines, self._rest = EventLines(blocked_ms), b""
        source = resources.files("lakeckpt.watch.system").joinpath("bpf", f"{name}.bt").read_text("utf-8")
        text = _of_libraries(source) if name == "calls" else source
        words = [str(blocked_ms)] if name == "blocked" else []
        self._process = subprocess.Popen(
            ["bpftrace", "-f", "json", "-e", text, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()

    def events(self) -> list[KernelEvent]:
        """Return the events that the script has printed. Raises `ConfigError` if it has ended."""
        data = os.read(self.output, 2**16)
        if not data:
            _, said = self._process.communicate()
            why = " ".join(said.decode("utf-8", "replace").split())[-300:]
            raise ConfigError(f"bpftrace ended while it ran {self.name}, status {self._process.returncode}: {why}")
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [event for line in lines for event in self._lines.events(line)]
        self.is_ready = self.is_ready or any(event.kind == READY for event in found)
        return found

    def end(self) -> None:
        """End the child, and wait for it."""
        self._process.terminate()
        try:
            self._process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def _of_libraries(source: str) -> str:
    """Return the script ``calls`` with its part for each function of the list that a process of this node has mapped.

    Raises `ConfigError` if there is none.
    """
    head, mark, part = source.partition("uprobe:LIBRARY")
    found = [
        (mark + part).replace("LIBRARY", path).replace("FUNCTION", function)
        for path, name in sorted(_mapped_libraries())
        for function in _FUNCTIONS[name]
        if _has(path, function)
    ]
    if not found:
        raise ConfigError(
            f"no process of this node has loaded {', '.join(_FUNCTIONS)}: start the script calls while the job runs"
        )
    return head + "".join(found)


def _mapped_libraries() -> set[tuple[str, str]]:
    """Return path and name of each library of the list that a process has loaded."""
    found: set[tuple[str, str]] = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError, ValueError):
            found |= {(match[1], match[2]) for match in _MAPPED.finditer(path.read_text("utf-8"))}
    return found


def _has(path: str, function: str) -> bool:
    """Return whether the library names the function: bpftrace refuses a script with one that is not there."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(b"\0" + function.encode() + b"\0") >= 0
    except (OSError, ValueError):
        return False
