"""This module takes the store of a real job's run away while the job trains, brings it back, and says what the job did.

    python -m tests.jobs.outages               # every case, 12 s, 60 s and 10 min each: a table, and exit status 0 or 1
    python -m tests.jobs.outages --seconds 12 --at-once 2 --only "hang, captured" --json outages.json

A case is a place (a local folder; S3, which moto serves behind a proxy), how it goes away, whether cuts are captured,
and a number of ranks. A folder is renamed, or emptied as an unmounted share looks. S3 refuses connections and breaks
those that are open, or hangs and answers nothing.

The law: training goes on in the same processes, which end well. Each row counts once, and the audit says PROVED.
While the store is away, captures hold no step up. Synchronous saves hold training up by one request (`total_s` of the
store), and then for about a tenth of the time.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage
from tests.frameworks.harness import Job, write_table
from tests.jobs.away import SCRIPT, Launcher, environment_of
from tests.jobs.commands import add_arguments, run_all, until
from tests.jobs.places import ATTEMPT_S, REFUSALS, S3, Local, open_place

_SAVED = re.compile(r"rank 0 has saved step (\d+)")
_HELD_UP = re.compile(r"rank 0 was held up from ([\d.]+) for ([\d.]+) s")
_SLACK_S = 30.0
"""A machine that is busy holds steps up, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case. ``seconds``: how long the store is away; None: until the job has trained on. ``total_s``: of the
    requests to S3."""

    place: str
    fault: str
    captures: bool
    ranks: int
    seconds: float | None = None
    total_s: float = 60.0

    def __str__(self) -> str:
        return f"{self.place}, {self.fault}, {'captured' if self.captures else 'sync'}, {self.ranks} ranks"

    @property
    def step_s(self) -> float:
        return 0.2 if (self.seconds or 0) <= 60 else 0.5

    @property
    def rows(self) -> int:
        """Enough for the outage, and for the pause of 5 minutes that may follow it."""
        return 2 * self.ranks * int(80 if self.seconds is None else (1.6 * self.seconds + 60) / self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a job did. ``meanwhile``: the steps that it took while the store was away; ``longest_s`` and ``held_up_s``:
    how long saves held rank 0 up then."""

    meanwhile: int
    saves: int
    warnings: int
    longest_s: float
    held_up_s: float
    verdict: str
    problem: str


def run(case: Case, folder: Path, endpoint: str) -> Result:
    """Run a job whose store goes away, to its end."""
    with open_place(case.place, case.fault, folder, endpoint, case.total_s) as place:
        return _run(case, place, folder)


def _run(case: Case, place: Local | S3, folder: Path) -> Result:
    job, log = Job(folder / "job", SCRIPT), folder / "log.txt"
    write_table(folder / "table", rows=case.rows)
    manager = {"persist_every": 5} | ({"capture_every": 1} if case.captures else {})
    environment = environment_of(job, folder, place.uri, place.options, manager, case.step_s)
    environment |= {"PYTHONWARNINGS": "default"}
    patience_s = 900 + 3 * (case.seconds or 0)
    launcher = Launcher("nobody", case.ranks, environment, log, restarts=0, patience_s=patience_s)
    with ThreadPoolExecutor(1) as pool:
        over = pool.submit(launcher.run)
        try:
            until(lambda: bool(_SAVED.search(log.read_text())) or launcher.is_over, log)
            before, begin_s = _steps(job), time.monotonic()
            place.take_away(case.fault)
            if case.seconds is None:
                until(lambda: _has_gone_on(case, before, job, log) or launcher.is_over, log)
            else:
                time.sleep(case.seconds)
            meanwhile, end_s = _steps(job) - before, time.monotonic()
            place.bring_back()
            saved = len(_SAVED.findall(log.read_text()))
            if case.seconds is not None:
                until(lambda: len(_SAVED.findall(log.read_text())) > saved or launcher.is_over, log, patience_s)
        finally:
            (folder / "hurry").touch()
            over.result()
    return _result(case, place, job, launcher, meanwhile, (begin_s, end_s), log.read_text())


def _steps(job: Job) -> int:
    return max((one["step"] for one in job.lines()), default=0)


def _has_gone_on(case: Case, before: int, job: Job, log: Path) -> bool:
    """Return whether the job has met the outage, and has trained on."""
    met = case.captures or "SaveWarning: training goes on" in log.read_text()
    return met and _steps(job) >= before + 12


def _result(
    case: Case, place: Local | S3, job: Job, launcher: Launcher, meanwhile: int, away: tuple[float, float], text: str
) -> Result:
    stalls = [(float(begin_s), float(took_s)) for begin_s, took_s in _HELD_UP.findall(text)]
    stalls = [(begin_s, took_s) for begin_s, took_s in stalls if begin_s < away[1] and begin_s + took_s > away[0]]
    longest_s = max((took_s for _, took_s in stalls), default=0.0)
    held_up_s = sum(min(begin_s + took_s, away[1]) - max(begin_s, away[0]) for begin_s, took_s in stalls)
    request_s = 0.0 if case.captures or case.place == "local" else case.total_s + ATTEMPT_S
    share_s = 0.0 if case.captures else 0.12 * (away[1] - away[0])
    verdict = audit(open_storage(place.uri, storage_options=place.options or None)).verdict
    problems = {
        f"it ended with status {launcher.statuses[-1]}": launcher.statuses[-1] != 0,
        "it did not train on": meanwhile < 1,
        f"a step was held up for {longest_s:g} s": longest_s > request_s + _SLACK_S,
        f"steps were held up for {held_up_s:g} s": held_up_s > request_s + share_s + _SLACK_S,
        f"the audit says {verdict}": verdict != "proved",
        "rows do not count once": job.counts() != Counter(range(case.rows)),
    }
    return Result(
        meanwhile=meanwhile,
        saves=len(_SAVED.findall(text)),
        warnings=text.count("SaveWarning: training goes on"),
        longest_s=longest_s,
        held_up_s=held_up_s,
        verdict=verdict,
        problem="; ".join(name for name, holds in problems.items() if holds),
    )


# --- the command


def cases(seconds: Sequence[float]) -> Iterator[Case]:
    """Return every case, for each of ``seconds``."""
    places = [*itertools.product(["local"], ("renamed", "emptied")), *itertools.product(["s3"], REFUSALS)]
    for away_s, (place, fault), captures, ranks in itertools.product(seconds, places, (False, True), (1, 2)):
        yield Case(place=place, fault=fault, captures=captures, ranks=ranks, seconds=away_s)


def main() -> int:
    parser = argparse.ArgumentParser(description="take the stores of real jobs away, and say what the jobs did")
    parser.add_argument("--seconds", type=float, nargs="+", default=[12.0, 60.0, 600.0])
    add_arguments(parser)
    args = parser.parse_args()
    head = f"{'case':34} {'away':>6}  steps  saves  warnings  longest stall  held up  verdict"

    def line(case: Case, found: Result) -> str:
        return (
            f"{case!s:34} {case.seconds:5g}s  {found.meanwhile:5}  {found.saves:5}  {found.warnings:8}  "
            f"{found.longest_s:11.1f} s  {found.held_up_s:5.1f} s  "
            f"{'✗ ' + found.problem if found.problem else found.verdict}"
        )

    return run_all(cases(args.seconds), run, line, head=head, name="outage", args=args)


if __name__ == "__main__":
    sys.exit(main())
