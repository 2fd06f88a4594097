"""This module lists the metrics: their names, kinds, units and labels.

Names are those of Prometheus: base units, and ``_total`` at the end of a counter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "Metric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """Its name in Prometheus."""
    kind: Literal["counter", "gauge"]
    """A counter only grows; a gauge goes up and down."""
    labels: tuple[str, ...]
    """The names of its labels. Each metric also has the label ``rank``, which is the data-parallel rank."""
    about: str
    """The thing that it counts, in a sentence."""
    unit: Literal["", "seconds", "bytes"] = ""
    per: str = ""
    """For TensorBoard: the counter by whose growth that of this one is divided; empty: by seconds."""


METRICS: tuple[Metric, ...] = (
    Metric(
        name="lakeckpt_rows_total",
        kind="counter",
        labels=("reader",),
        about="Rows that the loader has delivered to the training loop of this rank.",
    ),
    Metric(
        name="lakeckpt_batches_total",
        kind="counter",
        labels=("reader",),
        about="Micro-batches that the loader has delivered to the training loop of this rank.",
    ),
    Metric(
        name="lakeckpt_wait_seconds_total",
        kind="counter",
        labels=("reader",),
        unit="seconds",
        about="Time for which the training loop was inside of the loader, to get its next batch.",
    ),
    Metric(
        name="lakeckpt_batches_ready",
        kind="gauge",
        labels=("reader",),
        about="Read-ahead: micro-batches that wait for the loop: about as many as decoded rows make, or with loader "
        "workers, as have come from them.",
    ),
    Metric(
        name="lakeckpt_epochs",
        kind="gauge",
        labels=("reader",),
        about="Epochs that the job has consumed of the reader, or of each source of a mixture: 2.25 is a quarter of "
        "the third. Whole epochs if consumption depends on the data.",
    ),
    Metric(
        name="lakeckpt_skipped_rows",
        kind="gauge",
        labels=("reader", "reason"),
        about="Rows of the table version that an epoch does not deliver: excluded (exclude=), filtered (filters=), or "
        "dropped (drop_last=True).",
    ),
    Metric(
        name="lakeckpt_store_read_bytes_total",
        kind="counter",
        labels=("store",),
        unit="bytes",
        about="Bytes that this process and its loader workers have read of stores: tables, footers and checkpoints.",
    ),
    Metric(
        name="lakeckpt_store_retries_total",
        kind="counter",
        labels=("store",),
        about="Requests to stores that failed, and were made once more.",
    ),
    Metric(
        name="lakeckpt_step",
        kind="gauge",
        labels=("run",),
        about="Optimizer steps done, over all attempts in this history.",
    ),
    Metric(
        name="lakeckpt_commit_age_seconds",
        kind="gauge",
        labels=("run",),
        unit="seconds",
        about="Time since the newest commit, or since the attempt began if there is none.",
    ),
    Metric(
        name="lakeckpt_commit_age_steps",
        kind="gauge",
        labels=("run",),
        about="Optimizer steps since the newest commit: what a loss of all nodes would cost.",
    ),
    Metric(
        name="lakeckpt_commits_total",
        kind="counter",
        labels=("run",),
        about="Checkpoints that were committed.",
    ),
    Metric(
        name="lakeckpt_failed_saves_total",
        kind="counter",
        labels=("run",),
        about="Saves that failed. A save that is skipped for a newer one has not failed.",
    ),
    Metric(
        name="lakeckpt_persist_seconds_total",
        kind="counter",
        labels=("run",),
        unit="seconds",
        per="lakeckpt_commits_total",
        about="Time that committed saves took, from the order of the save to the commit.",
    ),
    Metric(
        name="lakeckpt_stall_seconds_total",
        kind="counter",
        labels=("run",),
        unit="seconds",
        about="Time for which saves, captures and fences have held up the training thread.",
    ),
    Metric(
        name="lakeckpt_own_seconds_total",
        kind="counter",
        labels=("run", "phase"),
        unit="seconds",
        about="Time of the training thread in this attempt, by what it does (data, forward, optimizer and others), if "
        "cuts are captured or a launcher starts the job again. Waits for other ranks are in backward.",
    ),
    Metric(
        name="lakeckpt_captures_total",
        kind="counter",
        labels=("run",),
        about="Cuts that were captured into host memory.",
    ),
    Metric(
        name="lakeckpt_cut_age_seconds",
        kind="gauge",
        labels=("run",),
        unit="seconds",
        about="Time since the newest cut was complete in host memory, or since the attempt began if there is none.",
    ),
    Metric(
        name="lakeckpt_protected",
        kind="gauge",
        labels=("run",),
        about="1 if what this rank captured of a cut of this attempt lies on another node, too; 0 if none does. With "
        'peers="copy" or "3+1" only.',
    ),
    Metric(
        name="lakeckpt_protected_age_seconds",
        kind="gauge",
        labels=("run",),
        unit="seconds",
        about="Time since a newer cut of this rank lay on another node, too, or since the attempt began if none does.",
    ),
    Metric(
        name="lakeckpt_faults",
        kind="gauge",
        labels=("run", "cause"),
        about="Faults that ended the attempts before this one, since the last restore, by the first cause; on rank 0.",
    ),
    Metric(
        name="lakeckpt_capture_seconds_total",
        kind="counter",
        labels=("run",),
        unit="seconds",
        per="lakeckpt_captures_total",
        about="Time that captures took beside training, from the cut to the complete generation.",
    ),
    Metric(
        name="lakeckpt_capture_bytes_total",
        kind="counter",
        labels=("run", "when"),
        unit="bytes",
        about="Bytes of captures that were copied beside training: in a bubble (bubble), at any time as no bubbles are "
        "watched (beside), or while an optimizer step waited (fence).",
    ),
    Metric(
        name="lakeckpt_site_wait_seconds",
        kind="gauge",
        labels=("run", "site"),
        unit="seconds",
        about="The median of the last waits at a site that `lakeckpt.bubbles.Bubbles` watches.",
    ),
    Metric(
        name="lakeckpt_site_captured_ratio",
        kind="gauge",
        labels=("run", "site"),
        about="The part of the captured bytes that moved in the last waits at a site.",
    ),
)
