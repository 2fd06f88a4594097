"""Runs a user's script as the ranks of a job, kills it in the middle, starts it anew, and counts rows.

A script calls `tests.frameworks.notes.note` once for each step and rank. The history that survives has, of each step,
what the newest attempt that did this step used: what was done after the checkpoint that an attempt began at is not in
it. Processes are started in a session of their own, and only these are ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def write_table(folder: Path, *, rows: int, files: int = 4, group: int = 16) -> Path:
    """Write a table of ``id`` (0 to rows - 1), ``x`` and ``y`` (float32, y = 2 x), in row groups of ``group`` rows."""
    folder.mkdir(parents=True)
    per_file = -(-rows // files)
    for number in range(files):
        ids = list(range(number * per_file, min(rows, (number + 1) * per_file)))
        x = pa.array([one / rows for one in ids], pa.float32())
        y = pa.array([2 * one / rows for one in ids], pa.float32())
        table = pa.table({"id": pa.array(ids, pa.int64()), "x": x, "y": y})
        pq.write_table(table, folder / f"part-{number:02}.parquet", row_group_size=group)
    return folder


def free_port() -> int:
    """Return a port of the loopback device that was free just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Job:
    """A job in ``folder``: attempts at ``script``, which share a run."""

    def __init__(self, folder: Path, script: Path, arguments: Sequence[str] = ()) -> None:
        self.folder, self.script, self.arguments = folder, script, list(arguments)
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        self.attempts = 0

    def run(
        self,
        *,
        ranks: int = 1,
        kill_after: int | None = None,
        launcher: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run the job to its end, or SIGKILL all its processes once rank 0 has noted ``kill_after`` steps.

        Each rank is a process, with the environment of torchrun; with a ``launcher`` (a command that starts the ranks)
        there is this one process. Returns what all wrote; an exit status other than 0 fails the test with it.
        """
        attempt, self.attempts = self.attempts, self.attempts + 1
        common = {
            **os.environ,
            "NOTES": str(self.notes),
            "ATTEMPT": str(attempt),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "PYTHONWARNINGS": "ignore",
            **(environment or {}),
        }
        script = [str(self.script), *self.arguments]
        if launcher is not None:
            commands = [([*launcher, *script], common)]
        else:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
            commands = [
                ([sys.executable, *script], {**common, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(ranks)
            ]
        log = self.folder / f"log-{attempt}"
        with log.open("w") as out:
            processes = [
                subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=self.folder, start_new_session=True)
                for command, env in commands
            ]
            try:
                self._wait(processes, attempt, kill_after)
            finally:
                for one in processes:
                    _end(one)
        text = log.read_text()
        if kill_after is None:
            assert [one.returncode for one in processes] == [0] * len(processes), text
        return text

    def _wait(self, processes: Sequence[subprocess.Popen[bytes]], attempt: int, kill_after: int | None) -> None:
        end = time.monotonic() + 2 * PATIENCE_S
        while any(one.poll() is None for one in processes):
            if kill_after is not None and self._steps_of(attempt) >= kill_after:
                return
            if any(one.poll() not in (None, 0) for one in processes) and kill_after is None:
                time.sleep(1)  # the others have their chance to say why
                return
            assert time.monotonic() < end, (self.folder / f"log-{attempt}").read_text()
            time.sleep(0.01)
        assert kill_after is None, "it ended before it was killed:\n" + (self.folder / f"log-{attempt}").read_text()

    def _steps_of(self, attempt: int) -> int:
        return len({line["step"] for line in self.lines() if line["attempt"] == attempt})

    def lines(self) -> list[dict[str, Any]]:
        """Return all that was noted; the last line of a process that was killed may be torn, and is left out."""
        found = []
        for file in sorted(self.notes.glob("*.jsonl")):
            for text in file.read_text().splitlines(keepends=True):
                if text.endswith("\n"):
                    found.append(json.loads(text))
        return found

    def history(self) -> dict[int, list[int]]:
        """Return step → the rows that it used in the history that survives."""
        newest: dict[int, tuple[int, list[int]]] = {}
        for line in self.lines():
            attempt, ids = newest.get(line["step"], (-1, []))
            if line["attempt"] > attempt:
                newest[line["step"]] = (line["attempt"], list(line["ids"]))
            elif line["attempt"] == attempt:
                ids.extend(line["ids"])
        last = max((line["attempt"] for line in self.lines()), default=0)
        end = max((line["step"] for line in self.lines() if line["attempt"] == last), default=0)
        return {step: ids for step, (_, ids) in sorted(newest.items()) if step <= end}

    def counts(self) -> Counter[int]:
        """Return row → how often the surviving history used it."""
        return Counter(row for ids in self.history().values() for row in ids)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the session that ``process`` leads, which this module started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
