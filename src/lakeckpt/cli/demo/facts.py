"""What was run, in words: the lines that the terminal and the page both show."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import lakeckpt
from lakeckpt.cli.demo.lake import LakeFacts
from lakeckpt.cli.demo.verdict import JobFacts, Verdict

__all__ = ["Facts", "facts_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """``lines`` are (name, value) pairs; ``commands`` are for the user's shell."""

    summary: str
    lines: tuple[tuple[str, str], ...]
    commands: tuple[str, ...]
    footer: str


def facts_of(lake: LakeFacts, faulted: JobFacts, verdict: Verdict, seconds: float) -> Facts:
    """Say what the demo ran on, and how to look at what it left; ``seconds`` is the time that it took in all."""
    config = faulted.config
    parameters = 0
    if faulted.launches and faulted.launches[-1].final is not None:
        parameters = faulted.launches[-1].final["parameters"]
    kills = len(verdict.faults)
    difference = verdict.loss_faulted - verdict.loss_reference
    run = os.path.relpath(config.checkpoints)
    return Facts(
        summary=(
            f"A small GPT learned from the source text of Python's standard library, twice: once undisturbed, and once "
            f"while {kills} faults killed its processes. This page compares the two."
        ),
        lines=(
            (
                "Lake",
                f"{lake.rows:,} rows of {lake.block:,} bytes: {lake.text_bytes / 1e6:.1f} MB of text from "
                f"{lake.sources:,} source files; {lake.files} Parquet files, {lake.row_groups} row groups "
                f"of {lake.smallest_group} to {lake.largest_group} rows, {lake.file_bytes / 1e6:.1f} MB on disk",
            ),
            (
                "Model",
                f"a GPT over bytes with {parameters:,} parameters; DDP over gloo, one thread per rank; "
                "AdamW; from each row a stretch of 64 bytes, at a random place",
            ),
            (
                "Training",
                f"{config.epochs} epochs, shuffled, {config.batch_size} rows per micro-batch, "
                f"{config.num_lanes} lanes, a checkpoint every {config.save_every} steps",
            ),
            ("Topologies", " → ".join(dict.fromkeys(phase.topology for phase in config.phases))),
            (
                "Loss at the end",
                f"{verdict.loss_faulted:.5f} with faults, {verdict.loss_reference:.5f} without "
                f"(difference {difference:+.5f}), on the same rows spread over the lake",
            ),
            (
                "Checkpoint overhead",
                f"{100 * verdict.overhead:.2f} % of training time in the fault-free run "
                f"({verdict.saves} synchronous saves, {verdict.save_ms:.0f} ms each)",
            ),
            ("Time in all", f"{seconds:.0f} s"),
        ),
        commands=(
            f"lakeckpt audit   {run}",
            f"lakeckpt inspect {run}",
            f"lakeckpt explain {run} --step {verdict.unchanged_steps or 1}",
            f"head -3 {os.path.relpath(config.records)}/launch-00-rank-00.jsonl    # what the loop itself recorded",
        ),
        footer=(
            f"lakeckpt {lakeckpt.__version__} · Python {platform.python_version()} · {platform.system()} "
            f"{platform.machine()} · {os.cpu_count()} cores"
        ),
    )
