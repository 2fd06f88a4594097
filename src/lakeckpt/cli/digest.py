"""``lakeckpt digest TABLE --into RUN``: record what the bytes of a table are, while they are known to be good."""

from __future__ import annotations

import argparse

from lakeckpt.cli.output import options_of, print_json, progress_bar, say_many

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``lakeckpt digest``."""
    parser.add_argument("table", metavar="TABLE", nargs="+", help="a folder, glob, file or URL; or several files")
    parser.add_argument("--into", metavar="RUN", required=True, help="where the digests are kept, beside a run")
    parser.add_argument("--columns", metavar="A,B,…", help="the columns to be read and recorded (default: all)")
    parser.add_argument("--version", metavar="V", help="a Delta version, an Iceberg tag or branch, a Hudi instant")
    parser.add_argument("--threads", type=int, default=4, metavar="N", help="files read at a time (default: 4)")
    parser.add_argument("--storage-options", metavar="JSON", help="for the store, as fsspec takes them")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def run(args: argparse.Namespace) -> int:
    """Record and print; 0."""
    from lakeckpt.lake.chunk_digests import digests_path
    from lakeckpt.lake.table import open_table
    from lakeckpt.reading.record_digests import record_digests

    options = options_of(args.storage_options)
    version = int(args.version) if args.version is not None and args.version.isdecimal() else args.version
    table = open_table(args.table[0] if len(args.table) == 1 else args.table, version=version, storage_options=options)
    with progress_bar("digesting", show=not args.json) as progress:
        found = record_digests(
            table,
            args.into,
            columns=args.columns.split(",") if args.columns else None,
            threads=args.threads,
            storage_options=options,
            progress=progress,
        )
    assert found.digests is not None
    recorded = int((found.digests.digests != 0).sum())
    path = digests_path(table.index.digest)
    if args.json:
        print_json({"table": table.index.digest, "files": len(table.index.paths), "chunks": recorded, "path": path})
    else:
        print(
            f"{say_many(recorded, 'column chunk')} of {say_many(len(table.index.paths), 'file')} recorded by now in "
            f"{path}: open the table with digests={args.into!r}",
        )
    return 0
