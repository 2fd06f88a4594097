"""This module runs ``lakeckpt explore RUN``: it writes a page to look at a run in a browser, without a server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lakeckpt.cli.explore.facts import facts_of
from lakeckpt.cli.output import format_bytes, format_count, print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run
from lakeckpt.errors import ConfigError

__all__ = ["add_arguments", "run"]

_PAGE = Path(__file__).with_name("page.html")
_DATA = "/*DATA*/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt explore``."""
    add_run_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", default="run.html", help="the page (default: run.html)")
    parser.add_argument(
        "--steps", type=int, metavar="N", default=500, help="have the rows of the last N optimizer steps (default: 500)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, or print its facts as JSON. Returns 0, whatever the verdict is."""
    if args.steps < 0:
        raise ConfigError(f"--steps is how many of the last steps the page has, 0 or more, got {args.steps}")
    folder = Path(args.output).parent
    if not args.json and not folder.is_dir():
        raise ConfigError(f"--output is a file in a folder that exists, and {folder} is none: make the folder first")
    storage, place = open_run(args)
    facts = facts_of(storage, place, newest_steps=args.steps)
    if args.json:
        print_json(facts)
        return 0
    page = _page(json.dumps(facts, ensure_ascii=False, separators=(",", ":")))
    Path(args.output).write_bytes(page)
    steps = format_count(len(facts["steps"]), "step")
    print(f"{args.output}  {format_bytes(len(page))}, with the rows of {steps}: open it in a browser")
    return 0


def _page(data: str) -> bytes:
    """Return the page with ``data`` in it. No text of a run can end the element that holds it."""
    return _PAGE.read_text("utf-8").replace(_DATA, data.replace("<", "\\u003c")).encode()
