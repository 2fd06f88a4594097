"""How is a measured process run?  In the interpreter of its environment, watched, and ended with all that it started.

`Runner` starts the processes, waits for them until a deadline, and kills what is left of a tree that missed it. Every
process gets a fresh folder for its answer; what it printed is kept for the message of a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.readers.case import Case
from benchmarks.readers.memory import MemoryWatch, descendants
from benchmarks.readers.registry import READERS

__all__ = ["Failed", "Runner"]

ROOT = Path(__file__).parents[2]
_VERSIONS = "import importlib.metadata as m, sys; print(*(m.version(p) for p in sys.argv[1:]), sep='\\n')"


class Failed(Exception):
    """A measured process did not do its task; the message is for the table."""


class Runner:
    """Runs tasks of `benchmarks.readers.process`; ``pythons`` maps an environment to its interpreter."""

    def __init__(self, pythons: Mapping[str, str], *, timeout_s: float) -> None:
        self._pythons = pythons
        self._timeout_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="lakeckpt-readers-"))
        self._number = 0

    def close(self) -> None:
        """Remove what the processes wrote."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def can(self, reader: str) -> bool:
        """Whether the reader's environment is there."""
        return READERS[reader].environment in self._pythons

    def version(self, reader: str) -> str:
        """The version of the package that is measured; "" where it is not installed. Ours is that of this tree."""
        entry = READERS[reader]
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
        running = [self._start(task, case, out, port) for task, case, out in zip(tasks, cases, outs, strict=True)]
        watch = None
        try:
            with ExitStack() as stack:
                if memory:
                    watch = stack.enter_context(MemoryWatch(running[0].pid))
                for process in running:
                    process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"did not end in {self._timeout_s:.0f} s") from None
        finally:
            for process in running:
                _end(process)
        found = [(_answer(out), _ids(out)) for out in outs]
        if watch is not None:
            found[0][0].update(peak_bytes=watch.peak_bytes, peak_own_bytes=watch.peak_own_bytes)
        return found

    def _start(self, task: Mapping[str, Any], case: Case, out: Path, port: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "PYTHONWARNINGS": "ignore",
            "TMPDIR": str(self._folder),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(case.rank),
            "LOCAL_RANK": str(case.rank),
            "WORLD_SIZE": str(case.world_size),
            "LOCAL_WORLD_SIZE": str(case.world_size),
        }
        if case.world_size == 1:
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                environment.pop(name)
        python = self._pythons[READERS[case.reader].environment]
        command = [python, "-m", "benchmarks.readers.process", json.dumps(task), str(out), case.to_json()]
        with open(out.with_suffix(".log"), "wb") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=out.parent,
                start_new_session=True,
            )  # fmt: skip


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all below it, if it has not ended by itself."""
    if process.poll() is None:
        for pid in reversed(descendants(process.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait()


def _answer(out: Path) -> dict[str, Any]:
    if not out.exists():
        lines = out.with_suffix(".log").read_text(errors="replace").strip().splitlines()
        raise Failed(f"died: {lines[-1] if lines else 'without a word'}")
    found: dict[str, Any] = json.loads(out.read_text())
    if not found["ok"]:
        raise Failed(found["why"])
    return found


def _ids(out: Path) -> np.ndarray[Any, Any]:
    path = out.with_suffix(".npy")
    return np.load(path) if path.exists() else np.empty(0, np.int64)
