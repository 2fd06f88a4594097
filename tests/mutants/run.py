"""This module plants the listed faults in copies of the source, one at a time, and counts those that the tests find.

The lists are the `*.toml` files beside this one: each fault names a behaviour, a file of the package, the text to
replace, and the few tests that should fail then. For each fault a copy of `src/lakeckpt` is made in a temporary folder,
the text is replaced there, and the tests run against the copy in a pytest of their own; the working tree never changes.
A fault is *killed* where a test fails, and *survives* where all pass. Everything else (text that is not there exactly
once, a test that does not exist, a module that cannot be imported) is an error of the list, and raised.

Two threads run faults side by side (`--jobs`). Each starts one pytest at a time and joins it; a pytest that runs for
longer than `TIMEOUT_S` is killed with its children.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src"
KILLED = HERE / "killed.json"
TIMEOUT_S = 400
TEST_TIMEOUT_S = 100
_FAILED = re.compile(r"^FAILED (.+?)(?: - |$)", re.MULTILINE)


class ListError(Exception):
    """A fault of the list cannot be planted, or its tests cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted fault."""

    area: str
    """The list that it is of."""
    name: str
    """The behaviour that it breaks, in a sentence."""
    file: str
    """Below `src/lakeckpt`."""
    before: str
    """The text to replace: it occurs once in the file."""
    after: str
    tests: tuple[str, ...]
    """Paths or node ids, the quickest first."""

    def planted(self) -> str:
        """The source of the file with the fault in it. `ListError` where the fault does not apply."""
        path = SOURCE / "lakeckpt" / self.file
        text = path.read_text("utf-8") if path.is_file() else ""
        found = text.count(self.before)
        if found != 1 or self.before == self.after:
            raise ListError(
                f"{self.area}.toml, {self.name!r}: the fault no longer applies: its text occurs {found} times in "
                f"src/lakeckpt/{self.file}. Plant the same fault where the behaviour is now"
            )
        return text.replace(self.before, self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a fault."""

    area: str
    name: str
    killed: bool
    by: str
    """The first test that failed; empty: none."""
    wall_s: float


