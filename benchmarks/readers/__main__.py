"""Every reader that we know of, on the same rows, in one run: ``python -m benchmarks.readers [--quick] …``

Needs the interpreters of the peers' environments (`make bench` makes them): what is not there is left out, and the
tables say so. Nothing is asserted; figures of one run are to be compared with each other and with no others.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.readers.measuring import exactness, prepare, resumes, speeds
from benchmarks.readers.plan import exact_cases, resume_cases, speed_cases
from benchmarks.readers.publish import publish, show
from benchmarks.readers.registry import ENTRIES, READERS, STREAMS, Entry
from benchmarks.readers.runner import ROOT, Runner
from benchmarks.readers.streams.measuring import streams
from benchmarks.readers.streams.plan import jobs
from benchmarks.readers.tables import DATA, make

SPEED_TABLES = ("tabular", "tokens", "images")
PARTS = ("speed", "resume", "exact", "streams")
ENVIRONMENTS = ("peers", "older")
CONVERTED_ROWS = 200_000
RESUME_ROWS = 100_000
TALLIED_ROWS = 16_384
STREAM_SECONDS = 3
"""Mixtures hold many windows: they are read for so many times as long as rows are."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small tables, one repetition: does everything run?")
    parser.add_argument("--scale", type=float, help="of the data sets (1: 8 M, 400 k, 20 k rows; default 0.5)")
    parser.add_argument("--repetitions", type=int, help="default 3")
    parser.add_argument("--seconds", type=float, help="to read for after the first batch; default 1")
    parser.add_argument("--readers", nargs="+", choices=list(ENTRIES), default=list(ENTRIES), metavar="READER")
    parser.add_argument("--tables", nargs="+", choices=SPEED_TABLES)
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop then, and keep what was measured")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one process")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets; they are kept")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv", help="folder with peers/ and older/")
    parser.add_argument("--out", type=Path, help="default: docs/benchmarks, or bench-out if not all is measured")
    found = parser.parse_args()
    whole = all((found.environments / name).exists() for name in ENVIRONMENTS)  # else it is not what is published
    defaults: dict[str, tuple[Any, Any]] = {
        "scale": (0.02, 0.5),
        "repetitions": (1, 3),
        "seconds": (0.5, 1.0),
        "tables": (["tabular", "tokens"], list(SPEED_TABLES)),
        "parts": (["speed", "exact", "streams"], list(PARTS)),
        "out": (Path("bench-out"), ROOT / "docs/benchmarks" if whole else Path("bench-out")),
    }
    for name, (quick, full) in defaults.items():
        if getattr(found, name) is None:
            setattr(found, name, quick if found.quick else full)
    return found


def _pythons(folder: Path) -> dict[str, str]:
    """The interpreters of the environments; without them this one, which may have some readers' packages."""
    found = {"peers": sys.executable}
    for name in ENVIRONMENTS:
        python = folder / name / "bin/python"
        if python.exists():
            found[name] = str(python)
    return found


def _of_parts(parts: Sequence[str]) -> dict[str, Entry]:
    """The readers that take part in ``parts``."""
    return {**(READERS if set(parts) - {"streams"} else {}), **(STREAMS if "streams" in parts else {})}


def _machine() -> str:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    memory, cores = pages * size >> 30, len(os.sched_getaffinity(0))
    return f"{platform.system()} {platform.machine()}, {cores} cores, {memory} GiB of memory, page cache warm"


def _commit() -> str:
    try:
        ran = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return ran.stdout.strip() or "unknown"


def _warm(folder: str) -> None:
    for path in Path(folder).glob("*.parquet"):
        with open(path, "rb") as file:
            while file.read(8 << 20):
                pass


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # broken off either way, what was measured is kept
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.0f} s] {text}", flush=True)

    runner = Runner(_pythons(arguments.environments.absolute()), timeout_s=arguments.timeout)
    asked = [name for name in arguments.readers if name in _of_parts(arguments.parts)]
    versions = {name: runner.version(name) for name in asked if runner.can(name)}
    readers = [name for name in asked if versions.get(name)]
    for name in asked:
        if name not in readers:
            say(f"left out, not installed: {name}")
    results: dict[str, Any] = {"versions": versions}
    load = os.getloadavg()[0]
    try:
        _measure(arguments, runner, readers, results, say, until=began + 60 * arguments.minutes)
    except KeyboardInterrupt:
        say("broken off: what was measured is kept")
    finally:
        runner.close()
    about = {
        "command": "python -m benchmarks.readers " + shlex.join(sys.argv[1:]),
        "machine": _machine(),
        "load average before and after": f"{load:.1f}, {os.getloadavg()[0]:.1f}",
        "commit": _commit(),
        "python": platform.python_version(),
        "repetitions": arguments.repetitions,
        "seconds of reading each": arguments.seconds,
        "took": f"{(time.monotonic() - began) / 60:.0f} minutes",
    }
    results["about"] = dict.fromkeys(arguments.parts, about)
    if "streams" in arguments.parts:
        results["about"]["streams"] = {**about, "seconds of reading each": STREAM_SECONDS * arguments.seconds}
    show(results)
    publish(arguments.out, results)
    say(f"written to {arguments.out}")


def _measure(
    arguments: Any, runner: Runner, readers: list[str], results: dict[str, Any], say: Any, *, until: float
) -> None:
    def collect(part: str, measured: Iterator[dict[str, Any]]) -> None:
        results[part] = []
        for one in measured:
            results[part].append(one)

    def in_time(text: str) -> None:
        say(text)
        if time.monotonic() > until:
            raise KeyboardInterrupt

    of_streams = [name for name in readers if name in STREAMS]
    readers = [name for name in readers if name in READERS]
    if "exact" in arguments.parts:
        names = ("resume-odd",) if arguments.quick else ("resume-odd", "resume")
        tables = [make(name, 1, arguments.data) for name in names]
        exact = [case for table in tables for case in exact_cases(table, readers, quick=arguments.quick)]
        results["unprepared"] = prepare(runner, [case for case, _, _ in exact], say)
        collect("exact", exactness(runner, exact, in_time))
    if "resume" in arguments.parts:
        resuming = []
        for name in arguments.tables:
            table = make(name, arguments.scale, arguments.data, at_most=RESUME_ROWS if name == "tokens" else None)
            resuming += resume_cases(table, readers)
        prepare(runner, resuming, say)
        collect("resume", resumes(runner, resuming, arguments.repetitions, in_time))
    if "speed" in arguments.parts:
        cases = []
        for name in arguments.tables:
            say(f"the data set {name}")
            table = make(name, arguments.scale, arguments.data)
            part = make(name, arguments.scale, arguments.data, at_most=CONVERTED_ROWS)
            cases += speed_cases(table, part, readers, quick=arguments.quick)
            _warm(table.folder)
        prepare(runner, cases, say)
        collect("speed", speeds(runner, cases, arguments.repetitions, arguments.seconds, in_time))
    if "streams" in arguments.parts:
        table = make("tokens", arguments.scale, arguments.data)
        small = make("tokens", arguments.scale, arguments.data, at_most=TALLIED_ROWS)
        every = list(jobs(table, small, of_streams, STREAM_SECONDS * arguments.seconds))
        _warm(table.folder)
        prepare(runner, [job.case for job in every], say)
        collect("streams", streams(runner, every, arguments.repetitions, in_time))


if __name__ == "__main__":
    main()
