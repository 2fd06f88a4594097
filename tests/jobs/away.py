"""This module takes the run of a real job away while a rank is killed, brings it back, and says what the job did.

    python -m tests.jobs.away              # every combination, for 10, 30 and 60 s: a table, and exit status 0 or 1
    python -m tests.jobs.away --seconds 10 --at-once 2 --only "s3, no captures" --json away.json

A combination is a place (a local folder; a prefix of S3, served by moto), how it goes away (renamed, or emptied: as an
unmounted share looks; or S3 refuses connections), a launcher, whether cuts are captured, and a number of ranks. The
launchers are torchrun; Slurm, as a job sees it (`SLURM_JOB_ID`, `SLURM_RESTART_COUNT`); and nobody: a person who starts
the script again whenever it ends. The run goes away, a rank is killed a moment later, and the launcher starts the job
again. When the job has gone on for some steps, the run goes away for the next time.

The law: no attempt begins a new run. The job goes on at its newest cut, or it ends with an exit status above 0 and an
error that names the cut. When it has ended well, each row counted once, and the audit says PROVED.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import lt
from pathlib import Path
from typing import Any

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.lake.storage.open import open_storage
from tests.frameworks.harness import ROOT, Job, free_port, write_table
from tests.jobs.commands import add_arguments, run_all, until
from tests.jobs.places import S3, Local, open_place
from tests.patience import PATIENCE_S

STEPS = 12
"""So many steps are taken before the run goes away, and once more."""
SCRIPT = Path(__file__).with_name("away_job.py")
_GOES_ON = re.compile(r"rank (\d+) goes on at step (\d+) of attempt (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination. ``seconds``: how long the run is away, for each time; empty: once, until the job has said so."""

    place: str
    how: str
    launcher: str
    captures: bool
    ranks: int
    seconds: tuple[float, ...] = ()
    timeout_s: float = 600.0

    def __str__(self) -> str:
        captures = "captured" if self.captures else "no captures"
        return f"{self.place}, {self.how}, {self.launcher}, {captures}, {self.ranks} ranks"

    @property
    def rows(self) -> int:
        """Enough for the steps between the times, also on a machine that is busy."""
        return 2 * self.ranks * 8 * STEPS * (len(self.seconds or (None,)) + 1)


def environment_of(
    job: Job, folder: Path, uri: str, options: Mapping[str, Any], manager: Mapping[str, Any], step_s: float = 0.1
) -> dict[str, str]:
    """Return the environment of `away_job.py` for a job whose table and arenas lie in ``folder``."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))},
        "TABLE": str(folder / "table"),
        "RUN": uri,
        "OPTIONS": json.dumps(options),
        "MANAGER": json.dumps({**manager, "arenas": str(folder / "arenas")}),
        "NOTES": str(job.notes),
        "HURRY": str(folder / "hurry"),
        "STEP_S": str(step_s),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/how-to/ddp.md: without it, a restart may hang
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "PYTHONWARNINGS": "ignore",
    }


@dataclass(slots=True)
class Launcher:
    """Starts the ranks of a job by a ``kind`` of launcher, and starts all again when one has ended badly, ``restarts``
    times at most."""

    kind: str
    size: int
    environment: Mapping[str, str]
    log: Path
    restarts: int = 16
    patience_s: float = 6 * PATIENCE_S
    statuses: list[int] = field(default_factory=list)
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    is_over: bool = False

    def run(self) -> None:
        """Run the job to its end."""
        try:
            for count in range(self.restarts + 1):
                self._start(count)
                self._wait()
                self.statuses.append(max((abs(one.returncode) for one in self.ranks), default=0))
                if self.statuses[-1] == 0 or self.kind == "torchrun":
                    return
        finally:
            self.is_over = True

    def _start(self, count: int) -> None:
        if self.kind == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.size}"]
            command += [
                f"--max-restarts={self.restarts}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            ]
            commands = [([*command, str(SCRIPT)], {})]
        else:
            slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_RESTART_COUNT": str(count)}
            port = str(free_port())
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(self.size)}
            common |= slurm if self.kind == "slurm" else {}
            commands = [([sys.executable, str(SCRIPT)], {**common, "RANK": str(rank)}) for rank in range(self.size)]
        with self.log.open("ab") as out:
            self.ranks = [
                subprocess.Popen(
                    command, env={**self.environment, **own}, stdout=out, stderr=out, start_new_session=True
                )
                for command, own in commands
            ]

    def _wait(self) -> None:
        """Wait for the end of all ranks; end the others when one has ended badly."""
        end = time.monotonic() + self.patience_s
        while any(one.poll() is None for one in self.ranks):
            if any(one.poll() not in (None, 0) for one in self.ranks) or time.monotonic() > end:
                break
            time.sleep(0.05)
        for one in self.ranks:
            _kill(one)

    def kill_rank(self) -> None:
        """SIGKILL the last rank."""
        if self.kind != "torchrun":
            os.kill(self.ranks[-1].pid, signal.SIGKILL)
            return
        children = Path(f"/proc/{self.ranks[0].pid}/task/{self.ranks[0].pid}/children").read_text().split()
        trainers = [one for one in children if SCRIPT.name in Path(f"/proc/{one}/cmdline").read_text()]
        os.kill(int(trainers[-1]), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a job did. ``newest``: the step of the newest cut when the run went away, at least, for each time.
    ``went_on``: where the next attempt went on."""

    newest: tuple[int, ...]
    went_on: tuple[int, ...]
    named: int
    statuses: tuple[int, ...]
    problem: str


