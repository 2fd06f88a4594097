"""This module prints the demo's progress, on a line that is written over, and its verdict."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lakeckpt.cli.output import StatusLine, TextTable
from lakeckpt.demo.records import record_path
from lakeckpt.demo.scenario import EPOCHS, DemoConfig
from lakeckpt.demo.verdict import Verdict

__all__ = ["Follower", "print_verdict"]


class Follower:
    """Reads what rank 0 of each launch records, and shows the step that it is at."""

    def __init__(self, line: StatusLine, name: str, config: DemoConfig) -> None:
        self._line, self._name, self._config = line, name, config
        self._launch, self._offset, self._step = -1, 0, 0

    def poll(self, launch: int) -> None:
        """Show what is new. Called often."""
        topology = self._config.phases[launch].topology
        if launch != self._launch:
            fault = self._config.phases[launch - 1].fault if launch else None
            if fault is not None:
                self._line.clear()
                print(f"SIGKILL {fault.title}; back as {topology}")
            self._launch, self._offset = launch, 0
            self._show(f"{topology}, starting")
        for event in self._new_events(record_path(self._config.records, launch, 0)):
            if event["kind"] == "final":
                self._line.clear()
                print(f"{self._name}: {self._step} steps done")
            else:
                self._step = event.get("step", event.get("restored", 0))
                self._show(topology)

    def _new_events(self, path: Path) -> list[dict[str, Any]]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _show(self, note: str) -> None:
        steps = EPOCHS * self._config.steps_per_epoch
        self._line.show(f"{self._name}: step {self._step} of about {steps}, {note}")


def print_verdict(verdict: Verdict, config: DemoConfig, files: list[Path], seconds: float) -> None:
    """Print the faults' costs, the checks, the verdict, and where the files are."""
    table = TextTable("", "killed", "came back as", ">steps\nagain", ">until\nrestored", ">until\nthere again")
    for number, cost in enumerate(verdict.faults, start=1):
        times = (f"{cost.restart_s:.1f} s", f"{cost.restart_s + cost.recompute_s:.1f} s")
        table.add_row(str(number), f"{cost.who}, step {cost.step}", cost.after, str(cost.recomputed_steps), *times)
    print(f"\n{table}\n")
    for check in verdict.checks:
        print(f"{'✓' if check.holds else '✗'} {check.claim}\n  {check.seen}")
    if verdict.loss_faulted is not None and verdict.loss_reference is not None:
        print(f"\nLoss at the end: {verdict.loss_faulted:.5f} with faults, {verdict.loss_reference:.5f} without")
    print(f"Time: {seconds:.0f} s\n")
    if verdict.green:
        print(f"GREEN {len(verdict.faults)} faults, 0 rows lost, 0 rows repeated")
    else:
        failed = sum(not check.holds for check in verdict.checks)
        print(f"RED {failed} of {len(verdict.checks)} checks failed")
    run = os.path.relpath(config.checkpoints)
    for line in (*map(os.path.relpath, files), f"lakeckpt audit {run}", f"lakeckpt inspect {run}"):
        print(f"  {line}")
