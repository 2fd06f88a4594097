"""This package is the command ``lakeckpt demo``: it trains a small GPT while ranks are killed, and counts every row.

`run_demo` builds a lake from the source text of Python's standard library and trains on it with torchrun twice: once
undisturbed, and once while ranks are killed. The second run is compared with the first, and with the ids that the
training loop itself recorded. The result goes to the terminal, to ``verdict.json`` and to ``loss.png``.

The demo takes nothing from the network and touches nothing outside of its output folder.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from lakeckpt.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt demo``."""
    parser.add_argument("--out", default="demo-out", metavar="FOLDER", help="where to write (default: ./%(default)s)")
    parser.add_argument("--short", action="store_true", help="three kills instead of five, on a small part of the text")
    parser.add_argument("--kills", type=int, choices=range(1, 6), help="how many of the five faults happen")
    parser.add_argument("--rows", type=int, metavar="N", help="use only the first N rows (of 4 KiB) of the text")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="optimizer steps between checkpoints")
    parser.add_argument("--seed", type=int, default=7, help="of weights and order (default: %(default)s)")
    # Shows that the verdict can be red. It is not for users.
    parser.add_argument("--sabotage", choices=["drop-reader-state"], help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the demo. Return 0 if the verdict is green, 1 if it is red."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the demo draws with matplotlib, which is missing: pip install 'lakeckpt[demo]'")
    from lakeckpt.demo.demo import run_demo  # pyarrow and the rest are loaded only when they are needed

    green = run_demo(
        Path(args.out),
        rows=args.rows or (512 if args.short else None),
        kills=args.kills or (3 if args.short else 5),
        save_every=args.save_every or (4 if args.short else None),
        seed=args.seed,
        sabotage=args.sabotage is not None,
    )
    return 0 if green else 1
