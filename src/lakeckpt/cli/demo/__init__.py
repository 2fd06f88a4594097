"""``lakeckpt demo``: can the promise be seen to hold, on real text, under kills, on this very machine?

How: `run_demo` builds a lake from the source text of Python's standard library, trains a small GPT on it with torchrun
twice (undisturbed, and while ranks are killed), and holds the second run against the first and against the ids that
the training loop itself recorded. What it found goes to the terminal, a JSON file, a picture and a page.

Never: it takes nothing from the network, and touches nothing outside of its output folder.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from lakeckpt.errors import ConfigError

__all__ = ["add_arguments", "run"]

DEFAULT_OUT = "demo-out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``lakeckpt demo``."""
    parser.add_argument("--out", default=DEFAULT_OUT, metavar="FOLDER", help="where to write (default: ./%(default)s)")
    parser.add_argument("--short", action="store_true", help="three kills instead of five, on a small part of the text")
    parser.add_argument("--kills", type=int, choices=range(1, 6), help="how many of the five faults strike")
    parser.add_argument("--rows", type=int, metavar="N", help="use only the first N rows (of 4 KiB) of the text")
    parser.add_argument("--batch-size", type=int, metavar="B", help="rows per micro-batch")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="optimizer steps between checkpoints")
    parser.add_argument("--seed", type=int, default=7, help="of weights and order (default: %(default)s)")
    # Proves that the verdict can be red; not for users.
    parser.add_argument("--sabotage", choices=["drop-reader-state"], help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if the verdict is green, 1 if it is red."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the demo draws with matplotlib, which is missing: pip install 'lakeckpt[demo]'")
    from lakeckpt.cli.demo.demo import DemoSize, run_demo  # pyarrow and the rest only when asked for

    size = DemoSize.short() if args.short else DemoSize.full()
    size = size.but(rows=args.rows, kills=args.kills, batch_size=args.batch_size, save_every=args.save_every)
    verdict = run_demo(Path(args.out), size=size, seed=args.seed, sabotage=args.sabotage)
    return 0 if verdict is not None and verdict.green else 1
