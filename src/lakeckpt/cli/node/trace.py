"""This module runs ``lakeckpt doctor --trace SECONDS``: it prints what the kernel sees, one JSON line an event.

Exit status 0: the scripts ran, or cannot run here, which stderr says. The module starts no threads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

from lakeckpt.errors import ConfigError
from lakeckpt.watch.system.kernel import READY, SCRIPTS, missing, trace

__all__ = ["add_arguments", "run"]

_DEFAULT = ("signals", "blocked")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a trace."""
    group = parser.add_argument_group("with --trace")
    group.add_argument(
        "--script",
        choices=SCRIPTS,
        action="append",
        help=f"what to print; may be given several times (default: {' and '.join(_DEFAULT)})",
    )


def run(args: argparse.Namespace) -> int:
    """Print events. Returns 0."""
    if not 0 < args.trace < 86_400:
        raise ConfigError(f"--trace must be above 0 and at most a day, got {args.trace:g}")
    if why := missing():
        print(f"not traced: {why}", file=sys.stderr)
        return 0
    scripts = tuple(dict.fromkeys(args.script or _DEFAULT))
    for event in trace(scripts, args.trace):
        if event.kind == READY:
            print("ready", file=sys.stderr, flush=True)
        else:
            print(json.dumps({"at": round(time.time(), 3), **asdict(event)}), flush=True)
    return 0
