"""``lakeckpt plan TABLE --remap RUN --key COLUMN``: the rest of an epoch is carried over to another table version."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from lakeckpt.cli.output import options_of, print_json, progress_bar, say_many
from lakeckpt.errors import ConfigError

if TYPE_CHECKING:
    from lakeckpt.lake.table import Table

__all__ = ["run_remap"]


def run_remap(args: argparse.Namespace, table: Table) -> int:
    """Carry the place over and print what was done; 0."""
    from lakeckpt.checkpoint.remap import remap
    from lakeckpt.lake.storage import describe, open_storage

    if not args.key:
        raise ConfigError("--remap needs --key: the column, or columns, whose values tell all rows apart")
    storage = open_storage(args.remap, storage_options=options_of(args.storage_options))
    key = [name.strip() for some in args.key for name in some.split(",")]
    with progress_bar("keys", show=not args.json) as progress:
        done = remap(storage, table, key=key, reader=args.reader, progress=progress)
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
