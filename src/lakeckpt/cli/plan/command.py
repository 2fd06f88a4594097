"""This module runs ``lakeckpt plan TABLE``: it prints what reading a table will take, before training begins."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from lakeckpt.cli.output import (
    TextTable,
    options_of,
    print_json,
    progress_bar,
    say_bytes,
    say_many,
    say_when,
)
from lakeckpt.errors import ConfigError

if TYPE_CHECKING:
    from lakeckpt.cli.plan.facts import PlanFacts
    from lakeckpt.lake.table.table import Table

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt plan``."""
    parser.add_argument(
        "table",
        metavar="TABLE",
        nargs="+",
        help="a folder, glob, file or URL, iceberg://catalog/namespace.table; or several files",
    )
    parser.add_argument("--version", metavar="V", help="a Delta version, an Iceberg tag or branch, a Hudi instant")
    parser.add_argument("--snapshot-id", type=int, metavar="ID", help="an Iceberg snapshot")
    parser.add_argument("--timestamp", metavar="TIME", help="the version of that time: 2026-01-31T12:00:00Z")
    parser.add_argument("--format", metavar="F", help="parquet, delta, iceberg or hudi, where a folder is several")
    parser.add_argument("--columns", metavar="A,B,…", help="the columns to be read (default: all)")
    parser.add_argument(
        "--filters", metavar="JSON", help='which rows: [["user", "<", 20]], or a list of such lists; counts them'
    )
    parser.add_argument("--world-size", type=int, default=1, metavar="W", help="data-parallel ranks (default: 1)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="loader workers of each rank (default: 0)")
    parser.add_argument(
        "--batch-size", type=int, default=1024, metavar="B", help="rows of a micro-batch (default: 1024)"
    )
    parser.add_argument("--lanes", type=int, metavar="L", help="lanes (default: ranks × workers)")
    parser.add_argument("--shuffle", action="store_true", help="shuffled reading")
    parser.add_argument("--window", type=int, default=4, metavar="G", help="row groups shuffled together (default: 4)")
    parser.add_argument("--tail", choices=("short", "drop"), default="short", help="the ends of an epoch")
    parser.add_argument(
        "--remap", metavar="RUN", help="carry the place of a run's newest checkpoint over to this version"
    )
    key = "with --remap: the columns that tell all rows apart (may be repeated)"
    parser.add_argument("--key", action="append", metavar="A,B,…", help=key)
    parser.add_argument("--reader", metavar="NAME", help="with --remap: the reader, where the run has several")
    parser.add_argument("--storage-options", metavar="JSON", help="for the store, as fsspec takes them")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def run(args: argparse.Namespace) -> int:
    """Plan and print; 0."""
    from lakeckpt.cli.plan.columns import column_bytes
    from lakeckpt.cli.plan.facts import Topology, plan_facts
    from lakeckpt.cli.plan.filters import Kept, filter_of_json, kept_bytes
    from lakeckpt.reading.filters.count import count_rows

    topology = Topology(
        world_size=args.world_size,
        workers=args.workers,
        batch_size=args.batch_size,
        num_lanes=args.lanes,
        shuffle=args.shuffle,
        window=args.window,
        tail=args.tail,
    )
    columns = None if args.columns is None else [name.strip() for name in args.columns.split(",")]
    table = _open(args)
    if args.remap is not None:
        return _run_remap(args, table)
    kept: Kept | None = None
    if args.filters is None:
        with progress_bar("columns", show=not args.json) as progress:
            sizes = column_bytes(table, columns, progress=progress)
    else:
        keep = filter_of_json(args.filters, table.schema)
        with progress_bar("rows that stay", show=not args.json) as progress:
            selection, counted = count_rows(table, keep, progress=progress)
        kept = Kept(selection=selection, counted=counted)
        with progress_bar("columns", show=not args.json) as progress:
            sizes = kept_bytes(table, columns, keep, kept, progress=progress)
    facts = plan_facts(table, sizes, topology, kept)
    if args.json:
        print_json(facts.to_plain())
    else:
        _show(facts)
    return 0


def _run_remap(args: argparse.Namespace, table: Table) -> int:
    """Carry the rest of an epoch over to another table version, and print what was done."""
    from lakeckpt.checkpoint.restore.rest_of_epoch import carry_over
    from lakeckpt.lake.storage.base import describe
    from lakeckpt.lake.storage.open import open_storage

    if not args.key:
        raise ConfigError("--remap needs --key: the column, or columns, whose values tell all rows apart")
    storage = open_storage(args.remap, storage_options=options_of(args.storage_options))
    key = [name.strip() for some in args.key for name in some.split(",")]
    with progress_bar("keys", show=not args.json) as progress:
        done = carry_over(storage, table, key=key, reader=args.reader, progress=progress)
    if args.json:
        print_json({"run": describe(storage), "table": table.uri, **asdict(done)})
        return 0
    print(
        f"{describe(storage)}: slot {done.slot}, reader {done.reader!r}, epoch {done.epoch}\n"
        f"{say_many(done.consumed, 'row')} that had been consumed found in {done.version} of {table.uri} by "
        f"{', '.join(done.key)} ({say_many(done.compared, 'key')} compared); {say_many(done.left, 'row')} left of the "
        "epoch.\nThe next restore of this checkpoint goes on from there.",
    )
    return 0


def _open(args: argparse.Namespace) -> Table:
    """The table, at the version that was asked for."""
    from lakeckpt.lake.formats.dispatch import open_table

    named: str | None = args.version
    with progress_bar("footers", show=not args.json) as progress:
        return open_table(
            args.table[0] if len(args.table) == 1 else args.table,
            version=int(named) if named is not None and named.isdecimal() else named,
            snapshot_id=args.snapshot_id,
            timestamp=args.timestamp,
            format=args.format,
            storage_options=options_of(args.storage_options),
            progress=progress,
        )


def _show(facts: PlanFacts) -> None:
    named = ", ".join(facts.columns[:6]) + (f", … {len(facts.columns) - 6} more" if len(facts.columns) > 6 else "")
    per_group = facts.rows // max(1, facts.row_groups)
    print(f"{facts.table}  {_named(facts)}")
    table = TextTable("", "")
    lines = [
        ("files", f"{facts.files:,}, {say_bytes(facts.file_bytes)}"),
        ("row groups", f"{facts.row_groups:,}, {say_many(per_group, 'row')} each on average"),
        ("rows", f"{facts.rows:,}" + (f"; {facts.deleted_rows:,} more are deleted" if facts.deleted_rows else "")),
        *([("filter", _filtered(facts))] if facts.filter is not None else []),
        (
            "columns",
            f"{len(facts.columns)}: {named}; {say_bytes(facts.stored_bytes)} stored, "
            f"about {say_bytes(facts.decoded_bytes)} decoded",
        ),
        *([("partitions", ", ".join(facts.partition_columns))] if facts.partition_columns else []),
        (
            "topology",
            f"{say_many(facts.world_size, 'rank')} × {say_many(facts.workers, 'worker')}, "
            f"{facts.batch_size:,} rows per micro-batch, {facts.batch_size * facts.world_size:,} per step",
        ),
        ("lanes", f"{facts.lanes}; {_borders(facts.cut_row_groups)}"),
        (
            "an epoch",
            f"{say_many(facts.steps, 'step')} on every rank, {facts.short_steps:,} of them short"
            + (f"; {facts.dropped_rows:,} rows dropped" if facts.dropped_rows else ""),
        ),
        (
            "memory",
            f"about {say_bytes(facts.memory_bytes)} per rank: {say_many(facts.windows_held, 'window')} of "
            f"{say_bytes(facts.window_bytes)} held at once, {facts.windows_open} of them open; at most "
            f"{say_bytes(facts.most_memory_bytes)}",
        ),
    ]
    for name, text in lines:
        table.add_row(name, text)
    print(table)
    for warning in facts.warnings:
        print(f"! {warning}")


def _filtered(facts: PlanFacts) -> str:
    return (
        f"{facts.filter}: rules out {say_many(facts.pruned_row_groups, 'row group')} and keeps "
        f"{facts.whole_row_groups:,} whole, unread; {facts.tried_row_groups:,} looked at"
    )


def _named(facts: PlanFacts) -> str:
    kind = facts.format.capitalize()
    if facts.version is None:
        return kind
    made = "" if facts.version_ms is None else f", of {say_when(facts.version_ms / 1000)}"
    return f"{kind} version {facts.version}{made}"


def _borders(cut: int) -> str:
    if not cut:
        return "their borders cut no row group"
    return f"their borders cut {say_many(cut, 'row group')}, which {'is' if cut == 1 else 'are'} decoded again"
