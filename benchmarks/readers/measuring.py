"""What is measured of the cases, in which order?  Speeds interleaved; then places saved and resumed, counted by row.

Three parts, each yielding plain dicts for the JSON file, which later repetitions fill, so that a run that is broken off
keeps what it had measured:

* `speeds`: every repetition runs every case once, one after the other, so that what disturbs the machine for a while
  falls on all. Memory is watched in the first repetition only. Whoever was far behind in it is not run again.
* `resumes`: one pass saves the state at 50 % and at 90 % of the epoch; fresh processes then measure the time from
  making the loader to its first batch: at 0 %, 50 % and 90 %.
* `exactness`: a job is stopped in mid-epoch and goes on from its state, on the same ranks and workers and on others;
  the ids of all rows are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.readers.case import Case
from benchmarks.readers.counting import count
from benchmarks.readers.plan import Topology
from benchmarks.readers.registry import ENTRIES, READERS
from benchmarks.readers.runner import Failed, Runner
from benchmarks.readers.summary import median_rate

__all__ = ["exactness", "far_behind", "prepare", "resumes", "speeds"]

Say = Callable[[str], None]
Found = dict[str, Any]
BEHIND = 5
"""Who is slower than the fastest by this factor is measured once: no repetition would change what the table says."""
PLACES = ("50", "90")
"""Percent of an epoch at which a state is saved to time resuming."""


def prepare(runner: Runner, cases: Sequence[Case], say: Say) -> list[Found]:
    """Convert what must be converted, once; return the failures."""
    failed, done = [], set()
    for case in cases:
        if ENTRIES[case.reader].prepares and (case.reader, case.folder) not in done:
            done.add((case.reader, case.folder))
            say(f"preparing {case.table} for {case.reader}")
            try:
                runner.one({"do": "prepare"}, case)
            except Failed as error:
                failed.append({"reader": case.reader, "table": case.table, "why": str(error)})
    return failed


def speeds(runner: Runner, cases: Sequence[Case], repetitions: int, seconds: float, say: Say) -> Iterator[Found]:
    """Measure all ``cases``, interleaved; after the first repetition those that are not `far_behind`, and as long as
    they have not failed twice."""
    found: list[Found] = [{"case": asdict(case), "runs": [], "failures": []} for case in cases]
    yield from found
    for repetition in range(repetitions):
        for number, (case, one) in enumerate(zip(cases, found, strict=True)):
            if len(one["failures"]) > 1 or (repetition and far_behind(one, found)):
                continue
            say(f"speed {repetition + 1}/{repetitions}, {number + 1}/{len(cases)}: {case.name}")
            try:
                one["runs"].append(runner.one({"do": "speed", "seconds": seconds}, case, memory=not one["runs"]))
            except Failed as error:
                one["failures"].append(str(error))
                say(f"    failed: {error}")


def far_behind(one: Found, found: Sequence[Found]) -> bool:
    """Whether what was measured of a case is less than a `BEHIND` part of the fastest on the same batches; never of
    ours and of the limits, which the others are compared with."""
    case, mine = one["case"], median_rate(one)
    if READERS[case["reader"]].kind in ("ours", "limit"):
        return False
    others = [each for each in found if all(each["case"][key] == case[key] for key in ("table", "batch_size"))]
    best = max((median_rate(each) or 0 for each in others), default=0)
    return mine is not None and mine < best / BEHIND


def resumes(runner: Runner, cases: Sequence[Case], repetitions: int, say: Say) -> Iterator[Found]:
    """Time the first batch at 0 %, 50 % and 90 % of an epoch, interleaved."""
    found: list[Found] = []
    states: list[Path] = []
    for case in cases:
        one: Found = {"case": asdict(case), "first_batch_s": {p: [] for p in ("0", *PLACES)}, "failures": []}
        found.append(one)
        states.append(runner.folder("states"))
        batches = case.rows // case.batch_size
        at = {place: batches * int(place) // 100 for place in PLACES}
        say(f"saving at {' % and '.join(PLACES)} %: {case.name}")
        try:
            saved = runner.one({"do": "save", "at": at, "states": str(states[-1])}, case)
            one["state_bytes"] = {place: saved["states"][place]["bytes"] for place in PLACES}
        except Failed as error:
            one["failures"].append(str(error))
            say(f"    failed: {error}")
        yield one
    for repetition in range(repetitions):
        for case, one, folder in zip(cases, found, states, strict=True):
            for place in ("0", *PLACES):
                if one["failures"]:
                    continue
                say(f"resume {repetition + 1}/{repetitions} at {place} %: {case.name}")
                state = None if place == "0" else str(folder / place)
                try:
                    ran = runner.one({"do": "resume", "state": state, "whole": False}, case)
                    one["first_batch_s"][place].append(ran["first_batch_s"])
                except Failed as error:
                    one["failures"].append(f"at {place} %: {error}")
                    say(f"    failed: {error}")


def exactness(runner: Runner, cases: Sequence[tuple[Case, Topology, Topology]], say: Say) -> Iterator[Found]:
    """Stop each job in mid-epoch, go on from its state, and count the rows."""
    for case, before, after in cases:
        say(f"exactly once? {case.reader}, {case.rows:,} rows: {before} → {after}")
        one: Found = {"case": asdict(case), "before": asdict(before), "after": asdict(after)}
        try:
            one.update(_resumed(runner, case, before, after))
            say(f"    {one['lost']} lost, {one['repeated']} repeated")
        except (Failed, ValueError) as error:
            one["why"] = str(error)
            say(f"    failed: {error}")
        yield one


def _resumed(runner: Runner, case: Case, before: Topology, after: Topology) -> dict[str, Any]:
    batches = case.rows // (case.batch_size * before.ranks) // 2
    first = _ranks(case, before)
    folders = [runner.folder("state") for _ in first]
    saves = [{"do": "save", "at": {"half": batches}, "states": str(folder)} for folder in folders]
    consumed = runner.ranks(saves, first)
    second = _ranks(case, after)
    # Each rank takes its own state; a rank that is new takes the last one's, as there is no other to take.
    states = [str(folders[min(rank.rank, len(folders) - 1)] / "half") for rank in second]
    rest = runner.ranks([{"do": "resume", "state": state, "whole": True} for state in states], second)
    counted = count(case.rows, [ids for _, ids in (*consumed, *rest)])
    return {
        "lost": counted.lost,
        "repeated": counted.repeated,
        "state_bytes": [ran["states"]["half"]["bytes"] for ran, _ in consumed],
    }


def _ranks(case: Case, topology: Topology) -> list[Case]:
    return [
        replace(case, rank=rank, world_size=topology.ranks, workers=topology.workers) for rank in range(topology.ranks)
    ]
