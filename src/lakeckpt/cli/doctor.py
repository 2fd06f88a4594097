"""This module runs ``lakeckpt doctor``, which lists and removes what runs keep in this node's memory.

Exit status 0: nothing is left, or it was reclaimed; 1: something is left.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lakeckpt.checkpoint.agent.generations import digest_of_run
from lakeckpt.checkpoint.agent.leftovers import KeptArena, kept_in, left_logs, reclaim, remove_log
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.persist.history import read_history
from lakeckpt.cli.output import TextTable, format_bytes, format_count, print_json
from lakeckpt.cli.run_arguments import options_of
from lakeckpt.errors import CheckpointNotFound, ConfigError
from lakeckpt.lake.storage.base import describe
from lakeckpt.lake.storage.open import open_storage

__all__ = ["add_arguments", "run"]

_Named = Mapping[str | None, tuple[str, int | None]]
"""By the digest of a run that the user named: its place, and the step of its newest checkpoint."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt doctor``."""
    parser.add_argument("places", nargs="*", metavar="RUN", help="where its checkpoints are: look at these runs only")
    parser.add_argument("--arenas", metavar="FOLDER", help="the folder of the arenas; default: this user's in /dev/shm")
    parser.add_argument("--reclaim", action="store_true", help="remove what is left; nothing that is in use")
    parser.add_argument("--storage-options", metavar="JSON", help="for the store of RUN, as fsspec takes them")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def run(args: argparse.Namespace) -> int:
    """List the arenas, reclaim them if asked to, and print. Returns the exit status."""
    named = _named(args.places, options_of(args.storage_options))
    if args.arenas is not None and not os.path.isdir(args.arenas):
        raise ConfigError(f"there is no folder {args.arenas!r}: name the one given as arenas=, or leave --arenas out")
    folder = ArenaFolder(args.arenas)
    found = [one for one in kept_in(folder) if not args.places or one.digest in named]
    paths = [path for digest, path in left_logs(folder) if not args.places or digest in named]
    gone = reclaim(folder, found) if args.reclaim else set()
    for path in paths if args.reclaim else ():
        remove_log(path)
    arenas = [_plain(one, named, gone) for one in found]
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


def _named(places: Sequence[str], options: Mapping[str, Any] | None) -> _Named:
    """Return the runs at ``places``. `CheckpointNotFound` if there is no run at a place."""
    found: dict[str | None, tuple[str, int | None]] = {}
    for place in places:
        storage = open_storage(place, storage_options=options)
        history = read_history(storage)
        if history.run is None:
            raise CheckpointNotFound(f"there is no run at {describe(storage)}: name the place of a run")
        step = None if history.tip is None else history.tip.step
        found[digest_of_run(history.run, storage).hex()] = describe(storage), step
    return found


def _plain(one: KeptArena, named: _Named, gone: set[str]) -> dict[str, Any]:
    """Return an arena as JSON-able values."""
    place, in_storage = named.get(one.digest, (None, None))
    return {
        "run": one.digest,
        "place": place,
        "in_storage": in_storage,
        "name": one.info.name,
        "rank": None if one.info.identity is None else one.info.identity.rank,
        "world_size": None if one.info.identity is None else one.info.identity.world,
        "size_bytes": one.info.size_bytes,
        "steps": list(one.info.steps),
        "agents": list(one.agents),
        "use": "removed" if one.info.name in gone else one.use,
        "problem": one.info.problem,
    }


def _show(folder: str, arenas: Sequence[Mapping[str, Any]]) -> None:
    print(f"{folder}  {_sum_of(arenas)}")
    table = TextTable("run", ">rank", ">size", ">newest step", ">in storage", ">agent", "use")
    for one in arenas:
        table.add_row(
            one["place"] or (one["run"] or "?")[:8],
            "?" if one["rank"] is None else f"{one['rank']} of {one['world_size']}",
            format_bytes(one["size_bytes"]),
            one["steps"][0] if one["steps"] else "-",
            "-" if one["in_storage"] is None else one["in_storage"],
            ", ".join(map(str, one["agents"])) or "-",
            one["use"],
        )
    if arenas:
        print(table)
    for one in arenas:
        if one["problem"] is not None:
            print(f"✗ {one['problem']}")


def _advise(folder: str, left: Sequence[Mapping[str, Any]], logs: int) -> None:
    """Print what is left of runs that have ended, and the command that removes it."""
    if not left and not logs:
        print("CLEAN  nothing is left of runs that have ended")
        return
    print(f"left  {_sum_of(left)} and {format_count(logs, 'log')} of agents that have ended")
    print("A job that is started again here may go on from a cut in memory. Where no job will be started again:")
    where = "" if folder == ArenaFolder().path else f" --arenas {shlex.quote(folder)}"
    print(f"  lakeckpt doctor{where} --reclaim")


def _sum_of(arenas: Sequence[Mapping[str, Any]]) -> str:
    return f"{format_count(len(arenas), 'arena')} ({format_bytes(sum(one['size_bytes'] for one in arenas))})"
