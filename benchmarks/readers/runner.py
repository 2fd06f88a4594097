"""How is a measured process run?  In the interpreter of its environment, watched, and ended with all that it started.

`Runner` keeps a `Starter` for every reader, has it start processes, waits for them until a deadline, and kills what is
left of their sessions. Every process gets a fresh folder for its answer; what it printed last is the message where it
dies.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.readers.case import Case
from benchmarks.readers.memory import MemoryWatch, descendants
from benchmarks.readers.registry import ENTRIES

__all__ = ["Failed", "Runner", "Starter"]

ROOT = Path(__file__).parents[2]
_VERSIONS = "import importlib.metadata as m, sys; print(*(m.version(p) for p in sys.argv[1:]), sep='\\n')"


class Failed(Exception):
    """A measured process did not do its task; the message is for the table."""


class Runner:
    """Runs tasks of `benchmarks.readers.process`; ``pythons`` maps an environment to its interpreter."""

    def __init__(self, pythons: Mapping[str, str], *, timeout_s: float) -> None:
        self._pythons = pythons
        self.timeout_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="lkr-"))
        self._number = 0
        self._starters: dict[str, Starter] = {}

    def close(self) -> None:
        """End all processes, and remove what they wrote."""
        for starter in self._starters.values():
            starter.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def can(self, reader: str) -> bool:
        """Whether the reader's environment is there."""
        return ENTRIES[reader].environment in self._pythons

    def version(self, reader: str) -> str:
        """The version of the package that is measured; "" where it is not installed. Ours is that of this tree."""
        entry = ENTRIES[reader]
        if entry.kind == "ours":
            import lakeckpt

            return lakeckpt.__version__
        command = [self._pythons[entry.environment], "-c", _VERSIONS, entry.package]
        ran = subprocess.run(command, capture_output=True, text=True)
        return ran.stdout.strip()

    def folder(self, name: str) -> Path:
        """A new folder for states."""
        self._number += 1
        found = self._folder / f"{self._number:05d}-{name}"
        found.mkdir()
        return found

    def one(self, task: Mapping[str, Any], case: Case, *, memory: bool = False) -> dict[str, Any]:
        """Run one process; return what it found, with ``peak_bytes`` where its ``memory`` is watched."""
        ((found, _),) = self.ranks([task], [case], memory=memory)
        return found

    def ranks(
        self, tasks: Sequence[Mapping[str, Any]], cases: Sequence[Case], *, memory: bool = False
    ) -> list[tuple[dict[str, Any], np.ndarray[Any, Any]]]:
        """Run one process for each rank, at the same time; return what each found, and the ids that it consumed."""
        outs = [self.folder(f"rank-{case.rank}") / "out.json" for case in cases]
        port = _free_port()
        orders = [_order(task, case, out, port) for task, case, out in zip(tasks, cases, outs, strict=True)]
        starter = self._starter(cases[0].reader)
        pids = starter.start(orders)
        watch = None
        try:
            with ExitStack() as stack:
                if memory:
                    watch = stack.enter_context(MemoryWatch(pids[0]))
                if not starter.ended(self.timeout_s) and not all(out.exists() for out in outs):
                    raise Failed(f"did not end in {self.timeout_s:.0f} s")
        finally:
            living = _sessions()
            left = set[int]().union(*(living.get(pid, ()) for pid in pids))
            _kill(left)
            if not starter.ended(10):
                self._starters.pop(cases[0].reader).close()
        found = [(_answer(out), _ids(out)) for out in outs]
        if watch is not None:
            found[0][0].update(peak_bytes=watch.peak_bytes, peak_own_bytes=watch.peak_own_bytes)
        return found

    def _starter(self, reader: str) -> Starter:
        if reader not in self._starters:
            self._starters[reader] = Starter(self._pythons[ENTRIES[reader].environment], reader, self._folder)
        return self._starters[reader]


class Starter:
    """The near end of a `benchmarks.readers.starter` process, which the runner starts and closes."""

    def __init__(self, python: str, reader: str, folder: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "PYTHONWARNINGS": "ignore",
            "PYTHONDONTWRITEBYTECODE": "",
            "TMPDIR": str(folder),
        }
        self._log = folder / f"starter-{id(self)}.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.readers.starter", reader],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
        self._waiting = False
        self._line("ready")

    def start(self, orders: Sequence[Mapping[str, Any]]) -> list[int]:
        """Start a process for each order; return their ids."""
        assert self._process.stdin is not None and not self._waiting
        self._process.stdin.write(json.dumps(orders).encode() + b"\n")
        self._process.stdin.flush()
        self._waiting = True
        pids: list[int] = json.loads(self._line("numbers"))
        return pids

    def ended(self, timeout_s: float) -> bool:
        """Wait until all that was started has ended; tell whether it has."""
        assert self._process.stdout is not None
        if self._waiting:
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            if not ready:
                return False
            self._line("the end")
            self._waiting = False
        return True

    def _line(self, what: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        if not line:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise Failed(f"died before {what}: {lines[-1] if lines else 'without a word'}")
        return line

    def close(self) -> None:
        """End it, and all below it."""
        _kill(descendants(self._process.pid))
        with self._process:  # waits, and closes the pipes
            pass


def _order(task: Mapping[str, Any], case: Case, out: Path, port: int) -> dict[str, Any]:
    environment = {}
    if case.world_size > 1:  # what torchrun would set
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(case.rank),
            "LOCAL_RANK": str(case.rank),
            "WORLD_SIZE": str(case.world_size),
            "LOCAL_WORLD_SIZE": str(case.world_size),
        }
    return {
        "task": task,
        "case": case.to_json(),
        "out": str(out),
        "log": str(out.with_suffix(".log")),
        "environment": environment,
        "folder": str(out.parent),
    }


def _sessions() -> dict[int, set[int]]:
    """Session id → the processes of it that live: a measured process leads a session, and what it starts is in it."""
    found: dict[int, set[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if fields[0] != "Z":
                found.setdefault(int(fields[3]), set()).add(int(entry.name))
    return found


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _answer(out: Path) -> dict[str, Any]:
    if not out.exists():
        lines = out.with_suffix(".log").read_text(errors="replace").strip().splitlines()
        raise Failed(f"died: {lines[-1] if lines else 'without a word'}")
    found: dict[str, Any] = json.loads(out.read_text())
    if not found["ok"]:
        lines = [line.strip() for line in found["why"].splitlines() if line.strip()]
        raise Failed(lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}")
    return found


def _ids(out: Path) -> np.ndarray[Any, Any]:
    path = out.with_suffix(".npy")
    return np.load(path) if path.exists() else np.empty(0, np.int64)