def run(case: Case, folder: Path, endpoint: str = "") -> Result:
    """Run a job whose run goes away, to its end."""
    with open_place(case.place, case.how, folder, endpoint) as place:
        return _run(case, place, folder)


def _run(case: Case, place: Local | S3, folder: Path) -> Result:
    job, log = Job(folder / "job", SCRIPT), folder / "log.txt"
    write_table(folder / "table", rows=case.rows)
    manager = {"persist_every": 5, "timeout_s": case.timeout_s}
    manager |= {"capture_every": 1, "persist_every": 50} if case.captures else {}
    launcher = Launcher(case.launcher, case.ranks, environment_of(job, folder, place.uri, place.options, manager), log)
    attempts, newest = [-1], []
    with ThreadPoolExecutor(1) as pool:
        over = pool.submit(launcher.run)
        try:
            for away_s in case.seconds or (None,):
                attempts.append(_attempt_after(attempts[-1], job, launcher, log))
                place.take_away(case.how)
                newest.append(_newest(case, job, attempts[-1]))
                launcher.kill_rank()
                if away_s is None:
                    until(lambda: "lists no run" in log.read_text() or launcher.is_over, log)
                else:
                    time.sleep(away_s)
                place.bring_back()
        finally:
            (folder / "hurry").touch()
            over.result()
    text = log.read_text()
    starts = sorted({(int(attempt), int(step)) for _, step, attempt in _GOES_ON.findall(text)})
    after = [[step for number, step in starts if number > attempt] for attempt in attempts[1:]]
    return _result(case, place, job, launcher, newest, [one[0] for one in after if one], text)


def _attempt_after(before: int, job: Job, launcher: Launcher, log: Path) -> int:
    """Return the number of an attempt later than the attempt ``before``, which has taken `STEPS` steps."""

    def found() -> list[int]:
        steps = Counter(attempt for attempt, _ in {(one["attempt"], one["step"]) for one in job.lines()})
        return [attempt for attempt, taken in steps.items() if attempt > before and taken >= STEPS]

    until(lambda: bool(found()) or launcher.is_over, log, 2 * PATIENCE_S)
    assert not launcher.is_over, log.read_text()[-4000:]
    return max(found())


def _newest(case: Case, job: Job, attempt: int) -> int:
    """Return a step that the newest cut is not older than: a rank may have begun a step, and captured none of it."""
    steps = max(one["step"] for one in job.lines() if one["attempt"] == attempt)
    return steps - 3 if case.captures else (steps - 1) // 5 * 5


def _result(
    case: Case,
    place: Local | S3,
    job: Job,
    launcher: Launcher,
    newest: Sequence[int],
    went_on: Sequence[int],
    text: str,
) -> Result:
    storage = open_storage(place.uri, storage_options=place.options or None)
    named = len(re.findall(r"StorageError: .* lists no run, but .*step \d+.*doctor --forget", text))
    verdict, is_well = audit(storage).verdict, launcher.statuses[-1] == 0
    problems = {
        "a new run was begun": len(re.findall(r"goes on at step 0 of attempt 0", text)) != case.ranks,
        f"it went on at {went_on}, and the newest cuts are of steps {newest}": any(map(lt, went_on, newest)),
        "it did not end well, and names no cut": not is_well and not named,
        "it did not go on each time": is_well and len(went_on) < len(newest),
        f"the audit says {verdict}": is_well and verdict != "proved",
        "rows do not count once": is_well and job.counts() != Counter(range(case.rows)),
        "there are several runs": len({one.run for one in read_history(storage).chain}) > 1,
    }
    return Result(
        newest=tuple(newest),
        went_on=tuple(went_on),
        named=named,
        statuses=tuple(launcher.statuses),
        problem="; ".join(name for name, holds in problems.items() if holds),
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the session that a process leads, which this module started."""
    try:
        os.killpg(process.pid, signal.SIGKILL if process.poll() is None else signal.SIGTERM)
    except ProcessLookupError:
        pass
    process.wait()


# --- the command


def cases(seconds: Sequence[float]) -> Iterator[Case]:
    """Return every combination; without captures, a launcher has to start the job."""
    places = itertools.product(("local", "s3"), ("renamed", "emptied"))
    every = itertools.product((*places, ("s3", "refuse")), ("torchrun", "slurm", "nobody"), (True, False), (1, 2))
    for (place, how), launcher, captures, ranks in every:
        if captures or launcher != "nobody":
            yield Case(place=place, how=how, launcher=launcher, captures=captures, ranks=ranks, seconds=tuple(seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description="take the runs of real jobs away, and say what the jobs did")
    parser.add_argument("--seconds", type=float, nargs="+", default=[10.0, 30.0, 60.0])
    add_arguments(parser)
    args = parser.parse_args()
    head = f"{'combination':47} newest cuts  went on at   ends           errors  verdict"

    def line(case: Case, found: Result) -> str:
        newest, steps, ends = (" ".join(map(str, one)) for one in (found.newest, found.went_on, found.statuses))
        verdict = "✗ " + found.problem if found.problem else "ok"
        return f"{case!s:47} {newest:12} {steps:12} {ends:14} {found.named:6}  {verdict}"

    return run_all(cases(args.seconds), run, line, head=head, name="away", args=args)


if __name__ == "__main__":
    sys.exit(main())
