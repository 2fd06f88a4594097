"""This module runs ``lakeckpt rollback RUN --step K``: the next restore goes on from the checkpoint of step K.

It writes one entry of the log.
"""

from __future__ import annotations

import argparse

from lakeckpt.checkpoint.rollback import roll_back
from lakeckpt.cli.output import print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run

__all__ = ["add_arguments", "run"]

_STEP = "the optimizer step of the checkpoint to go back to. A job that still runs is stopped at its next save"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt rollback``."""
    add_run_arguments(parser)
    parser.add_argument("--step", type=int, required=True, metavar="K", help=_STEP)


def run(args: argparse.Namespace) -> int:
    """Roll back and print. Returns 0."""
    storage, place = open_run(args)
    found = roll_back(storage, args.step)
    if args.json:
        print_json({"step": found.step, "slot": found.slot, "attempt": found.attempt, "created_s": found.created_s})
        return 0
    print(
        f"{place}: the next restore goes on from step {found.step:,} (slot {found.slot}). Later "
        "checkpoints are abandoned, and their data go with the next save. A job that still runs on this run is "
        "superseded: its next save fails, so start it again"
    )
    return 0
