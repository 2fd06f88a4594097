"""``lakeckpt``: which command was asked for, and what does the user see when it fails?

Each command is a module with ``add_arguments(parser)`` and ``run(args) -> int``. Nothing heavy is imported before one
runs, and no command but ``demo`` and ``convert`` loads torch. Our own errors become one message and exit status 2 (with
``--json``: a JSON document with ``error``); a defect keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import lakeckpt
from lakeckpt.errors import LakeckptError

__all__ = ["main"]

_COMMANDS = {
    "demo": "train a small GPT while processes are killed, and count every row",
    "plan": "what reading a table will take: lanes, steps, memory",
    "digest": "record what the bytes of a table are, where its files have no checksums",
    "inspect": "the checkpoints of a run, its attempts, and where its readers are",
    "verify": "read every byte of a run's checkpoints and compare the checksums",
    "explain": "which rows made an optimizer step",
    "convert": "a checkpoint of torch's DCP, of safetensors or of a run becomes one of another form",
    "report": "where ranks were idle, and what of the captures moved in their bubbles",
    "doctor": "what runs keep in this node's memory, and what is left of those that ended badly",
    "audit": "prove that every row was consumed exactly once, or name those that were not",
}
_ABOUT = "Resume training on a data lake, exactly: every row counts once per epoch, whatever crashes."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; ``argv`` without the program's name (None: of the process). Returns the exit status."""
    try:
        args = _parse(sys.argv[1:] if argv is None else list(argv))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except LakeckptError as error:
        if args.debug:
            raise
        _tell(error, as_json=getattr(args, "json", False))
        return 2
    except BrokenPipeError:
        # Whoever read our output has enough. Nothing more may be written, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lakeckpt", description=_ABOUT)
    parser.add_argument("--version", action="version", version=f"lakeckpt {lakeckpt.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, about in _COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name == asked:
            module = importlib.import_module(f"lakeckpt.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser.parse_args(argv)


def _tell(error: LakeckptError, *, as_json: bool) -> None:
    if as_json:
        from lakeckpt.cli.output import print_json

        print_json({"error": {"kind": error.kind, "message": str(error)}})
    else:
        print(f"lakeckpt: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
