"""This module runs the jobs of `benchmarks.readers.streams.plan`, every round each of them once.

A round number is kept with each run, so that ratios are computed of runs of the same round, between which the machine's
load changes least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.readers.measuring import Say
from benchmarks.readers.runner import Failed, Runner
from benchmarks.readers.streams.plan import Job
from benchmarks.readers.streams.sources import lay_out

__all__ = ["streams"]

Found = dict[str, Any]


def streams(runner: Runner, jobs: Sequence[Job], rounds: int, say: Say) -> Iterator[Found]:
    """Measure all ``jobs``; what failed twice is not run again. Yields plain dicts, which later rounds fill."""
    found = [_begin(job) for job in jobs]
    yield from found
    tasks = [_task(runner, job, one, say) for job, one in zip(jobs, found, strict=True)]
    for number in range(rounds):
        for job, task, one in zip(jobs, tasks, found, strict=True):
            if len(one["failures"]) > 1 or (job.once and one["runs"]) or task is None:
                continue
            say(f"streams {number + 1}/{rounds}, {job.group}: {job.case.name}")
            try:
                one["runs"].append({"round": number, **runner.one(task, job.case)})
            except Failed as error:
                one["failures"].append(str(error))
                say(f"    failed: {error}")


def _begin(job: Job) -> Found:
    return {"group": job.group, "case": asdict(job.case), "save_at": job.save_at, "runs": [], "failures": []}


def _task(runner: Runner, job: Job, one: Found, say: Say) -> dict[str, Any] | None:
    """Lay out the sources, save the state that the task loads, and return the task; None where that failed."""
    lay_out(job.case)
    if not job.save_at:
        return job.task
    folder = runner.folder("states")
    say(f"saving after {job.save_at} batches: {job.case.name}")
    try:
        saved = runner.one({"do": "save", "at": {"place": job.save_at}, "states": str(folder)}, job.case)
    except Failed as error:
        one["failures"].append(str(error))
        say(f"    failed: {error}")
        return None
    one["state_bytes"] = saved["states"]["place"]["bytes"]
    return {**job.task, "state": str(folder / "place")}
