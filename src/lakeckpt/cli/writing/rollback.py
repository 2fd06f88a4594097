"""This module runs ``lakeckpt rollback RUN --step K``: the next restore goes on from the checkpoint of step K.

With ``--exclude-steps A:B`` it goes on without the batches that these steps have used. The command writes one entry of
the log.
"""

from __future__ import annotations

import argparse

from lakeckpt.checkpoint.consumed.exclusions import said_of_exclusion
from lakeckpt.checkpoint.rollback import roll_back
from lakeckpt.cli.output import print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run

__all__ = ["add_arguments", "run"]

_STEP = "the optimizer step of the checkpoint to go back to. A job that still runs is stopped at its next save"

_EXCLUDE = (
    "train on without the batches that the optimizer steps A to B-1 have used (K < A < B), after a loss spike: they "
    "leave the deal, on record, and the rest of the epoch is cut anew"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt rollback``."""
    add_run_arguments(parser)
    parser.add_argument("--step", type=int, required=True, metavar="K", help=_STEP)
    parser.add_argument("--exclude-steps", type=_steps, metavar="A:B", help=_EXCLUDE)


def _steps(text: str) -> tuple[int, int]:
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal()):
        raise argparse.ArgumentTypeError(f"two steps with a colon between them, such as 120:130, got {text!r}")
    return int(first), int(stop)


def run(args: argparse.Namespace) -> int:
    """Roll back and print. Returns 0."""
    storage, place = open_run(args)
    found, exclusions = roll_back(storage, args.step, exclude_steps=args.exclude_steps)
    readers = sorted({one.reader for one in exclusions})
    excluded = {name: sum(one.positions.size for one in exclusions if one.reader == name) for name in readers}
    if args.json:
        plain = {"step": found.step, "slot": found.slot, "attempt": found.attempt, "created_s": found.created_s}
        print_json({**plain, "excluded": excluded})
        return 0
    print(
        f"{place}: the next restore goes on from step {found.step:,} (slot {found.slot}). Later "
        "checkpoints are abandoned, and their data go with the next save. A job that still runs on this run is "
        "superseded: its next save fails, so start it again"
    )
    for one in exclusions:
        print(f"excluded: {said_of_exclusion(one)}")
    return 0