def read_faults(folder: Path = HERE) -> list[Fault]:
    """Return the faults of all lists; each name occurs once."""
    faults = [
        Fault(area=path.stem, **{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(folder.glob("*.toml"))
        for entry in tomllib.loads(path.read_text("utf-8"))["fault"]
    ]
    names = [fault.name for fault in faults]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ListError(f"two faults have one name: {', '.join(twice)}")
    return faults


def check(faults: Iterable[Fault]) -> list[str]:
    """Return what is wrong with the lists, without running a test."""
    wrong = []
    for fault in faults:
        try:
            compile(fault.planted(), fault.file, "exec")
        except (ListError, SyntaxError) as error:
            wrong.append(str(error))
        missing = [test for test in fault.tests if not (ROOT / test.partition("::")[0]).exists()]
        wrong += [f"{fault.area}.toml, {fault.name!r}: there is no test {test}" for test in missing]
    return wrong


def run_fault(fault: Fault) -> Outcome:
    """Plant ``fault`` in a copy and run its tests. `ListError` where that says nothing."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lakeckpt-mutant-") as folder:
        copy = Path(folder) / "src"
        shutil.copytree(SOURCE / "lakeckpt", copy / "lakeckpt")  # with its bytecode, and the times that it is valid for
        (copy / "lakeckpt" / fault.file).write_text(fault.planted(), "utf-8")
        code, output = _pytest(copy, fault.tests, Path(folder) / "tests")
    failed = _FAILED.search(output)
    if code not in (0, 1) or (code == 1) != (failed is not None):
        raise ListError(f"{fault.area}.toml, {fault.name!r}: pytest ended with {code}:\n{output[-4000:]}")
    by = "" if failed is None else failed[1]
    return Outcome(
        area=fault.area, name=fault.name, killed=code == 1, by=by, wall_s=round(time.monotonic() - begin_s, 1)
    )


def _pytest(source: Path, tests: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run ``tests`` against the package in ``source``; return the exit status and what was printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=line"]
    command += [f"--basetemp={folder}", f"--timeout={TEST_TIMEOUT_S}", *tests]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(source), "COLUMNS": "1000", "HYPOTHESIS_PROFILE": "mutants"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return -signal.SIGKILL, f"{output}\nkilled after {TIMEOUT_S} s"
    return process.returncode, output


def run_unmodified(faults: Iterable[Fault]) -> None:
    """Run all named tests once against the source as it is. `ListError` where one fails."""
    tests = dict.fromkeys(test for fault in faults for test in fault.tests)
    with tempfile.TemporaryDirectory(prefix="lakeckpt-mutant-") as folder:
        code, output = _pytest(SOURCE, list(tests), Path(folder) / "tests")
    if code:
        raise ListError(f"tests of the lists fail without any fault:\n{output[-4000:]}")


def run_all(faults: Sequence[Fault], *, jobs: int) -> list[Outcome]:
    """Run every fault, ``jobs`` at a time, and print each outcome as it comes."""
    outcomes, errors = [], []
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run_fault, fault) for fault in faults]):
            try:
                outcomes.append(future.result())
            except ListError as error:
                errors.append(str(error))
                print(f"ERROR     {error}", flush=True)
                continue
            print(_line(outcomes[-1]), flush=True)
    if errors:
        raise ListError(f"{len(errors)} of {len(faults)} faults say nothing: see the errors above")
    order = [fault.name for fault in faults]
    return sorted(outcomes, key=lambda one: order.index(one.name))


def _line(one: Outcome) -> str:
    verdict = "killed  " if one.killed else "SURVIVED"
    return f"{verdict}  {one.wall_s:5.1f} s  {one.area:10}  {one.name:90}  {one.by}".rstrip()


def main() -> int:
    """Run the lists; 1 where fewer faults are killed than `KILLED` says, 2 where a list is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only faults whose list and name hold all of these words")
    parser.add_argument("--jobs", type=int, default=2, help="how many faults run side by side (default: 2)")
    parser.add_argument("--check", action="store_true", help="only see that every fault applies; runs no test")
    parser.add_argument("--unmodified", action="store_true", help="run the tests of the lists without any fault")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    asked = parser.parse_args()
    try:
        return _run(asked)
    except ListError as error:
        print(error, file=sys.stderr)
        return 2


def _run(asked: argparse.Namespace) -> int:
    faults = read_faults()
    chosen = [one for one in faults if all(word in f"{one.area}: {one.name}" for word in asked.words)]
    if not chosen:
        raise ListError(f"no fault of the lists holds all of these words: {', '.join(asked.words)}")
    if wrong := check(chosen):
        raise ListError("\n".join(wrong))
    if asked.check or asked.unmodified:
        if asked.unmodified:
            run_unmodified(chosen)
        print(f"{len(chosen)} faults apply")
        return 0
    begin_s = time.monotonic()
    outcomes = run_all(chosen, jobs=asked.jobs)
    return _concluded(outcomes, wall_s=time.monotonic() - begin_s, path=asked.json, whole=not asked.words)


def _concluded(outcomes: Sequence[Outcome], *, wall_s: float, path: Path | None, whole: bool) -> int:
    """Print the summary, write the report, and return the exit status."""
    killed, used = sum(one.killed for one in outcomes), resource.getrusage(resource.RUSAGE_CHILDREN)
    least = json.loads(KILLED.read_text("utf-8"))["least"] if whole else 0
    summary = {"faults": len(outcomes), "killed": killed, "least": least}
    summary |= {"wall_s": round(wall_s), "cpu_s": round(used.ru_utime + used.ru_stime)}
    print(f"\n{killed} of {len(outcomes)} faults killed (at least {least} must be), in {wall_s:.0f} s", end="")
    print(f" of time and {summary['cpu_s']} s of processors")
    for one in outcomes:
        if not one.killed:
            print(f"survived: {one.area}: {one.name}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {**summary, "outcomes": [asdict(one) for one in outcomes]}
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 1 if killed < least else 0


if __name__ == "__main__":
    sys.exit(main())
