"""This module runs a Slurm cluster of three nodes on this machine, in a folder of its own, on free ports.

`Slurm` starts one slurmctld, and a slurmd for each node: Debian's slurmd is built with MULTIPLE_SLURMD. It stops these,
and the processes of their jobs, by their ids.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.frameworks.harness import free_port
from tests.patience import PATIENCE_S
from tests.system.cluster_job import wait

NODES = ("n1", "n2", "n3")
ENDED = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT")
CONFIGURATION = """
ClusterName=lakeckpt
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=10
CredType=cred/none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
FirstJobId={first_job}
ReturnToService=2
KillWait=60
OverTimeLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


class Slurm:
    """Nodes ``n1`` to ``n3``, of one processor each; the partition ``urgent`` preempts ``main`` by requeueing."""

    def __init__(self, folder: Path, *, proctrack: str = "linuxproc") -> None:
        self.folder = folder
        (folder / "state").mkdir(parents=True)
        path = f"{os.environ['PATH']}:/usr/sbin"
        self.environment = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        text = CONFIGURATION.format(
            host=socket.gethostname(),
            folder=folder,
            proctrack=proctrack,
            controller_port=free_port(),
            ports=[free_port() for _ in NODES],
            first_job=free_port(),  # jobs derive their port from it
        )
        (folder / "slurm.conf").write_text(text)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._start("controller", ["slurmctld", "-D", "-c"])
        for node in NODES:
            self.start_node(node)
        wait(lambda: self.ask("sinfo", "--noheader", "--format=%D %t", "--partition=main") == "3 idle", self.logs)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in NODES:
            self.kill_node(node)
        self._end(self._daemons.pop("controller"))

    # --- nodes

    def start_node(self, node: str) -> None:
        (self.folder / node).mkdir(exist_ok=True)
        self._start(node, ["slurmd", "-D", "-N", node])

    def kill_node(self, node: str) -> None:
        """Kill all of a node at once: its slurmd, and every process of the jobs that this slurmd started."""
        if node in self._daemons:
            self._end(self._daemons.pop(node))
        while found := self.processes_of(node):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def processes_of(self, node: str) -> list[int]:
        """Return the ids of the processes that jobs of this cluster have on ``node``: steps and all they started."""
        marks = {f"SLURM_CONF={self.environment['SLURM_CONF']}".encode(), f"SLURMD_NODENAME={node}".encode()}
        log = str(self.folder / f"{node}.log")
        steps = [pid for pid in _processes() if _read(pid, "cmdline").startswith(b"slurmstepd") and log in _files(pid)]
        return steps + [pid for pid in _processes() if marks <= set(_read(pid, "environ").split(b"\0"))]

    # --- jobs

    def submit(self, script: Path, *, environment: Mapping[str, str]) -> str:
        """Submit ``script`` in its folder, with output in ``job.log`` there; returns the job's number."""
        own = {**environment, "SLURM_CONF": self.environment["SLURM_CONF"]}
        folder = script.parent
        return self._run(["sbatch", "--parsable", "-D", str(folder), "-o", str(folder / "job.log"), str(script)], own)

    def fields(self, number: str) -> dict[str, str]:
        """Return what Slurm says of a job, such as ``JobState`` and ``Restarts``."""
        words = self.ask("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, state: str) -> None:
        """Wait until the job is in ``state``; where it ends in another one, fail."""
        wait(lambda: self.fields(number)["JobState"] in (state, *ENDED), self.logs)
        found = self.fields(number)["JobState"]
        assert found == state, f"the job is {found}, not {state}:\n{self.logs()}"

    def ask(self, *command: str) -> str:
        """Run one of Slurm's commands; what it printed."""
        return self._run(list(command), self.environment)

    def _run(self, command: list[str], environment: Mapping[str, str]) -> str:
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(f"== {one.name}\n{one.read_text()[-3000:]}" for one in sorted(self.folder.glob("*.log")))

    # --- daemons

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def _end(self, daemon: subprocess.Popen[bytes]) -> None:
        daemon.kill()
        daemon.wait()


def _processes() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _files(pid: int) -> set[str]:
    """Return the paths that the process has open."""
    found = set()
    with suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(one))
    return found
