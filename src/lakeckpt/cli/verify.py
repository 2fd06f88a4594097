"""This module runs ``lakeckpt verify RUN``: it checks every byte of the checkpoints.

The exit status is 0 if every byte is intact, and 1 if there is damage.
"""

from __future__ import annotations

import argparse

from lakeckpt.checkpoint.ledger.verify import CheckedCheckpoint, VerifyReport, verify
from lakeckpt.cli.output import TextTable, format_bytes, format_count, print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run
from lakeckpt.progress import progress_bar

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt verify``."""
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Verify and print. Returns the exit status."""
    storage, place = open_run(args)
    with progress_bar("verifying", show=not args.json) as progress:
        report = verify(storage, progress=progress)
    if args.json:
        print_json(report.to_plain())
    else:
        _show(report, place)
    return report.exit_status


def _show(report: VerifyReport, place: str) -> None:
    there = [one for one in report.checkpoints if one.status != "removed"]
    removed = len(report.checkpoints) - len(there)
    count = format_count(len(report.checkpoints), "checkpoint")
    print(f"{place}  {count}, {removed:,} of them removed by retention")
    if there:
        table = TextTable(">slot", ">step", ">attempt", ">files", ">size", "")
        for one in there:
            status = one.status + ("" if one.in_history else " (rolled back)")
            table.add_row(one.slot, one.step, one.attempt, one.files, format_bytes(one.size_bytes), status)
        print(table)
    if report.leftover_files:
        print(_left(report))
    if (last := report.restorable) is not None and last.bound:
        print(_bound(last))
    print()
    for damage in report.every_damage:
        print(f"✗ {damage}")
    if report.every_damage:
        print(f"DAMAGED  {format_count(len(report.every_damage), 'object')} of the run: see above")
        print(_advice(report))
    else:
        indexes = format_count(report.indexes, "table index", "table indexes")
        size = format_bytes(sum(one.size_bytes for one in there))
        print(f"INTACT  the log, {indexes} and {format_count(len(there), 'checkpoint')} ({size}): every checksum holds")


def _bound(one: CheckedCheckpoint) -> str:
    """Return a sentence about the number of ranks on which a checkpoint can be restored."""
    return f"slot {one.slot} can be restored only on the same number of ranks, divided as before: {one.bound}"


def _left(report: VerifyReport) -> str:
    """Return a sentence about the files that no checkpoint names."""
    left = f"{format_count(report.leftover_files, 'file')} ({format_bytes(report.leftover_bytes)})"
    if report.log_damage:
        return f"{left} of checkpoints whose entries in the log are damaged, or of saves that were never committed"
    text = f"{left} of saves that were never committed; the next save removes them"
    if report.leftover_step is None:
        return text
    return (
        f"{text}. They reach to step {report.leftover_step:,}, after the newest checkpoint: such a save is under way, "
        "was interrupted, or its entry at the end of the log is lost"
    )


def _advice(report: VerifyReport) -> str:
    """Return advice about damage."""
    back = "Restore the named files from a copy, if there is one."
    if report.log_damage:
        back += " Do this before the next save, which removes data that no entry names."
    one = report.restorable
    if one is None:
        return f"{back} No checkpoint is intact: restore() refuses the run, and does not start from the beginning."
    return f"{back} restore() goes on from the newest intact checkpoint: step {one.step:,} (slot {one.slot})."
