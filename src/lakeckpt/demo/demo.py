"""This module runs ``lakeckpt demo``: it trains a small GPT while ranks are killed, and counts every token.

The demo builds a lake from text that comes with Python and trains on it twice, under ``lakeckpt run``, with every step
captured in memory: once undisturbed, and once while ranks are killed. The second run is compared with the first, and
with the tokens that the training loop itself recorded. The result goes to the terminal and to ``verdict.json``.

The demo takes nothing from the network and touches nothing outside of its output folder. The folder is made anew each
time, and only if it is empty or was made by an earlier demo.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lakeckpt.checkpoint.faults.records import faults_of
from lakeckpt.checkpoint.ledger.audit import audit, read_run
from lakeckpt.cli.faults import say_account
from lakeckpt.demo.lake import build_lake, lake_numbers
from lakeckpt.demo.records import read_launches
from lakeckpt.demo.scenario import LENGTH, DemoConfig, Phase, scenario_for
from lakeckpt.demo.supervise import DemoFailed, run_job
from lakeckpt.demo.verdict import RecordedJob, Verdict, judge
from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.open import open_storage

__all__ = ["add_arguments", "run", "run_demo"]

_MARK = "lakeckpt-demo.json"
_WHOLE: dict[str, Any] = {"sequences": {"prose": 1664, "code": 2080}, "steps": 256, "kills": 5, "save_every": 32}
_SHORT: dict[str, Any] = {"sequences": {"prose": 376, "code": 456}, "steps": 64, "kills": 3, "save_every": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt demo``."""
    parser.add_argument("--out", default="demo-out", metavar="FOLDER", help="where to write (default: ./%(default)s)")
    parser.add_argument("--short", action="store_true", help="three kills instead of five, and fewer steps")


def run(args: argparse.Namespace) -> int:
    """Run the demo. Return 0 if the verdict is green, 1 if it is red."""
    size = _SHORT if args.short else _WHOLE
    return 0 if run_demo(Path(args.out), **size) else 1


def run_demo(
    out: Path, *, sequences: Mapping[str, int], steps: int, kills: int, save_every: int, sabotage: bool = False
) -> bool:
    """Run the demo below ``out`` and return whether the verdict is green.

    Args:
        out: the output folder.
        sequences: source → sequences of its table. Each source must come to the end of an epoch.
        steps: optimizer steps of the training.
        kills: how many of the five faults happen.
        save_every: optimizer steps between checkpoints.
        sabotage: restore without the reader's state, which must turn the verdict red.

    Raises `ConfigError` if ``out`` holds something that no demo made.
    """
    began = time.monotonic()
    _make_folder(out)
    lake = out.resolve() / "lake"
    build_lake(lake, sequences)
    sizes = ", ".join(f"{count * LENGTH:,} tokens of {source}" for source, count in sequences.items())
    print(f"Lake: {sizes}, in documents, as Parquet files")
    calm = DemoConfig(
        lake=str(lake),
        folder=str(out.resolve() / "without-faults"),
        steps=steps,
        save_every=save_every,
        phases=(Phase(world_size=2, workers=1),),
    )
    phases = scenario_for(steps, save_every, kills=kills)
    faulted = replace(calm, folder=str(out.resolve() / "with-faults"), phases=phases, drop_reader_state=sabotage)
    try:
        jobs = _run("without faults", calm), _run("with faults", faulted)
    except DemoFailed as failure:
        print(f"RED {failure}")
        return False
    run = open_storage(str(faulted.checkpoints))
    report = audit(run)
    verdict = judge(*jobs, {source: lake_numbers(lake / source) for source in sequences}, report)
    (out / "verdict.json").write_text(json.dumps({"green": verdict.green, **asdict(verdict)}, indent=1) + "\n")
    _print_verdict(verdict, jobs[1], time.monotonic() - began)
    print(f"  {out / 'verdict.json'}")
    print(f"  {say_account(faults_of(run, read_run(run))[1])}")
    for command in ("audit", "faults"):
        print(f"  lakeckpt {command} {os.path.relpath(faulted.checkpoints)}")
    return verdict.green


def _run(name: str, config: DemoConfig) -> RecordedJob:
    """Run a job, and print its launches."""

    def started(phase: Phase) -> None:
        fate = "to the end" if phase.fault is None else f"until SIGKILL for {phase.fault.title}"
        print(f"{name}: {phase.topology}, {fate}", flush=True)

    deaths = run_job(config, on_start=started)
    return RecordedJob(config=config, deaths=deaths, launches=tuple(read_launches(config.records)))


def _print_verdict(verdict: Verdict, faulted: RecordedJob, seconds: float) -> None:
    print()
    for check in verdict.checks:
        print(f"{'✓' if check.holds else '✗'} {check.claim}\n  {check.seen}")
    print(f"\nTime: {seconds:.0f} s")
    if verdict.green:
        print(f"GREEN {len(faulted.deaths)} faults, 0 tokens lost, 0 tokens repeated")
    else:
        failed = sum(not check.holds for check in verdict.checks)
        print(f"RED {failed} of {len(verdict.checks)} checks failed")


def _make_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / _MARK).is_file())):
        raise ConfigError(f"{out} holds something that no earlier demo made: name an empty or a new folder with --out")
    if out.is_dir():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / _MARK).write_text('{"made_by": "lakeckpt demo"}\n')
