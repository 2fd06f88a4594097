"""This module runs the commands of ``lakeckpt``.

Each command is a module with ``add_arguments(parser)`` and ``run(args) -> int``. Only the module of the command that
was asked for is imported, and only ``demo`` and ``convert`` import torch. Errors of lakeckpt, and errors of the
operating system (a full disk, a folder without permission), become one message and exit status 2, because 1 is a
regular result of some commands. With ``--json`` the message is a JSON document with ``error``. A defect keeps its
traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
from collections.abc import Sequence

import lakeckpt
from lakeckpt.cli.output import drop_output, print_json
from lakeckpt.errors import LakeckptError

__all__ = ["main"]

_COMMANDS = {
    "run": "start a job's ranks on this node with torchrun's options, and restart them in tenths of a second",
    "demo": "train a small GPT while processes are killed, and count every row",
    "plan": "what reading a table will take: lanes, steps, memory",
    "inspect": "the checkpoints of a run, its attempts, and where its readers are",
    "verify": "read every byte of a run's checkpoints and compare the checksums",
    "explain": "which rows made an optimizer step",
    "explore": "write a page to look at a run in a browser: steps, checkpoints, restarts, rows",
    "convert": "write a checkpoint (of a run, torch.save, safetensors, others) in another format, or as a run",
    "copy": "copy a checkpoint and its history to another place, from which a job can go on",
    "rollback": "go back to an earlier checkpoint: the next restore goes on from there",
    "doctor": "what runs keep in this node's memory, and what ended runs have left there",
    "faults": "why attempts of a run died, what each fault cost, and how much of the time was training",
    "watch": "where the ranks of this node are now, and why they stand still, if they do",
    "audit": "prove that every row was consumed exactly once, or name those that were not",
}
_ELSEWHERE = {
    **{name: f"lakeckpt.cli.writing.{name}" for name in ("convert", "copy", "rollback")},
    "demo": "lakeckpt.demo.demo",
    "explore": "lakeckpt.cli.explore.command",
    "plan": "lakeckpt.cli.plan.command",
}
_ABOUT = "Resume training on a data lake, exactly: every row counts once per epoch, whatever crashes."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; ``argv`` without the program's name (None: of the process). Returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":  # escape what the encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        args = _parse(sys.argv[1:] if argv is None else list(argv))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has left
        drop_output()
        return 2
    except (LakeckptError, OSError) as error:
        if args.debug:
            raise
        return _failed(error, as_json=getattr(args, "json", False))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lakeckpt", description=_ABOUT)
    parser.add_argument("--version", action="version", version=f"lakeckpt {lakeckpt.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in argv if not word.startswith("-")), None)
    if argv[:1] == ["run"]:  # torchrun's own parser reads the rest
        return importlib.import_module("lakeckpt.cli.launch.run").parse(argv[1:])  # type: ignore[no-any-return]
    for name, about in _COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name == asked != "run":
            module = importlib.import_module(_ELSEWHERE.get(name, f"lakeckpt.cli.{name}"))
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser.parse_args(argv)


def _failed(error: LakeckptError | OSError, *, as_json: bool) -> int:
    """Report an error, if the output can be written. Returns the exit status."""
    kind = error.kind if isinstance(error, LakeckptError) else "os_error"
    try:
        if as_json:
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
