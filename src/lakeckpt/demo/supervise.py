"""This module starts the demo's ranks, kills them, and starts the job again.

A ``lakeckpt run`` starts the ranks, and starts them again after each fault that leaves it alive, with as many ranks and
loader workers. While it runs, a loop looks for the file by which a rank says that it waits at its fault, and sends
SIGKILL to the processes that the fault names. After the last of its faults, the next launcher starts, with ranks and
loader workers of its own.

`run_job` starts launchers and waits for their ends. Orphans of a kill are found by a token in their environment, so no
other process of the machine is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lakeckpt
from lakeckpt.demo.scenario import DemoConfig, Phase, PlannedFault
from lakeckpt.demo.trip import armed_path
from lakeckpt.errors import LakeckptError

__all__ = ["Death", "DemoFailed", "run_job"]

_TOKEN = "LAKECKPT_DEMO_TOKEN"
_POLL_S = 0.02


class DemoFailed(LakeckptError):
    """A launch ended in a way that the scenario did not ask for."""

    kind = "demo_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A fault that happened, how many processes were killed, and when, in seconds since 1970."""

    fault: PlannedFault
    processes: int
    at_s: float = 0.0


def run_job(config: DemoConfig, *, on_start: Callable[[Phase], None]) -> tuple[Death, ...]:
    """Run all phases of ``config`` in its folder, which is made. ``on_start(phase)`` is called when one has started.

    Raises `DemoFailed` if a launch fails without its fault, or ends without it.
    """
    config.records.mkdir(parents=True)
    Path(config.folder, "config.json").write_text(config.to_json())
    return tuple(death for phases in config.launches for death in _Launch(config, phases).run(on_start))


class _Launch:
    """One launcher, from its start until all of its processes have ended. It starts the ranks of ``phases``."""

    def __init__(self, config: DemoConfig, phases: range) -> None:
        self.config, self.phases = config, phases
        self.log = Path(config.folder, f"launch-{phases.start:02d}.log")
        self.byte_code = Path(config.folder, "byte-code")
        self.token = secrets.token_hex(16)
        self.command = [
            *(sys.executable, "-m", "lakeckpt.cli.main", "run", "--standalone"),
            *("--local-addr=127.0.0.1", "--monitor-interval=0.05", f"--max-restarts={len(phases) - 1}"),
            f"--nproc-per-node={config.phases[phases.start].world_size}",
            *("-m", "lakeckpt.demo.train", str(Path(config.folder, "config.json")), str(phases.start)),
        ]

    def run(self, on_start: Callable[[Phase], None]) -> list[Death]:
        """Run the phases. Raises `DemoFailed` if one ends without its fault."""
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self.token, self.byte_code),
            )
            try:
                deaths = self._watch(process, on_start)
            finally:
                self._end(process)
        due = [self.config.phases[number].fault for number in self.phases]
        if len(deaths) < len(due) and (due[len(deaths)] is not None or process.returncode != 0):
            raise DemoFailed(
                f"launch {self.phases.start + len(deaths)} ({self.config.phases[self.phases.start].topology}) ended "
                f"with status {process.returncode} before a fault was due; its log is {self.log}, and says:\n"
                f"{_complaint(self.log)}"
            )
        return deaths

    def _watch(self, process: subprocess.Popen[bytes], on_start: Callable[[Phase], None]) -> list[Death]:
        """Wait until the launcher ends. Kill once in each phase, when its fault's rank waits for it."""
        deaths: list[Death] = []
        for number in self.phases:
            on_start(self.config.phases[number])
            armed = armed_path(self.config.records, number)
            while process.poll() is None and not armed.exists():
                time.sleep(_POLL_S)
            if armed.exists():
                deaths.append(self._kill(number, armed))
        process.wait()
        return deaths

    def _kill(self, number: int, armed: Path) -> Death:
        fault = self.config.phases[number].fault
        assert fault is not None
        victims = {int(armed.read_text())} | (set(_carrying(self.token)) if fault.whole_job else set())
        at_s = time.time()
        for pid in victims:
            _kill(pid)
        return Death(fault=fault, processes=len(victims), at_s=at_s)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End the launcher, which ends its ranks, and then all processes that still carry the token."""
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10.0)
        for pid in _carrying(self.token):
            _kill(pid)
        process.kill()
        process.wait()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _environment(token: str, byte_code: Path) -> dict[str, str]:
    """Return this process's environment, with one thread per library, gloo on the loopback, and this lakeckpt.

    A Python that is told to write no byte code may compile all of torch in each process: half of the demo's time. Then
    the first launch of a job writes it to ``byte_code``, for the others."""
    package = str(Path(lakeckpt.__file__).parent.parent)
    ours = {
        _TOKEN: token,
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if sys.dont_write_bytecode:
        ours |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(byte_code)}
    return {**os.environ, **ours}


def _carrying(token: str) -> Iterator[int]:
    """Yield the processes whose environment holds ``token``: those that this launch started."""
    wanted = f"{_TOKEN}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def _complaint(path: Path) -> str:
    """Return the last lines of the first rank that complained, or of the log if none did."""
    lines = path.read_text(errors="replace").splitlines()
    ranks = sorted({line.split(":")[0] for line in lines if line.startswith("[rank")})
    return "\n".join([line for line in lines if not ranks or line.startswith(ranks[0])][-20:])
