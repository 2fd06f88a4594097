"""This module runs ``lakeckpt audit RUN``: it prints the proof, or the reasons against a proof.

The exit status is that of the verdict (`lakeckpt.checkpoint.ledger.audit_report.EXIT_STATUS`), and 2 if the audit
failed.
"""

from __future__ import annotations

import argparse

from lakeckpt.checkpoint.ledger.audit import audit
from lakeckpt.checkpoint.ledger.audit_report import AuditReport, EpochAudit, Finding, ReaderAudit
from lakeckpt.cli.output import TextTable, format_count, format_rows, print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run
from lakeckpt.progress import progress_bar

__all__ = ["add_arguments", "run"]

_COUNTS = ("once", "excluded", "lost", "repeated", "again", "dropped", "left", "before")
_ALWAYS = ("once", "lost", "repeated")
_HEADS = {"again": "to repeat", "left": "to come", "before": "before"}
_GROUPS = 6
_ENDS = {
    "short": "the last batches of an epoch may be smaller",
    "carry": "a growing table is followed, and rows that fill no step are part of the next tranche",
    "drop": "drop_last drops the rows that do not fill a batch of every rank",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt audit``."""
    add_run_arguments(parser)
    parser.add_argument("--tip", type=int, metavar="SLOT", help="audit the history of this checkpoint, not the newest")
    parser.add_argument("--all", action="store_true", help="list every row group of a finding, and every epoch")


def run(args: argparse.Namespace) -> int:
    """Audit and print. Returns the exit status."""
    storage, place = open_run(args)
    with progress_bar("records", show=not args.json) as progress:
        report = audit(storage, tip=args.tip, progress=progress)
    if args.json:
        print_json(report.to_plain())
    else:
        _show(report, place, every=args.all)
    return report.exit_status


def _show(report: AuditReport, place: str, *, every: bool) -> None:
    print(
        f"{place}  step {report.step:,}, {format_count(report.checkpoints, 'checkpoint')}, "
        f"{format_count(report.attempts, 'attempt')}"
    )
    for reader in report.readers:
        _show_reader(reader, every=every)
    for finding in report.findings:
        _show_finding(finding, every=every)
    for branch in report.branches:
        print(
            f"rolled back: attempt {branch.attempt} up to step {branch.last_step:,}, "
            f"{format_count(len(branch.slots), 'checkpoint')}, {format_count(branch.rows, 'row')}; they do not count"
        )
    for note in report.notes:
        print("note: " + note)
    for doubt in report.every_doubt:
        print(f"unknown: {doubt}")
    print()
    print(f"{report.headline}  {report.words}")
    for reader in report.readers if report.verdict != "not proved" else ():
        if reader.inferred:
            print(
                f"note: {reader.inferred} called manager.step() without the batch that the step used: that steps used "
                f"what reader {reader.name!r} delivered is inferred. manager.step(batch) states it"
            )
    if report.verdict != "not proved":
        print("The verdict trusts:")
        for one in report.trusted:
            print(f"  * {one}")


def _show_reader(reader: ReaderAudit, *, every: bool) -> None:
    if not reader.epochs:
        return
    shown = [name for name in _COUNTS if name in _ALWAYS or any(getattr(epoch, name) for epoch in reader.epochs)]
    print()
    table = TextTable(
        ">epoch", "", f">{reader.counted}s", *(f">{_HEADS.get(name, name)}" for name in shown), title=_title(reader)
    )
    for first, last in _alike(reader.epochs, every=every):
        span = str(first.epoch) if first is last else f"{first.epoch}–{last.epoch}"
        table.add_row(span, first.status, first.rows, *(getattr(first, name) for name in shown))
    print(table)
    for one in reader.excluded if every else reader.excluded[:_GROUPS]:
        print(f"excluded: {one.words}")
    if not every and len(reader.excluded) > _GROUPS:
        print(f"… and {len(reader.excluded) - _GROUPS:,} more (--all lists them)")
    for note in reader.notes:
        print("note: " + note)


def _title(reader: ReaderAudit) -> str:
    topologies = " → ".join(
        f"{format_count(ranks, 'rank')} × {format_count(batch_size, reader.batch_of)} per batch, "
        f"{format_count(lanes, 'lane')}"
        for lanes, batch_size, ranks in reader.topologies[-4:]
    )
    ends = "an endless stream" if reader.endless else _ENDS.get(reader.tail, reader.tail)
    return f"reader {reader.name!r}: {topologies}; {ends}"


def _alike(epochs: tuple[EpochAudit, ...], *, every: bool) -> list[tuple[EpochAudit, EpochAudit]]:
    """Return runs of epochs with the same counts, as (first, last)."""
    runs: list[tuple[EpochAudit, EpochAudit]] = []
    for epoch in epochs:
        if runs and not every and _counts(runs[-1][1]) == _counts(epoch):
            runs[-1] = runs[-1][0], epoch
        else:
            runs.append((epoch, epoch))
    return runs


def _counts(epoch: EpochAudit) -> tuple[object, ...]:
    return (epoch.status, epoch.rows, *(getattr(epoch, name) for name in _COUNTS))


def _show_finding(finding: Finding, *, every: bool) -> None:
    print()
    print(f"✗ {finding.words}")
    shown = finding.where if every else finding.where[:_GROUPS]
    if not shown:
        return
    table = TextTable("  file", ">row group", "rows")
    for one in shown:
        rows = format_rows(one.rows.pairs(), of=one.of, most=10**9 if every else 8) + one.how_counted
        table.add_row(f"  {one.file}", one.row_group, rows)
    print(table)
    more = finding.rows - sum(one.rows.size for one in shown)
    if more:
        print(f"  … and {format_count(more, 'row')} more" + ("" if every else " (--all)"))
