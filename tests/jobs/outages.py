"""This module takes the store of a real job's run away while the job trains, brings it back, and says what the job did.

    python -m tests.jobs.outages               # every case, 12 s, 60 s and 10 min each: a table, and exit status 0 or 1
    python -m tests.jobs.outages --seconds 12 --at-once 2 --only "hang, captured" --json outages.json

The run lies in S3 (moto) behind a proxy. A case is what the proxy does while the store is away (it refuses connections
and breaks those that are open; or it hangs and answers nothing), whether cuts are captured, and a number of ranks.

The law: training goes on in the same processes, which end well. Each row counts once, and the audit says PROVED.
While the store is away, captures hold no step up. Synchronous saves hold training up by one request (`total_s` of the
store), and then for about a tenth of the time.
"""

from __future__ import annotations

import argparse
import itertools
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.lake.storage.open import open_storage
from tests.faults.fault_proxy import FaultProxy, HttpFault, Where
from tests.frameworks.harness import Job, write_table
from tests.jobs.away import S3, SCRIPT, Launcher, environment_of
from tests.jobs.commands import add_arguments, run_all, until

_SAVED = re.compile(r"rank 0 has saved step (\d+)")
_HELD_UP = re.compile(r"rank 0 was held up from ([\d.]+) for ([\d.]+) s")
_ATTEMPT_S = 15.0
"""The longest attempt at a request, which may begin when the time of the request is nearly over."""
_SLACK_S = 30.0
"""A machine that is busy holds steps up, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case. ``seconds``: how long the store is away; None: until the job has trained on. ``total_s``: of the
    store's requests."""

    fault: str
    captures: bool
    ranks: int
    seconds: float | None = None
    total_s: float = 60.0

    def __str__(self) -> str:
        return f"{self.fault}, {'captured' if self.captures else 'sync'}, {self.ranks} ranks"

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


class Store:
    """A proxy before ``server``, which can be taken away."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._proxy = FaultProxy(server)
        self.url = self._proxy.url

    @contextmanager
    def away(self, fault: str) -> Iterator[None]:
        """The store is away while the block runs."""
        if fault == "hang":
            self._proxy.faults = [Where(lambda request: True, HttpFault.STALL)]
            yield
            self._proxy.faults = []
            return
        self._proxy.close()
        port = urlsplit(self.url).port or 0
        with socket.socket() as held:  # nobody listens, and nobody else gets the port
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", port))
            yield
        self._proxy = FaultProxy(self._server, port=port)

    def close(self) -> None:
        self._proxy.close()


def run(case: Case, folder: Path, endpoint: str) -> Result:
    """Run a job whose store goes away, to its end."""
    place, store = S3(endpoint), Store(endpoint)
    job, log = Job(folder / "job", SCRIPT), folder / "log.txt"
    write_table(folder / "table", rows=case.rows)
    options = {**place.options, "total_s": case.total_s, "attempt_s": min(_ATTEMPT_S, case.total_s)}
    options["client_kwargs"] = {**place.options["client_kwargs"], "endpoint_url": store.url}
    manager = {"persist_every": 5} | ({"capture_every": 1} if case.captures else {})
    environment = environment_of(job, folder, place.uri, options, manager, case.step_s) | {"PYTHONWARNINGS": "default"}
    patience_s = 900 + 3 * (case.seconds or 0)
    launcher = Launcher("nobody", case.ranks, environment, log, restarts=0, patience_s=patience_s)
    with ThreadPoolExecutor(1) as pool:
        over = pool.submit(launcher.run)
        try:
            until(lambda: bool(_SAVED.search(log.read_text())) or launcher.is_over, log)
            before, begin_s = _steps(job), time.monotonic()
            with store.away(case.fault):
                if case.seconds is None:
                    until(lambda: _has_gone_on(case, before, job, log) or launcher.is_over, log)
                else:
                    time.sleep(case.seconds)
                meanwhile, end_s = _steps(job) - before, time.monotonic()
            saved = len(_SAVED.findall(log.read_text()))
            if case.seconds is not None:
                until(lambda: len(_SAVED.findall(log.read_text())) > saved or launcher.is_over, log, patience_s)
        finally:
            (folder / "hurry").touch()
            over.result()
            store.close()
    return _result(case, place, job, launcher, meanwhile, (begin_s, end_s), log.read_text())


def _steps(job: Job) -> int:
    return max((one["step"] for one in job.lines()), default=0)


def _has_gone_on(case: Case, before: int, job: Job, log: Path) -> bool:
    """Return whether the job has met the outage, and has trained on."""
    met = case.captures or "SaveWarning: training goes on" in log.read_text()
    return met and _steps(job) >= before + 12


def _result(
    case: Case, place: S3, job: Job, launcher: Launcher, meanwhile: int, away: tuple[float, float], text: str
) -> Result:
    stalls = [(float(begin_s), float(took_s)) for begin_s, took_s in _HELD_UP.findall(text)]
    stalls = [(begin_s, took_s) for begin_s, took_s in stalls if begin_s < away[1] and begin_s + took_s > away[0]]
    longest_s = max((took_s for _, took_s in stalls), default=0.0)
    held_up_s = sum(min(begin_s + took_s, away[1]) - max(begin_s, away[0]) for begin_s, took_s in stalls)
    request_s = 0.0 if case.captures else case.total_s + _ATTEMPT_S
    share_s = 0.0 if case.captures else 0.12 * (away[1] - away[0])
    verdict = audit(open_storage(place.uri, storage_options=place.options)).verdict
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
    for away_s, fault, captures, ranks in itertools.product(seconds, ("refuse", "hang"), (False, True), (1, 2)):
        yield Case(fault=fault, captures=captures, ranks=ranks, seconds=away_s)


def main() -> int:
    parser = argparse.ArgumentParser(description="take the stores of real jobs away, and say what the jobs did")
    parser.add_argument("--seconds", type=float, nargs="+", default=[12.0, 60.0, 600.0])
    add_arguments(parser)
    args = parser.parse_args()
    head = f"{'case':26} {'away':>6}  steps  saves  warnings  longest stall  held up  verdict"

    def line(case: Case, found: Result) -> str:
        return (
            f"{case!s:26} {case.seconds:5g}s  {found.meanwhile:5}  {found.saves:5}  {found.warnings:8}  "
            f"{found.longest_s:11.1f} s  {found.held_up_s:5.1f} s  "
            f"{'✗ ' + found.problem if found.problem else found.verdict}"
        )

    return run_all(cases(args.seconds), run, line, head=head, name="outage", args=args)


if __name__ == "__main__":
    sys.exit(main())
