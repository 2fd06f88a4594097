"""This module runs ``lakeckpt doctor``, which looks after a node: what runs keep in its memory, and its health.

Without an option the command lists what runs keep. ``--reclaim`` removes what runs that have ended left. ``--forget
RUN`` removes all that this node knows of one run, so that a job finds its place new: arenas, logs of agents, and the
marker of a launcher's job. ``--node`` checks the node (`lakeckpt.cli.node.command`), and ``--trace`` prints events of
its kernel (`lakeckpt.cli.node.trace`); these two have exit statuses of their own.

Exit status 0: nothing is left, or it was removed; 1: something is left.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lakeckpt.checkpoint.agent.generations import digest_of_place
from lakeckpt.checkpoint.agent.leftovers import KeptArena, kept_in, left_logs, reclaim, remove_log
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.markers import remove_marker
from lakeckpt.checkpoint.faults.notes import remove_notes
from lakeckpt.cli.node import command, trace
from lakeckpt.cli.output import TextTable, format_bytes, format_count, print_json
from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.base import describe
from lakeckpt.lake.storage.open import open_storage

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt doctor``."""
    parser.add_argument("--arenas", metavar="FOLDER", help="the folder of the arenas; default: this user's in /dev/shm")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--reclaim", action="store_true", help="remove what is left; nothing that is in use")
    what.add_argument("--forget", metavar="RUN", help="remove what is left of this run only: a folder, or a URL")
    what.add_argument("--node", action="store_true", help="check this node; exit status 75: a job should avoid it")
    what.add_argument("--trace", type=float, metavar="SECONDS", help="print events of the kernel, as root, by bpftrace")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")
    command.add_arguments(parser)
    trace.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """List the arenas, reclaim them if asked to, and print. Returns the exit status."""
    if args.node:
        return command.run(args)
    if args.trace is not None:
        return trace.run(args)
    if args.arenas is not None and not os.path.isdir(args.arenas):
        raise ConfigError(f"there is no folder {args.arenas!r}: name the one given as arenas=, or leave --arenas out")
    folder = ArenaFolder(args.arenas)
    if args.forget is not None:
        return _forget(folder, args.forget, as_json=args.json)
    found, paths = kept_in(folder), left_logs(folder)
    gone = reclaim(folder, found) if args.reclaim else set()
    for path in paths if args.reclaim else ():
        remove_log(path)
    arenas = [_plain(one, gone) for one in found]
    left = [one for one in arenas if one["use"] in ("left", "damaged")]
    logs = len(paths)
    if args.json:
        print_json({"folder": folder.path, "arenas": arenas, "logs": logs})
    else:
        _show(folder.path, arenas)
        if args.reclaim:
            removed = [one for one in arenas if one["use"] == "removed"]
            print(f"removed {_sum_of(removed)} and {format_count(logs, 'log')} of agents that had ended")
        else:
            _advise(folder.path, left, logs)
    return int(bool(left or (logs and not args.reclaim)))


def _forget(folder: ArenaFolder, run: str, *, as_json: bool) -> int:
    """Remove what this node knows of a run, and print it. Returns the exit status."""
    storage = open_storage(run)
    place = digest_of_place(storage)
    found = [one for one in kept_in(folder) if one.info.name.startswith(place.hex())]
    gone = reclaim(folder, found)
    logs = [path for path in left_logs(folder) if os.path.basename(path).startswith(place.hex())]
    for path in logs:
        remove_log(path)
    had_marker = remove_marker(folder, place)
    remove_notes(folder.path, place)
    arenas = [_plain(one, gone) for one in found]
    removed = [one for one in arenas if one["use"] == "removed"]
    if as_json:
        print_json({"folder": folder.path, "arenas": arenas, "logs": len(logs), "marker": had_marker})
        return int(len(removed) < len(arenas))
    parts = f"{_sum_of(removed)}, {format_count(len(logs), 'log')} of agents and {format_count(had_marker, 'marker')}"
    print(f"forgot {describe(storage)}  removed {parts}")
    for one in arenas:
        if one["use"] != "removed":
            print(f"✗ {one['name']} stays, as it is in use ({one['use']}): end its job first, and run this again")
    return int(len(removed) < len(arenas))


def _plain(one: KeptArena, gone: set[str]) -> dict[str, Any]:
    """Return an arena as JSON-able values."""
    identity = one.info.identity
    return {
        "run": None if identity is None else identity.run.hex(),
        "name": one.info.name,
        "rank": None if identity is None else identity.rank,
        "world_size": None if identity is None else identity.world,
        "kind": None if identity is None else identity.kind,
        "size_bytes": one.info.size_bytes,
        "steps": list(one.info.steps),
        "agents": list(one.agents),
        "use": "removed" if one.info.name in gone else one.use,
        "problem": one.info.problem,
    }


def _show(folder: str, arenas: Sequence[Mapping[str, Any]]) -> None:
    print(f"{folder}  {_sum_of(arenas)}")
    table = TextTable("run", ">rank", ">size", ">newest step", ">agent", "use")
    for one in arenas:
        table.add_row(
            (one["run"] or "?")[:8],
            _rank_of(one),
            format_bytes(one["size_bytes"]),
            one["steps"][0] if one["steps"] else "-",
            ", ".join(map(str, one["agents"])) or "-",
            one["use"],
        )
    if arenas:
        print(table)
    for one in arenas:
        if one["problem"] is not None:
            print(f"✗ {one['problem']}")


def _rank_of(one: Mapping[str, Any]) -> str:
    """Return whose share an arena holds, and how it came here if it was captured on another node."""
    if one["rank"] is None:
        return "?"
    kind = {"copy": "a copy of ", "documents": "documents of ", "parity": "parity at "}.get(one["kind"], "")
    return f"{kind}{one['rank']} of {one['world_size']}"


def _advise(folder: str, left: Sequence[Mapping[str, Any]], logs: int) -> None:
    """Print what is left of runs that have ended, and the command that removes it."""
    if not left and not logs:
        print("CLEAN  nothing is left of runs that have ended")
        return
    print(f"left  {_sum_of(left)} and {format_count(logs, 'log')} of agents that have ended")
    if any(one["steps"] for one in left):
        print("A job that is started again here may go on from a cut in memory. If no job will be started again:")
    where = "" if folder == ArenaFolder().path else f" --arenas {shlex.quote(folder)}"
    print(f"  lakeckpt doctor{where} --reclaim")


def _sum_of(arenas: Sequence[Mapping[str, Any]]) -> str:
    return f"{format_count(len(arenas), 'arena')} ({format_bytes(sum(one['size_bytes'] for one in arenas))})"
