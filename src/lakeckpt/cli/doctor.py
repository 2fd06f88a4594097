"""This module runs ``lakeckpt doctor``, which lists and removes what runs keep in this node's memory.

Exit status 0: nothing is left, or it was reclaimed; 1: something is left.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lakeckpt.cli.output import (
    TextTable,
    options_of,
    print_json,
    say_bytes,
    say_many,
)
from lakeckpt.errors import CheckpointNotFound, ConfigError

if TYPE_CHECKING:
    from lakeckpt.checkpoint.agent.leftovers import KeptArena, KeptRun

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt doctor``."""
    parser.add_argument("places", nargs="*", metavar="RUN", help="where its checkpoints are: look at these runs only")
    parser.add_argument("--arenas", metavar="FOLDER", help="the folder of the arenas; default: this user's in /dev/shm")
    parser.add_argument("--reclaim", action="store_true", help="remove what is left; nothing that is in use")
    parser.add_argument("--storage-options", metavar="JSON", help="for the store of RUN, as fsspec takes them")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A run that the user named: its place, and the step of its newest checkpoint."""

    place: str
    step: int | None


def run(args: argparse.Namespace) -> int:
    """List the arenas, reclaim them if asked to, and print. Returns the exit status."""
    from lakeckpt.checkpoint.agent.leftovers import kept_in, reclaim
    from lakeckpt.checkpoint.arena.folder import ArenaFolder

    known = _known(args.places, options_of(args.storage_options))
    if args.arenas is not None and not os.path.isdir(args.arenas):
        raise ConfigError(f"there is no folder {args.arenas!r}: name the one given as arenas=, or leave --arenas out")
    folder = ArenaFolder(args.arenas)
    found = [one for one in kept_in(folder) if not args.places or one.digest in known]
    gone = {info.name for one in found if args.reclaim for info in reclaim(folder, one)}
    stays = args.reclaim and any(arena.info.name not in gone for one in found for arena in one.left)
    is_left = stays or (not args.reclaim and any(one.left or one.logs for one in found))
    if args.json:
        print_json(
            {
                "folder": folder.path,
                "runs": [_plain(one, known) for one in found],
                "left_bytes": sum(arena.info.size_bytes for one in found for arena in one.left),
                "reclaimed": sorted(gone),
            }
        )
    else:
        _show(folder.path, found, known, gone=gone if args.reclaim else None)
    return int(is_left)


def _known(places: Sequence[str], options: Mapping[str, Any] | None) -> dict[str | None, _Known]:
    """Return the runs at ``places``, by their digests. `CheckpointNotFound` if there is no run at a place."""
    from lakeckpt.checkpoint.agent.generations import digest_of_run
    from lakeckpt.checkpoint.persist.history import read_history
    from lakeckpt.lake.storage.base import describe
    from lakeckpt.lake.storage.open import open_storage

    found: dict[str | None, _Known] = {}
    for place in places:
        storage = open_storage(place, storage_options=options)
        history = read_history(storage)
        if history.run is None:
            raise CheckpointNotFound(f"there is no run at {describe(storage)}: name the place of a run")
        step = None if history.tip is None else history.tip.step
        found[digest_of_run(history.run, storage).hex()] = _Known(place=describe(storage), step=step)
    return found


def _plain(kept: KeptRun, known: Mapping[str | None, _Known]) -> dict[str, Any]:
    place = known.get(kept.digest)
    return {
        "run": kept.digest,
        "place": None if place is None else place.place,
        "in_storage": None if place is None else place.step,
        "logs": list(kept.logs),
        "arenas": [_plain_arena(one) for one in kept.arenas],
    }


def _plain_arena(kept: KeptArena) -> dict[str, Any]:
    info = kept.info
    return {
        "name": info.name,
        "rank": None if info.identity is None else info.identity.rank,
        "world_size": None if info.identity is None else info.identity.world,
        "size_bytes": info.size_bytes,
        "steps": list(info.steps),
        "use": kept.use,
        "agents": list(kept.agents),
        "problem": info.problem,
    }


def _show(
    folder: str,
    found: Sequence[KeptRun],
    known: Mapping[str | None, _Known],
    *,
    gone: set[str] | None,
) -> None:
    from lakeckpt.checkpoint.arena.folder import ArenaFolder

    arenas = [(one, arena) for one in found for arena in one.arenas]
    size = say_bytes(sum(arena.info.size_bytes for _, arena in arenas))
    print(f"{folder}  {say_many(len(arenas), 'arena')} ({size})")
    if arenas:
        table = TextTable("run", ">rank", ">size", ">newest step", ">in storage", ">agent", "use")
        for kept, arena in arenas:
            table.add_row(*_row(kept, arena, known.get(kept.digest), gone or ()))
        print(table)
    for _, arena in arenas:
        if arena.info.problem is not None:
            print(f"✗ {arena.info.problem}")
    left = [arena.info for _, arena in arenas if arena.is_left]
    logs = sum(len(one.logs) for one in found)
    if gone is not None:
        removed = sum(info.size_bytes for info in left if info.name in gone)
        what = f"{say_many(len(gone), 'arena')} ({say_bytes(removed)}) and {say_many(logs, 'log')} of agents"
        print(f"removed {what} that had ended")
    elif left or logs:
        what = f"{say_many(len(left), 'arena')} ({say_bytes(sum(one.size_bytes for one in left))})"
        print(f"left  {what} and {say_many(logs, 'log')} of agents that have ended")
        print("A job that is started again here may go on from a cut in memory. Where none will be:")
        where = "" if folder == ArenaFolder().path else f" --arenas {shlex.quote(folder)}"
        print(f"  lakeckpt doctor{where} --reclaim")
    else:
        print("CLEAN  nothing is left of runs that have ended")


def _row(kept: KeptRun, arena: KeptArena, known: _Known | None, gone: set[str] | tuple[()]) -> list[str]:
    info = arena.info
    whose = "?" if info.identity is None else f"{info.identity.rank} of {info.identity.world}"
    use = "removed" if info.name in gone else arena.use
    return [
        known.place if known is not None else (kept.digest or "?")[:8],
        whose,
        say_bytes(info.size_bytes),
        f"{info.steps[0]:,}" if info.steps else "-",
        "-" if known is None or known.step is None else f"{known.step:,}",
        ", ".join(map(str, arena.agents)) or "-",
        use,
    ]
