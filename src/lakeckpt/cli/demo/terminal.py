"""What does the demo print? A bar while it runs, then tables with the verdict.

Never: it decides nothing; the verdict does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lakeckpt.cli.demo.facts import Facts
from lakeckpt.cli.demo.records import record_path
from lakeckpt.cli.demo.scenario import DemoConfig
from lakeckpt.cli.demo.verdict import Verdict

__all__ = ["Follower", "make_progress", "print_verdict"]


def make_progress(console: Console) -> Progress:
    """A bar over optimizer steps, with the topology and the loss of rank 0."""
    return Progress(
        TextColumn("[bold]{task.description:<14}"),
        BarColumn(bar_width=34),
        TextColumn("step {task.completed:>5.0f} / {task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    )


class Follower:
    """Reads what rank 0 of each launch has recorded, and moves the bar: back too, where a fault threw work away."""

    def __init__(self, progress: Progress, name: str, config: DemoConfig) -> None:
        self._progress, self._config = progress, config
        self._task = progress.add_task(name, total=config.epochs * config.steps_per_epoch, note="starting")
        self._launch, self._offset = -1, 0

    def poll(self, launch: int) -> None:
        """Called often; reads only what is new."""
        phase = self._config.phases[launch]
        if launch != self._launch:
            if self._launch >= 0:
                fault = self._config.phases[self._launch].fault
                title = f"{fault.title}; back as {phase.topology}" if fault else ""
                self._progress.console.print(f"[bold red]SIGKILL[/] {title}", highlight=False)
            self._launch, self._offset = launch, 0
            self._progress.update(self._task, note=f"{phase.topology}, starting")
        path = record_path(Path(self._config.records), launch, 0)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._show([json.loads(line) for line in whole.splitlines()], phase.topology)

    def _show(self, events: list[dict[str, Any]], topology: str) -> None:
        for event in events:
            if event["kind"] == "start":
                self._progress.update(self._task, completed=event["restored"], note=f"{topology}, at work")
            elif event["kind"] == "step":
                note = f"{topology}, loss {event['loss_sum'] / max(1, len(event['ids'])):.3f}"
                self._progress.update(self._task, completed=event["step"], note=note)
            elif event["kind"] == "final":
                self._progress.update(self._task, completed=event["step"], total=event["step"], note="done")


def _checks(verdict: Verdict) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for check in verdict.checks:
        mark = Text("✓", "bold green") if check.holds else Text("✗", "bold red")
        table.add_row(mark, Group(Text(check.claim), Text(check.seen, "dim")))
    return table


def _faults(verdict: Verdict) -> Table:
    table = Table(title="What the faults cost", title_justify="left", title_style="bold", box=None, padding=(0, 1))
    for name in ("", "killed", "came back as"):
        table.add_column(name)
    for name in ("steps\nagain", "until\nnoticed", "until\nrestored", "until\nthere again", "time lost"):
        table.add_column(name, justify="right")
    for cost in verdict.faults:
        table.add_row(
            *(str(cost.number), f"{cost.who}, step {cost.step}", cost.after, str(cost.recomputed_steps)),
            *(f"{seconds:.1f} s" for seconds in (cost.notice_s, cost.restart_s, cost.recompute_s, cost.lost_s)),
        )
    return table


def print_verdict(console: Console, verdict: Verdict, facts: Facts, files: list[Path]) -> None:
    """The tables, the verdict and where the files are."""
    console.print()
    console.print(_faults(verdict))
    console.print()
    table = Table(box=None, show_header=False, padding=(0, 1))
    for name, value in facts.lines:
        table.add_row(Text(name, "dim"), Text(value))
    console.print(table)
    console.print()
    console.print(_checks(verdict))
    console.print()
    if verdict.green:
        console.print(f"[bold green]GREEN[/] {len(verdict.faults)} faults, 0 rows lost, 0 rows repeated")
    else:
        failed = sum(not check.holds for check in verdict.checks)
        console.print(f"[bold red]RED[/] {failed} of {len(verdict.checks)} checks failed")
    for path in files:
        console.print(f"  {os.path.relpath(path)}", style="dim", highlight=False)
