"""Who starts the ranks, who kills them, and who brings the job back?

How: each phase is one ``python -m torch.distributed.run``. While it lives, a loop looks for the file by which a rank
says that it stands at its fault, sends SIGKILL to the ranks that the fault names, and waits until torchrun has noticed
and ended. Then the next phase starts, with its own number of ranks and loader workers.

Processes: `run_job` starts torchrun and reaps it; ranks and loader workers are torchrun's and the ranks' children. What
a kill orphaned is found by a token in its environment, so nothing else on the machine is ever signalled.
"""

from __future__ import annotations

import contextlib
import json
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
from lakeckpt.cli.demo.scenario import DemoConfig, Fault
from lakeckpt.cli.demo.trip import armed_path
from lakeckpt.errors import LakeckptError

__all__ = ["Death", "DemoFailed", "Outcome", "run_job"]

_TOKEN = "LAKECKPT_DEMO_TOKEN"
_POLL_S = 0.02


class DemoFailed(LakeckptError):
    """A launch ended in a way that the scenario did not ask for."""

    kind = "demo_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A fault that happened: when SIGKILL was sent, when torchrun had ended (monotonic seconds), and who was killed."""

    launch: int
    fault: Fault
    killed: float
    noticed: float
    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A job that came to its end: its faults in order, and when it began and ended (monotonic seconds)."""

    deaths: tuple[Death, ...]
    launched: tuple[float, ...]
    began: float
    ended: float


def run_job(config: DemoConfig, folder: Path, *, on_poll: Callable[[int], None]) -> Outcome:
    """Run all phases of ``config`` in ``folder`` (made). ``on_poll(launch)`` is called often, to draw progress.

    Raises `DemoFailed` where a launch fails without its fault, or ends without having met it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    Path(config.records).mkdir(parents=True, exist_ok=True)
    config_path = folder / "config.json"
    config_path.write_text(config.to_json())
    began = time.monotonic()
    deaths: list[Death] = []
    launched: list[float] = []
    for launch, phase in enumerate(config.phases):
        launched.append(time.monotonic())
        death = _Launch(config, config_path, folder, launch).run(on_poll)
        if death is not None:
            deaths.append(death)
        elif phase.fault is not None:
            raise DemoFailed(f"launch {launch} came to its end and never met its fault ({phase.fault.title})")
    return Outcome(deaths=tuple(deaths), launched=tuple(launched), began=began, ended=time.monotonic())


class _Launch:
    """One torchrun, from its start until nothing of it is left."""

    def __init__(self, config: DemoConfig, config_path: Path, folder: Path, launch: int) -> None:
        self.phase = config.phases[launch]
        self.launch = launch
        self.armed = armed_path(Path(config.records), launch)
        self.log = folder / f"launch-{launch:02d}.log"
        self.token = secrets.token_hex(16)
        self.command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr=127.0.0.1", "--monitor-interval=0.05"),
            f"--nproc-per-node={self.phase.world_size}",
            *("-m", "lakeckpt.cli.demo.train", str(config_path), str(launch)),
        ]

    def run(self, on_poll: Callable[[int], None]) -> Death | None:
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(self.token)
            )
            try:
                killed = self._watch(process, on_poll)
            finally:
                self._end(process)
        if killed is not None:
            assert self.phase.fault is not None
            return Death(
                launch=self.launch,
                fault=self.phase.fault,
                killed=killed[0],
                noticed=time.monotonic(),
                processes=killed[1],
            )
        if process.returncode != 0:
            raise DemoFailed(
                f"launch {self.launch} ({self.phase.topology}) ended with status {process.returncode} before a fault "
                f"was due; its log is {self.log}, and says:\n{_complaint(self.log)}"
            )
        return None

    def _watch(self, process: subprocess.Popen[bytes], on_poll: Callable[[int], None]) -> tuple[float, int] | None:
        """Until torchrun ends; kills once, when the fault's rank stands. Returns (when, how many processes)."""
        killed: tuple[float, int] | None = None
        while process.poll() is None:
            if killed is None and self.armed.exists():
                killed = self._kill(process)
            on_poll(self.launch)
            time.sleep(_POLL_S)
        return killed

    def _kill(self, process: subprocess.Popen[bytes]) -> tuple[float, int]:
        assert self.phase.fault is not None
        victim = json.loads(self.armed.read_text())["pid"]
        victims = {victim} | (set(_carrying(self.token)) if self.phase.fault.whole_job else set())
        when = time.monotonic()
        for pid in victims - {process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.phase.fault.whole_job:
            process.kill()
        return when, len(victims)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Leave nothing behind: torchrun first (it ends its ranks), then whatever still carries our token."""
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10.0)
        for pid in _carrying(self.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _environment(token: str) -> dict[str, str]:
    """This process's environment, with one thread per library, gloo on the loopback, and this very lakeckpt."""
    package = str(Path(lakeckpt.__file__).parent.parent)
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    ours = {
        _TOKEN: token,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if sys.platform == "linux":
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    return {**os.environ, **ours}


def _carrying(token: str) -> Iterator[int]:
    """The living processes whose environment holds ``token``: those that this launch made, and no others."""
    wanted = f"{_TOKEN}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def _complaint(path: Path, most: int = 20) -> str:
    """The last lines of the first rank that complained, or of the log where none did."""
    lines = path.read_text(errors="replace").splitlines()
    ranks = sorted({line.split(":")[0] for line in lines if line.startswith("[rank")})
    mine = [line for line in lines if ranks and line.startswith(ranks[0])]
    return "\n".join((mine or lines)[-most:])
