"""A rank is killed while the others wait for it: each of them ends at once, with an error that names the dead rank.

Ranks are processes, and their store is the job's: a file, or a server in rank 0, which dies with it. `TIMEOUT_S` is far
longer than a test may take: nothing but the death ends a wait.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lakeckpt import CheckpointManager
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.testing.faulty_storage import FaultyStorage
from tests.checkpoint.rig import Counter
from tests.tracking.processes import run_processes

RANKS = 3
TIMEOUT_S = 10_000.0
WAITS = {
    "its part": ("put", "parts/"),
    "its commit": ("put_new", "log/"),
    "its choice of a checkpoint": ("list", "log"),
    "its look at a checkpoint": ("read", "parts/"),
    "its vote": ("load_state_dict", ""),
    "its capture": ("state_dict", ""),
}
"""What the others wait for → the call in which the rank is killed."""
OF_RANK_0 = ("its commit", "its choice of a checkpoint")
RESTORES = ("list", "read", "load_state_dict")


class Own(Counter):
    """The state of one rank, which may end with it."""

    dies = ""

    def _meet(self, call: str) -> None:
        if call == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self) -> dict[str, Any]:
        self._meet("state_dict")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._meet("load_state_dict")
        super().load_state_dict(state)


def job(rank: int, folder: str, port: int, dies: int, waits_for: str, options: dict[str, Any]) -> None:
    """Be a rank that saves at its second step, or restores what another job has saved, and dies, or says what it
    raised."""
    torch.set_num_threads(1)
    meeting = f"tcp://127.0.0.1:{port}" if port else f"file://{folder}/meeting of {waits_for}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    call, place = WAITS.get(waits_for, ("", ""))
    own, is_armed = Own(float(rank)), False

    def before(method: str, path: str) -> None:
        if is_armed and method == call and path.startswith(place):
            os.kill(os.getpid(), signal.SIGKILL)

    run: Any = LocalStorage(f"{folder}/run")
    if "capture_every" in options:
        run = f"{folder}/run"
        options = {**options, "arenas": f"{folder}/arenas"}
    elif rank == dies:
        run = FaultyStorage(run, before=before)
    restores = call in RESTORES
    try:
        with CheckpointManager(run, {"own": own}, persist_every=1, timeout_s=TIMEOUT_S, **options) as manager:
            if rank == dies and restores:
                own.dies, is_armed = call, True
            manager.restore()
            manager.step()
            manager.wait()
            if rank == dies:
                own.dies, is_armed = call, True
            if waits_for:
                manager.step()
    except Exception as error:
        Path(folder, f"said.{rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


def free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(store.port)


def cases() -> list[Any]:
    """Return each wait for each rank that may die in it, over each store; a few of them are quick."""
    quick = {("its part", 2, False), ("its commit", 0, True), ("its choice of a checkpoint", 0, True)}
    quick |= {("its vote", 2, False), ("its vote", 0, True), ("its capture", 2, False)}
    return [
        pytest.param(
            waits_for,
            dies,
            hosted,
            id=f"{waits_for}, rank {dies}, {'its store' if hosted else 'a file'}",
            marks=[] if (waits_for, dies, hosted) in quick else [pytest.mark.soak],
        )
        for waits_for in WAITS
        for dies in (0, 2)
        for hosted in (False, True)
        if dies == 0 or (waits_for not in OF_RANK_0 and not hosted)
    ]


@pytest.mark.parametrize(("waits_for", "dies", "hosted"), cases())
def test_nobody_waits_for_a_rank_that_was_killed(tmp_path: Path, waits_for: str, dies: int, hosted: bool) -> None:
    folder, options = str(tmp_path), {"capture_every": 1} if waits_for == "its capture" else {}
    if waits_for == "its commit":
        options["save_on"] = ("SIGUSR1",)  # threads wait, too
    if WAITS[waits_for][0] in RESTORES:
        run_processes(RANKS, job, folder, 0, -1, "", options)
    ends = [-signal.SIGKILL if one == dies else 0 for one in range(RANKS)]
    run_processes(RANKS, job, folder, free_port() if hosted else 0, dies, waits_for, options, ends=ends)
    for rank in {*range(RANKS)} - {dies}:
        said = (tmp_path / f"said.{rank}").read_text()
        assert f"the process of rank {dies} has ended" in said, said
    if WAITS[waits_for][0] not in RESTORES:
        own = Own()
        assert CheckpointManager(tmp_path / "run", {"own": own}).restore() == 1 and own.value == 0.0
