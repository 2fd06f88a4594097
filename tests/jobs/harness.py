"""Runs `train.py` as the ranks of a job, kills them, starts them anew, and counts the rows of the surviving history.

A rank is a process of a session of its own, forked from a server that has loaded torch and run nothing. Only processes
that were started here are ended, by their ids. A kill is placed by what the job has *done* (a number of lines
in its notes) and then by a short random wait of the job's own making, so that it falls anywhere: in a step, in a save,
in a commit.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S
from tests.tracking.processes import FORKS

SCRIPT = Path(__file__).with_name("train.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the job. ``kill_after``: steps noted by rank 0, and seconds more, before all ranks are killed.
    ``lives_on``: they are not killed then, and go on beside the next attempt until they are superseded."""

    ranks: int
    workers: int = 0
    kill_after: tuple[int, float] | None = None
    options: tuple[str, ...] = ()
    lives_on: bool = False


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_rank(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """Be ``python train.py *arguments``, in a session of its own that writes to the end of ``log``."""
    os.setsid()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


class Job:
    """A job in ``folder`` over ``table``; attempts share a run."""

    def __init__(self, folder: Path, table: Path, options: Sequence[str]) -> None:
        self.folder, self.table, self.options = folder, table, tuple(options)
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        self.attempts = 0
        self._living: list[tuple[Path, list[ForkServerProcess]]] = []

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def attempt(self, attempt: Attempt) -> None:
        """Run one attempt: to its end, or until it is killed."""
        number, self.attempts = self.attempts, self.attempts + 1
        port = str(free_port())
        arguments = [
            *("--table", str(self.table), "--run", str(self.run), "--notes", str(self.notes)),
            *("--attempt", str(number), "--workers", str(attempt.workers), *self.options, *attempt.options),
        ]
        log = self.folder / f"log-{number:03d}.txt"
        ranks = []
        for rank in range(attempt.ranks):
            job = {"RANK": str(rank), "WORLD_SIZE": str(attempt.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**job, "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)}
            ranks.append(FORKS.Process(target=run_rank, args=(arguments, environment, log)))
            ranks[-1].start()
        try:
            if attempt.kill_after is not None:
                self._wait_for_steps(number, attempt.kill_after, ranks)
            else:
                for process in ranks:
                    process.join(timeout=PATIENCE_S)
        finally:
            if attempt.lives_on:
                self._living.append((log, ranks))
            else:
                _end(ranks, killed=attempt.kill_after is not None)
        if attempt.kill_after is None:
            codes = [process.exitcode for process in ranks]
            assert codes == [0] * attempt.ranks, f"exit codes {codes}:\n{log.read_text()[-4000:]}"

    def superseded(self) -> list[str]:
        """Wait for the attempts that were left alive; what each wrote, of which every rank ended badly."""
        told = []
        for log, ranks in self._living:
            for process in ranks:
                process.join(timeout=PATIENCE_S)
            codes = [process.exitcode for process in ranks]
            _end(ranks, killed=True)
            assert None not in codes and 0 not in codes, f"exit codes {codes}:\n{log.read_text()[-4000:]}"
            told.append(log.read_text())
        self._living.clear()
        return told

    def end(self) -> None:
        """Kill what is still alive."""
        for _, ranks in self._living:
            _end(ranks, killed=True)

    def _wait_for_steps(self, number: int, kill_after: tuple[int, float], ranks: list[ForkServerProcess]) -> None:
        steps, more_s = kill_after
        for _ in range(2400):
            if self._steps_noted(number) >= steps or not all(process.is_alive() for process in ranks):
                break
            ranks[0].join(0.05)
        ranks[0].join(more_s)

    def _steps_noted(self, number: int) -> int:
        path = self.notes / f"{number:03d}-0.jsonl"
        return path.read_text().count('"step"') if path.exists() else 0

    def surviving_rows(self) -> Counter[tuple[int, int]]:
        """Count the (epoch, id) of the surviving history, from the notes alone."""
        counts: Counter[tuple[int, int]] = Counter()
        for number in range(self.attempts):
            survives = min((self._restored(later) for later in range(number + 1, self.attempts)), default=10**9)
            for path in sorted(self.notes.glob(f"{number:03d}-*.jsonl")):
                for line in _lines(path):
                    if "step" in line and line["step"] <= survives:
                        counts.update((epoch, row) for epoch, row in line["ids"])
        return counts

    def _restored(self, number: int) -> int:
        """The step that attempt ``number`` went on from; a later one counts where it died before saying so."""
        for path in sorted(self.notes.glob(f"{number:03d}-*.jsonl")):
            for line in _lines(path):
                if "restored" in line:
                    return int(line["restored"])
        return 10**9


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of ``path``: a kill may cut the last one short."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _end(ranks: list[ForkServerProcess], *, killed: bool) -> None:
    for process in ranks:
        if process.is_alive() or killed:
            _kill_group(process)
        process.join()


def _kill_group(process: ForkServerProcess) -> None:
    """SIGKILL a rank and the loader workers that it started (its session)."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()  # it may not have got to a session of its own
