"""This module starts the demo's ranks, kills them, and starts the job again.

Each phase is one ``python -m torch.distributed.run``. While it runs, a loop looks for the file by which a rank says
that it waits at its fault, sends SIGKILL to the ranks that the fault names, and waits until torchrun has noticed and
ended. Then the next phase starts, with its own number of ranks and loader workers.

`run_job` starts torchrun and waits for its end. Orphans of a kill are found by a token in their environment, so no
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
from lakeckpt.demo.scenario import DemoConfig, Fault, Phase
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
    """A fault that happened, and how many processes were killed."""

    fault: Fault
    processes: int


def run_job(config: DemoConfig, *, on_start: Callable[[Phase], None]) -> tuple[Death, ...]:
    """Run all phases of ``config`` in its folder, which is made. ``on_start(phase)`` is called when one has started.

    Raises `DemoFailed` if a launch fails without its fault, or ends without it.
    """
    config.records.mkdir(parents=True)
    Path(config.folder, "config.json").write_text(config.to_json())
    deaths: list[Death] = []
    for launch, phase in enumerate(config.phases):
        death = _Launch(config, launch).run(on_start)
        if death is not None:
            deaths.append(death)
        elif phase.fault is not None:
            raise DemoFailed(f"launch {launch} ended without its fault ({phase.fault.title})")
    return tuple(deaths)


class _Launch:
    """One torchrun, from its start until all of its processes have ended."""

    def __init__(self, config: DemoConfig, launch: int) -> None:
        self.phase, self.launch = config.phases[launch], launch
        self.armed = armed_path(config.records, launch)
        self.log = Path(config.folder, f"launch-{launch:02d}.log")
        self.byte_code = Path(config.folder, "byte-code")
        self.token = secrets.token_hex(16)
        self.command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr=127.0.0.1", "--monitor-interval=0.05"),
            f"--nproc-per-node={self.phase.world_size}",
            *("-m", "lakeckpt.demo.train", str(Path(config.folder, "config.json")), str(launch)),
        ]

    def run(self, on_start: Callable[[Phase], None]) -> Death | None:
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self.token, self.byte_code),
            )
            try:
                on_start(self.phase)
                death = self._watch(process)
            finally:
                self._end(process)
        if death is None and process.returncode != 0:
            raise DemoFailed(
                f"launch {self.launch} ({self.phase.topology}) ended with status {process.returncode} before a fault "
                f"was due; its log is {self.log}, and says:\n{_complaint(self.log)}"
            )
        return death

    def _watch(self, process: subprocess.Popen[bytes]) -> Death | None:
        """Wait until torchrun ends. Kill once, when the fault's rank waits for it."""
        death: Death | None = None
        while process.poll() is None:
            if death is None and self.armed.exists():
                death = self._kill()
            time.sleep(_POLL_S)
        return death

    def _kill(self) -> Death:
        fault = self.phase.fault
        assert fault is not None
        victims = {int(self.armed.read_text())} | (set(_carrying(self.token)) if fault.whole_job else set())
        for pid in victims:
            _kill(pid)
        return Death(fault=fault, processes=len(victims))

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End torchrun, which ends its ranks, and then all processes that still carry the token."""
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
