"""``lakeckpt``: which command was asked for, and what does the user see when it fails?

Each command is a module with ``add_arguments(parser)`` and ``run(args) -> int``. Nothing heavy is imported before one
runs, and no command but ``demo`` and ``convert`` loads torch. Our own errors, and the operating system's (a full
disk, a folder that may not be written), become one message and exit status 2 (with ``--json``: a JSON document with
``error``), as 1 is an answer of some commands; a defect keeps its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence

import lakeckpt
from lakeckpt.cli.streams import drop_output, escaping
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
    "rollback": "go back to an earlier checkpoint: the next restore goes on from there",
    "doctor": "what runs keep in this node's memory, and what is left of those that ended badly",
    "audit": "prove that every row was consumed exactly once, or name those that were not",
}
_ABOUT = "Resume training on a data lake, exactly: every row counts once per epoch, whatever crashes."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; ``argv`` without the program's name (None: of the process). Returns the exit status."""
    with escaping():
        try:
            args = _parse(sys.argv[1:] if argv is None else list(argv))
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 2
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    as_json = getattr(args, "json", False)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except LakeckptError as error:
        if args.debug:
            raise
        return _told(error.kind, error, as_json=as_json)
    except BrokenPipeError:  # whoever read our output has enough
        drop_output()
        return 2
    except OSError as error:
        if args.debug:
            raise
        return _told("os_error", error, as_json=as_json)
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


def _told(kind: str, error: Exception, *, as_json: bool) -> int:
    """Tell an error, where that can be written; its exit status."""
    try:
        if as_json:
            from lakeckpt.cli.output import print_json

            print_json({"error": {"kind": kind, "message": str(error)}})
        sys.stdout.flush()
    except OSError:
        as_json = False
        drop_output()
    if not as_json:
        with contextlib.suppress(OSError):
            print(f"lakeckpt: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
