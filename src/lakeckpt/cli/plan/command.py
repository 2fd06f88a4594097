"""This module runs ``lakeckpt plan TABLE``: it prints what reading a table will take, before training begins."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.checkpoint.ledger.consumed_keys import consumed_keys
from lakeckpt.cli.output import TextTable, format_bytes, format_count, format_time, print_json
from lakeckpt.cli.plan.columns import column_bytes
from lakeckpt.cli.plan.facts import PlannedTopology, plan_facts, warnings_of
from lakeckpt.cli.run_arguments import options_of
from lakeckpt.errors import ConfigError
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.storage.base import describe
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.lake.table.table import Table
from lakeckpt.progress import progress_bar

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt plan``."""
    parser.add_argument(
        "table",
        metavar="TABLE",
        nargs="+",
        help="a folder, glob, file or URL, iceberg://catalog/namespace.table; or several files",
    )
    parser.add_argument(
        "--version", metavar="V", help="a Delta version, an Iceberg tag, branch or snapshot id, a Hudi instant"
    )
    parser.add_argument("--format", metavar="F", help="parquet, delta, iceberg or hudi, if a folder is several")
    parser.add_argument("--columns", metavar="A,B,…", help="the columns to be read (default: all)")
    parser.add_argument("--world-size", type=int, default=1, metavar="W", help="data-parallel ranks (default: 1)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="loader workers of each rank (default: 0)")
    parser.add_argument(
        "--batch-size", type=int, default=1024, metavar="B", help="rows of a micro-batch (default: 1024)"
    )
    parser.add_argument("--lanes", type=int, metavar="L", help="lanes (default: ranks × max(1, workers))")
    parser.add_argument("--shuffle", action="store_true", help="shuffled reading")
    parser.add_argument("--window", type=int, default=4, metavar="G", help="row groups shuffled together (default: 4)")
    parser.add_argument(
        "--tail",
        choices=("short", "drop"),
        default="short",
        help="short: the last batches may be smaller; drop: as drop_last (default: short)",
    )
    parser.add_argument(
        "--remap",
        metavar="RUN",
        help="write the keys of the rows that a run has consumed, for consumed=",
    )
    parser.add_argument("--key", metavar="A", help="with --remap: the column that tells all rows apart")
    parser.add_argument("--out", metavar="FILE", help="with --remap: the Parquet file to write")
    parser.add_argument("--reader", metavar="NAME", help="with --remap: the reader, if the run has several")
    parser.add_argument("--storage-options", metavar="JSON", help="for the store, as fsspec takes them")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def run(args: argparse.Namespace) -> int:
    """Plan and print. Returns 0."""
    topology = PlannedTopology(
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
    with progress_bar("columns", show=not args.json) as progress:
        sizes = column_bytes(table, columns, progress=progress)
    facts = plan_facts(table, sizes, topology)
    facts["warnings"] = list(warnings_of(facts, table, sizes))
    if args.json:
        print_json(facts)
    else:
        _show(facts)
    return 0


def _run_remap(args: argparse.Namespace, table: Table) -> int:
    """Write the keys of the rows that a run has consumed of its epoch, and print what to do with them."""
    if not args.key or not args.out:
        raise ConfigError("--remap needs --key, a column whose values tell all rows apart, and --out, a Parquet file")
    storage = open_storage(args.remap, storage_options=options_of(args.storage_options))
    with progress_bar("keys", show=not args.json) as progress:
        done = consumed_keys(storage, table, key=args.key, reader=args.reader, progress=progress)
    pq.write_table(pa.table({args.key: done.values}), args.out)
    if args.json:
        counts = {"consumed": len(done.values), "left": done.left, "epoch": done.epoch}
        of = {"run": describe(storage), "slot": done.slot, "step": done.step, "reader": done.reader}
        print_json({"table": table.uri, **of, **counts, "out": args.out})
        return 0
    print(
        f"{describe(storage)}: step {done.step:,} (slot {done.slot}), reader {done.reader!r}, epoch {done.epoch}\n"
        f"{format_count(len(done.values), 'row')} consumed, {format_count(done.left, 'row')} left; the keys are in "
        f"{args.out}.\nBegin a run with lakeckpt.load() for the weights and "
        f"LakeDataset(…, consumed=({args.key!r}, pyarrow.parquet.read_table({args.out!r})[{args.key!r}])).",
    )
    return 0


def _open(args: argparse.Namespace) -> Table:
    """Return the table, at the version that was asked for."""
    named: str | None = args.version
    with progress_bar("footers", show=not args.json) as progress:
        return open_table(
            args.table[0] if len(args.table) == 1 else args.table,
            version=int(named) if named is not None and named.isdecimal() else named,
            format=args.format,
            storage_options=options_of(args.storage_options),
            progress=progress,
        )


def _show(facts: Mapping[str, Any]) -> None:
    print(f"{facts['table']}  {_version(facts)}")
    table = TextTable("", "")
    table.add_row("files", f"{facts['files']:,}, {format_bytes(facts['file_bytes'])}")
    per_group = facts["rows"] // max(1, facts["row_groups"])
    table.add_row("row groups", f"{facts['row_groups']:,}, {format_count(per_group, 'row')} each on average")
    deleted = f"; {facts['deleted_rows']:,} more are deleted" if facts["deleted_rows"] else ""
    table.add_row("rows", f"{facts['rows']:,}{deleted}")
    table.add_row("columns", _columns(facts))
    if facts["partition_columns"]:
        table.add_row("partitions", ", ".join(facts["partition_columns"]))
    for name, text in _reading(facts):
        table.add_row(name, text)
    print(table)
    for warning in facts["warnings"]:
        print(f"! {warning}")


def _reading(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what depends on the topology."""
    dropped = f"; {facts['dropped_rows']:,} rows dropped" if facts["dropped_rows"] else ""
    ranks, workers = format_count(facts["world_size"], "rank"), format_count(facts["workers"], "worker")
    rows = f"{facts['batch_size']:,} rows per micro-batch, {facts['batch_size'] * facts['world_size']:,} per step"
    held = f"{format_count(facts['windows_held'], 'window')} of {format_bytes(facts['window_bytes'])} held at once"
    return [
        ("topology", f"{ranks} × {workers}, {rows}"),
        ("lanes", f"{facts['lanes']}; {_borders(facts['cut_row_groups'])}"),
        (
            "an epoch",
            f"{format_count(facts['steps'], 'step')} on every rank, {facts['short_steps']:,} of them short{dropped}",
        ),
        (
            "memory",
            f"about {format_bytes(facts['memory_bytes'])} per rank: {held}, {facts['windows_open']} of them open; "
            f"at most {format_bytes(facts['most_memory_bytes'])}",
        ),
    ]


def _columns(facts: Mapping[str, Any]) -> str:
    names = facts["columns"]
    named = ", ".join(names[:6]) + (f", … {len(names) - 6} more" if len(names) > 6 else "")
    stored, decoded = format_bytes(facts["stored_bytes"]), format_bytes(facts["decoded_bytes"])
    return f"{len(names)}: {named}; {stored} stored, about {decoded} decoded"


def _version(facts: Mapping[str, Any]) -> str:
    kind = str(facts["format"]).capitalize()
    if facts["version"] is None:
        return kind
    made = "" if facts["version_ms"] is None else f", of {format_time(facts['version_ms'] / 1000)}"
    return f"{kind} version {facts['version']}{made}"


def _borders(cut: int) -> str:
    if not cut:
        return "their borders cut no row group"
    return f"their borders cut {format_count(cut, 'row group')}, which {'is' if cut == 1 else 'are'} decoded again"
