"""This module runs ``lakeckpt copy RUN DESTINATION``: it copies a checkpoint and its history to another place.

The copy is a run: `lakeckpt verify` and `audit` read it, and ``restore(source=)`` begins from it.
"""

from __future__ import annotations

import argparse
import dataclasses

from lakeckpt.checkpoint.copying.run_copy import copy_run
from lakeckpt.cli.output import format_bytes, format_count, print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run, options_of
from lakeckpt.lake.storage.base import describe
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.progress import progress_bar

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt copy``."""
    add_run_arguments(parser)
    parser.add_argument("target", metavar="DESTINATION", help="an empty place, or one with an earlier copy of this run")
    parser.add_argument("--step", type=int, metavar="K", help="copy the checkpoint of this step (default: the newest)")
    parser.add_argument("--target-options", metavar="JSON", help="for the destination's store, as --storage-options")


def run(args: argparse.Namespace) -> int:
    """Copy and print. Returns 0."""
    source, place = open_run(args)
    target = open_storage(args.target, storage_options=options_of(args.target_options))
    with progress_bar("copying", show=not args.json) as progress:
        done = copy_run(source, target, step=args.step, progress=progress)
    if args.json:
        print_json(dataclasses.asdict(done))
        return 0
    print(
        f"step {done.step:,} of {place} is in {describe(target)}, with its history: {format_count(done.files, 'file')} "
        f"({format_bytes(done.size_bytes)}, of which {format_bytes(done.written_bytes)} were written) were compared "
        f"with their checksums there. A job goes on from it by manager.restore(source={args.target!r})"
    )
    return 0
