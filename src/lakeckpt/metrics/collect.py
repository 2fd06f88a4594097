"""This module reads the metrics of this process: its counters, and what is known of its loaders at the moment.

Any thread may read. Nothing that is read changes, and no loader or manager waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from lakeckpt.counters import READERS, RUNS, ReaderCounters, RunCounters, stores
from lakeckpt.metrics.catalogue import METRICS, Metric
from lakeckpt.recovery.faults import Cause

__all__ = ["Reading", "read", "readings", "tag_of"]

_METRICS = {one.name: one for one in METRICS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The value of one metric with one set of labels."""

    metric: Metric
    rank: int
    """The data-parallel rank."""
    labels: tuple[str, ...]
    """The values of the labels that the metric names."""
    value: float


def readings() -> list[Reading]:
    """Return all metrics that are known now.

    If several loaders have one name, their counters are added up, and gauges are those of the newest. A loader that no
    manager tracks has the name ``loader``.
    """
    looked = READERS.looked()  # before the sums: it brings names up to date
    runs = RUNS.living
    found: dict[tuple[str, int, tuple[str, ...]], float] = {}
    for counters, facts in looked:
        if facts.ready is not None:
            found["lakeckpt_batches_ready", counters.rank, (facts.name,)] = facts.ready
        for name, epochs in facts.epochs.items():
            found["lakeckpt_epochs", counters.rank, (name,)] = epochs
        for key, rows in facts.skipped.items():
            found["lakeckpt_skipped_rows", counters.rank, key] = rows
    for reader in READERS.sums():
        for name, value in _of_reader(reader):
            found[name, reader.rank, (reader.name,)] = value
    rank = next((one.rank for one in (*runs, *READERS.living)), 0)
    for store in stores():
        found["lakeckpt_store_read_bytes_total", rank, (store.kind,)] = store.bytes_read
        found["lakeckpt_store_retries_total", rank, (store.kind,)] = store.retries
    for run in runs:
        for name, labels, value in _of_newest(run, time.time()):
            found[name, run.rank, (run.name, *labels)] = value
    for run in RUNS.sums():
        for name, labels, value in _of_run(run):
            found[name, run.rank, (run.name, *labels)] = value
    return [
        Reading(metric=metric, rank=rank, labels=labels, value=value)
        for metric in METRICS
        for (name, rank, labels), value in found.items()
        if name == metric.name
    ]


def _of_reader(one: ReaderCounters) -> Iterator[tuple[str, float]]:
    yield "lakeckpt_rows_total", one.rows
    yield "lakeckpt_batches_total", one.batches
    yield "lakeckpt_wait_seconds_total", one.wait_s


def _of_newest(one: RunCounters, now_s: float) -> Iterator[tuple[str, tuple[str, ...], float]]:
    yield "lakeckpt_step", (), one.step
    yield "lakeckpt_commit_age_seconds", (), max(0.0, now_s - one.committed_s)  # clocks of nodes differ
    yield "lakeckpt_commit_age_steps", (), one.step - one.committed_step
    yield "lakeckpt_cut_age_seconds", (), max(0.0, now_s - one.captured_s)
    if one.copies:
        yield "lakeckpt_protected", (), float(one.protected_step >= 0)
        yield "lakeckpt_protected_age_seconds", (), max(0.0, now_s - one.protected_s)
    for cause in get_args(Cause) if one.rank == 0 else ():
        yield "lakeckpt_faults", (cause,), one.faults.get(cause, 0)
    for phase, seconds in one.spent().items():
        yield "lakeckpt_own_seconds_total", (phase,), seconds
    for waits in one.waits():
        yield "lakeckpt_site_wait_seconds", (waits.site,), waits.median_s
        yield "lakeckpt_site_captured_ratio", (waits.site,), waits.share


def _of_run(one: RunCounters) -> Iterator[tuple[str, tuple[str, ...], float]]:
    yield "lakeckpt_commits_total", (), one.commits
    yield "lakeckpt_failed_saves_total", (), one.failed
    yield "lakeckpt_persist_seconds_total", (), one.persist_s
    yield "lakeckpt_stall_seconds_total", (), one.stall_s
    yield "lakeckpt_captures_total", (), one.captures
    yield "lakeckpt_capture_seconds_total", (), one.capture_s
    for when, size_bytes in (("bubble", one.bubble_bytes), ("beside", one.beside_bytes), ("fence", one.fence_bytes)):
        yield "lakeckpt_capture_bytes_total", (when,), size_bytes


def read() -> dict[str, float]:
    """Return all metrics of this process as plain numbers by name, for ``wandb.log`` and others.

    A name is ``lakeckpt/rows_total/train``: the metric, and the values of its labels other than ``rank`` and ``run``.
    The last one is added if the process has several runs.
    """
    every = readings()
    tag = tag_of(every)
    return {tag(one): one.value for one in every}


def tag_of(every: list[Reading]) -> Callable[[Reading], str]:
    """Return what makes the names of `read`."""
    runs = {labels["run"] for one in every if "run" in (labels := _labels(one))}
    dropped = {"run"} if len(runs) < 2 else set[str]()

    def tag(one: Reading) -> str:
        values = [value for name, value in _labels(one).items() if name not in dropped]
        return "/".join(["lakeckpt", one.metric.name.removeprefix("lakeckpt_"), *values])

    return tag


def _labels(one: Reading) -> Mapping[str, str]:
    return dict(zip(one.metric.labels, one.labels, strict=True))
