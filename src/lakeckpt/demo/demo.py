"""This module runs the demo's stages in order: lake, two runs, verdict, picture.

The output folder is made anew each time, and only if it is empty or was made by an earlier demo.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

from lakeckpt.cli.output import StatusLine
from lakeckpt.demo.lake import build_lake, lake_ids
from lakeckpt.demo.picture import draw
from lakeckpt.demo.records import read_launches
from lakeckpt.demo.scenario import DemoConfig, Phase, scenario_for, steps_per_epoch
from lakeckpt.demo.supervise import DemoFailed, run_job
from lakeckpt.demo.terminal import Follower, print_verdict
from lakeckpt.demo.verdict import Job, audit_of, judge
from lakeckpt.errors import ConfigError

__all__ = ["run_demo"]

_MARK = "lakeckpt-demo.json"


def run_demo(
    out: Path, *, rows: int | None, kills: int, save_every: int | None, seed: int = 7, sabotage: bool = False
) -> bool:
    """Run the demo below ``out`` and return whether the verdict is green.

    Args:
        out: the output folder.
        rows: bounds the rows of the lake; None: all the text there is.
        kills: how many of the five faults happen.
        save_every: optimizer steps between checkpoints; None: 32, or less for a small lake.
        seed: of weights and order.
        sabotage: restore without the reader's state, which must turn the verdict red.

    Raises `ConfigError` where ``out`` holds something that no demo made.
    """
    began = time.monotonic()
    _make_folder(out)
    lake = build_lake(out / "lake", max_rows=rows)
    print(
        f"Lake: {lake.rows:,} rows, {lake.rows * lake.block / 1e6:.1f} MB of Python's own source text, "
        f"in {lake.files} Parquet files with {lake.row_groups} row groups"
    )
    steps = steps_per_epoch(lake.rows)
    save_every = save_every or max(1, min(32, steps // 4))
    common = DemoConfig(
        lake=str(lake.folder.resolve()), folder="", steps_per_epoch=steps, save_every=save_every, seed=seed
    )
    calm = replace(common, folder=str(out.resolve() / "without-faults"), phases=(Phase(world_size=2, workers=1),))
    phases = scenario_for(steps, save_every, kills=kills)
    faulted = replace(common, folder=str(out.resolve() / "with-faults"), phases=phases, drop_reader_state=sabotage)
    try:
        jobs = _run_both(calm, faulted)
    except DemoFailed as failure:
        print(f"RED {failure}")
        return False
    verdict = judge(*jobs, lake_ids(lake.folder))
    files = [out / "verdict.json", out / "loss.png"]
    files[0].write_text(json.dumps({"green": verdict.green, **asdict(verdict)}, indent=1) + "\n")
    if not draw(files[1], *jobs, verdict.faults, lake.rows):
        files.pop()
    print_verdict(verdict, jobs[1].config, files, time.monotonic() - began)
    return verdict.green


def _run_both(calm: DemoConfig, faulted: DemoConfig) -> tuple[Job, Job]:
    jobs, line = [], StatusLine()
    try:
        for name, config in (("without faults", calm), ("with faults", faulted)):
            follower = Follower(line, name, config)
            deaths = run_job(config, on_poll=follower.poll)
            follower.poll(len(config.phases) - 1)
            launches = tuple(read_launches(config.records))
            jobs.append(Job(config=config, deaths=deaths, launches=launches, audit=audit_of(config)))
    finally:
        line.clear()
    return jobs[0], jobs[1]


def _make_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / _MARK).is_file())):
        raise ConfigError(f"{out} holds something that no earlier demo made: name an empty or a new folder with --out")
    if out.is_dir():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / _MARK).write_text('{"made_by": "lakeckpt demo"}\n')
