"""``lakeckpt report RUN``: where each rank was idle, and how much of what was captured moved in its bubbles."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lakeckpt.cli.output import (
    TextTable,
    add_run_arguments,
    options_of,
    print_json,
    say_bytes,
    say_many,
)
from lakeckpt.errors import CheckpointNotFound, ConfigError

if TYPE_CHECKING:
    from lakeckpt.checkpoint.bubbles.profile import BubbleProfile

__all__ = ["add_arguments", "overview", "run"]

_SITES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``lakeckpt report``."""
    add_run_arguments(parser)
    parser.add_argument("--attempt", type=int, help="of which attempt; default: the newest that has a profile")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--all", action="store_true", help="every place where ranks wait, not only the longest")


def run(args: argparse.Namespace) -> int:
    """Report and print; 0, whatever was found. `CheckpointNotFound` where there is no run."""
    from lakeckpt.checkpoint.bubbles.profile import read_profiles
    from lakeckpt.checkpoint.log import list_slots
    from lakeckpt.lake.storage import describe, open_storage

    storage = open_storage(args.place, storage_options=options_of(args.storage_options))
    profiles = read_profiles(storage, args.attempt)
    if not profiles and not list_slots(storage):
        raise CheckpointNotFound(f"there is no run at {describe(storage)}: name the place of a run")
    if args.trace is not None and profiles:
        _write_trace(args.trace, profiles)
    plain = overview(profiles)
    if args.json:
        print_json(plain)
    elif not profiles:
        untraced = "" if args.trace is None else f", so that {args.trace} was not written"
        print(f"{describe(storage)}  no profile of idle windows was saved here{untraced}")
    else:
        _show(plain, describe(storage), sites=10**9 if args.all else _SITES)
    return 0


def overview(profiles: Sequence[BubbleProfile]) -> dict[str, Any]:
    """All that ``report`` says, as JSON-able values; times are seconds, per iteration."""
    return {
        "attempt": profiles[0].attempt if profiles else None,
        "world_size": profiles[0].world_size if profiles else None,
        "ranks": [_rank(profile) for profile in profiles],
    }


def _rank(profile: BubbleProfile) -> dict[str, Any]:
    from lakeckpt.core.bubble_record import shares

    found = shares(profile.records)
    each = max(1, found.iterations)
    return {
        "rank": profile.rank,
        "steps": [profile.records[0].step, profile.records[-1].step] if profile.records else None,
        "iterations": found.iterations,
        "iteration_s": found.seconds / each,
        "bubble_s": found.bubble_s / each,
        "moved_bytes": found.moved_bytes,
        "in_bubbles_bytes": round(found.bubble_bytes),
        "in_free_time_bytes": round(found.free_bytes),
        "outside_bytes": round(found.outside_bytes),
        "at_the_fence_bytes": found.urgent_bytes,
        "in_bubbles_share": found.bubble_share,
        "sites": _sites(profile),
    }


def _sites(profile: BubbleProfile) -> list[dict[str, Any]]:
    """Where the rank waits, the longest in all first, and what moved there."""
    from lakeckpt.core.bubble_record import windows_by_site

    sites = [
        {"site": site, "kind": kind, "times": times, "mean_s": seconds / times, "moved_bytes": round(moved)}
        for (site, kind), (times, seconds, moved) in windows_by_site(profile.records).items()
    ]
    return sorted(sites, key=lambda one: -float(one["mean_s"]) * int(one["times"]))


def _write_trace(path: Path, profiles: Sequence[BubbleProfile]) -> None:
    from lakeckpt.checkpoint.bubbles.trace import trace_of

    try:
        path.write_text(json.dumps(trace_of(profiles)), "utf-8")
    except OSError as error:
        raise ConfigError(f"the trace cannot be written to {str(path)!r}: {error.strerror}") from error


def _show(plain: dict[str, Any], place: str, *, sites: int) -> None:
    world = say_many(plain["world_size"], "rank")
    print(f"{place}  attempt {plain['attempt']}, {world}")
    times = (">rank", ">iterations", ">each", ">bubbles")
    table = TextTable(*times, ">moved", ">in bubbles", ">free time", ">outside", ">at the fence")
    for one in plain["ranks"]:
        moved = max(1, one["moved_bytes"])
        parts = [one[name] / moved for name in ("in_free_time_bytes", "outside_bytes", "at_the_fence_bytes")]
        table.add_row(
            str(one["rank"]),
            f"{one['iterations']:,}",
            _milliseconds(one["iteration_s"]),
            _milliseconds(one["bubble_s"]),
            say_bytes(one["moved_bytes"]),
            f"{one['in_bubbles_share']:.1%}" if one["moved_bytes"] else "-",
            *(f"{part:.1%}" if one["moved_bytes"] else "-" for part in parts),
        )
    print(table)
    for one in plain["ranks"]:
        shown = TextTable("site", "kind", ">times", ">mean", ">moved", title=f"rank {one['rank']}")
        for site in one["sites"][:sites]:
            shown.add_row(
                site["site"],
                site["kind"],
                f"{site['times']:,}",
                _milliseconds(site["mean_s"]),
                say_bytes(site["moved_bytes"]),
            )
        print()
        print(shown)
        if len(one["sites"]) > sites:
            print(f"… {len(one['sites']) - sites} more (--all)")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"
