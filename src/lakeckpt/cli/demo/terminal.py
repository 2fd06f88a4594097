"""This module prints what the demo does and finds: a line that is written over while it runs, then tables.

It decides nothing; the verdict does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lakeckpt.cli.demo.facts import Facts
from lakeckpt.cli.demo.records import record_path
from lakeckpt.cli.demo.scenario import DemoConfig
from lakeckpt.cli.demo.verdict import Verdict
from lakeckpt.cli.output import StatusLine, TextTable

__all__ = ["Follower", "print_verdict"]


class Follower:
    """Reads what rank 0 of each launch has recorded, and shows the step that it is at: an earlier one, too, where a
    fault threw work away."""

    def __init__(self, line: StatusLine, name: str, config: DemoConfig) -> None:
        self._line, self._name, self._config = line, name, config
        self._launch, self._offset, self._step = -1, 0, 0

    def poll(self, launch: int) -> None:
        """Called often; reads only what is new."""
        phase = self._config.phases[launch]
        if launch != self._launch:
            if self._launch >= 0:
                fault = self._config.phases[self._launch].fault
                self._line.clear()
                print("SIGKILL", f"{fault.title}; back as {phase.topology}" if fault else "")
            self._launch, self._offset = launch, 0
            self._say(f"{phase.topology}, starting")
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
                self._step = event["restored"]
                self._say(f"{topology}, at work")
            elif event["kind"] == "step":
                self._step = event["step"]
                self._say(f"{topology}, loss {event['loss_sum'] / max(1, len(event['ids'])):.3f}")
            elif event["kind"] == "final":
                self._line.clear()
                print(f"{self._name}: {event['step']} steps done")

    def _say(self, note: str) -> None:
        steps = self._config.epochs * self._config.steps_per_epoch
        self._line.show(f"{self._name}: step {self._step} of about {steps}, {note}")


def _faults(verdict: Verdict) -> TextTable:
    times = (">steps\nagain", ">until\nnoticed", ">until\nrestored", ">until\nthere again", ">time lost")
    table = TextTable("", "killed", "came back as", *times, title="What the faults cost")
    for cost in verdict.faults:
        table.add_row(
            *(str(cost.number), f"{cost.who}, step {cost.step}", cost.after, str(cost.recomputed_steps)),
            *(f"{seconds:.1f} s" for seconds in (cost.notice_s, cost.restart_s, cost.recompute_s, cost.lost_s)),
        )
    return table


def print_verdict(verdict: Verdict, facts: Facts, files: list[Path]) -> None:
    """The tables, the verdict and where the files are."""
    print(f"\n{_faults(verdict)}\n")
    table = TextTable("", "")
    for name, value in facts.lines:
        table.add_row(name, value)
    print(f"{table}\n")
    for check in verdict.checks:
        print(f"{'✓' if check.holds else '✗'} {check.claim}\n  {check.seen}")
    print()
    if verdict.green:
        print(f"GREEN {len(verdict.faults)} faults, 0 rows lost, 0 rows repeated")
    else:
        failed = sum(not check.holds for check in verdict.checks)
        print(f"RED {failed} of {len(verdict.checks)} checks failed")
    for path in files:
        print(f"  {os.path.relpath(path)}")
