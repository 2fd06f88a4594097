"""The demo from end to end: lake, two runs, verdict, picture, page.

How: every stage is a function of its own module; here is only their order. The output folder is made anew each time,
and only if it is empty or was made by an earlier demo.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from lakeckpt.cli.demo.facts import facts_of
from lakeckpt.cli.demo.lake import LakeFacts, build_lake, lake_ids
from lakeckpt.cli.demo.ledger import audit_job
from lakeckpt.cli.demo.page import write_page
from lakeckpt.cli.demo.picture import draw
from lakeckpt.cli.demo.records import read_launches
from lakeckpt.cli.demo.scenario import MOST_KILLS, DemoConfig, Phase, scenario_for, steps_per_epoch, usual_save_every
from lakeckpt.cli.demo.supervise import DemoFailed, run_job
from lakeckpt.cli.demo.terminal import Follower, print_verdict
from lakeckpt.cli.demo.verdict import JobFacts, Verdict, judge
from lakeckpt.cli.output import StatusLine
from lakeckpt.errors import ConfigError

__all__ = ["DemoSize", "run_demo"]

_MARK = "lakeckpt-demo.json"
_NUM_LANES = 8
_EPOCHS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSize:
    """How much is trained on, and how many faults strike.

    ``rows`` None means all the text there is, in rows of ``block`` bytes; ``save_every`` None, as is usual for so many.
    """

    rows: int | None
    block: int = 4096
    batch_size: int
    save_every: int | None
    kills: int = MOST_KILLS

    @classmethod
    def full(cls) -> Self:
        return cls(rows=None, batch_size=8, save_every=None)

    @classmethod
    def short(cls) -> Self:
        return cls(rows=512, batch_size=8, save_every=4, kills=3)

    def but(self, **changes: int | None) -> Self:
        """The same, with the fields that are given and not None."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def run_demo(out: Path, *, size: DemoSize, seed: int = 7, sabotage: str | None = None) -> Verdict | None:
    """Run it all below ``out``; None where a run did not come to its end, which is as red as can be.

    Raises `ConfigError` where ``out`` holds something that no demo made.
    """
    began = time.monotonic()
    _make_folder(out)
    lake = build_lake(out / "lake", block=size.block, max_rows=size.rows)
    print(
        f"Lake {lake.rows:,} rows, {lake.text_bytes / 1e6:.1f} MB of Python's own source text, "
        f"in {lake.files} Parquet files with {lake.row_groups} row groups"
    )
    steps = steps_per_epoch(lake.rows, _NUM_LANES, size.batch_size)
    save_every = usual_save_every(steps) if size.save_every is None else size.save_every
    phases = scenario_for(steps, save_every, kills=size.kills)
    calm = _config(out, "without-faults", lake, size, save_every, seed, steps, (Phase(world_size=2, workers=1),))
    rough = _config(out, "with-faults", lake, size, save_every, seed, steps, phases)
    rough = replace(rough, drop_reader_state=sabotage == "drop-reader-state")
    try:
        reference, faulted = _run_both(out, calm, rough)
    except DemoFailed as failure:
        print(f"RED {failure}")
        return None
    return _conclude(out, lake, reference, faulted, began)


def _run_both(out: Path, calm: DemoConfig, rough: DemoConfig) -> tuple[JobFacts, JobFacts]:
    facts, line = [], StatusLine()
    try:
        for name, config in (("without faults", calm), ("with faults", rough)):
            follower = Follower(line, name, config)
            outcome = run_job(config, out / name.replace(" ", "-"), on_poll=follower.poll)
            follower.poll(len(config.phases) - 1)
            launches = tuple(read_launches(Path(config.records)))
            facts.append(JobFacts(config=config, outcome=outcome, launches=launches, audit=audit_job(config)))
    finally:
        line.clear()
    return facts[0], facts[1]


def _conclude(out: Path, lake: LakeFacts, reference: JobFacts, faulted: JobFacts, began: float) -> Verdict:
    verdict = judge(reference, faulted, lake_ids(lake.folder))
    picture, page, plain = out / "loss.png", out / "index.html", out / "verdict.json"
    drawn = draw(picture, reference, faulted, verdict.faults, lake.rows)
    facts = facts_of(lake, faulted, verdict, time.monotonic() - began)
    write_page(page, picture if drawn else None, verdict, facts, faulted)
    plain.write_text(json.dumps(verdict.to_plain(), indent=1, default=str) + "\n")
    print_verdict(verdict, facts, [page, *([picture] if drawn else []), plain])
    return verdict


def _config(
    out: Path,
    name: str,
    lake: LakeFacts,
    size: DemoSize,
    save_every: int,
    seed: int,
    steps: int,
    phases: tuple[Phase, ...],
) -> DemoConfig:
    folder = out.resolve() / name
    return DemoConfig(
        lake=str(lake.folder.resolve()),
        checkpoints=str(folder / "checkpoints"),
        records=str(folder / "records"),
        epochs=_EPOCHS,
        batch_size=size.batch_size,
        save_every=save_every,
        num_lanes=_NUM_LANES,
        seed=seed,
        learning_rate=6e-3,
        steps_per_epoch=steps,
        phases=phases,
    )


def _make_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / _MARK).is_file())):
        raise ConfigError(f"{out} holds something that no earlier demo made: name an empty or a new folder with --out")
    if out.is_dir():
        for entry in out.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).write_text('{"made_by": "lakeckpt demo"}\n')
