"""This module runs ``lakeckpt report RUN``: it shows where each rank was idle, and which bytes moved in its bubbles."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lakeckpt.checkpoint.bubbles.profile import BubbleProfile, read_profiles, shares, windows_by_site
from lakeckpt.checkpoint.persist.log import list_slots
from lakeckpt.cli.output import TextTable, format_bytes, format_count, print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run
from lakeckpt.errors import CheckpointNotFound

__all__ = ["add_arguments", "run"]

_SITES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt report``."""
    add_run_arguments(parser)
    parser.add_argument("--attempt", type=int, help="of which attempt; default: the newest that has a profile")
    parser.add_argument("--all", action="store_true", help="every place where ranks wait, not only the longest")


def run(args: argparse.Namespace) -> int:
    """Report and print. Returns 0. `CheckpointNotFound` if there is no run."""
    storage, place = open_run(args)
    profiles = read_profiles(storage, args.attempt)
    if not profiles and not list_slots(storage):
        raise CheckpointNotFound(f"there is no run at {place}: name the place of a run")
    plain = _overview(profiles)
    if args.json:
        print_json(plain)
    elif not profiles:
        print(f"{place}  no profile: the run had no bubbles=")
    else:
        _show(plain, place, sites=10**9 if args.all else _SITES)
    return 0


def _overview(profiles: Sequence[BubbleProfile]) -> dict[str, Any]:
    """Return the output of ``report`` as JSON-able values; times are seconds, per iteration."""
    return {
        "attempt": profiles[0].attempt if profiles else None,
        "world_size": profiles[0].world_size if profiles else None,
        "ranks": [_rank(profile) for profile in profiles],
    }


def _rank(profile: BubbleProfile) -> dict[str, Any]:
    found = shares(profile.records)
    each = max(1, found.iterations)
    sites = [
        {"site": site, "kind": kind, "times": times, "mean_s": seconds / times, "moved_bytes": round(moved)}
        for (site, kind), (times, seconds, moved) in windows_by_site(profile.records).items()
    ]
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
        "sites": sorted(sites, key=lambda one: -float(one["mean_s"]) * int(one["times"])),
    }


def _show(plain: dict[str, Any], place: str, *, sites: int) -> None:
    print(f"{place}  attempt {plain['attempt']}, {format_count(plain['world_size'], 'rank')}")
    times = (">rank", ">iterations", ">each", ">bubbles")
    table = TextTable(*times, ">moved", ">in bubbles", ">free time", ">outside", ">at the fence")
    for one in plain["ranks"]:
        moved = one["moved_bytes"]
        parts = ("in_bubbles_bytes", "in_free_time_bytes", "outside_bytes", "at_the_fence_bytes")
        table.add_row(
            one["rank"],
            one["iterations"],
            _milliseconds(one["iteration_s"]),
            _milliseconds(one["bubble_s"]),
            format_bytes(moved),
            *(f"{one[name] / moved:.1%}" if moved else "-" for name in parts),
        )
    print(table)
    for one in plain["ranks"]:
        shown = TextTable("site", "kind", ">times", ">mean", ">moved", title=f"rank {one['rank']}")
        for site in one["sites"][:sites]:
            mean, moved = _milliseconds(site["mean_s"]), format_bytes(site["moved_bytes"])
            shown.add_row(site["site"], site["kind"], site["times"], mean, moved)
        print()
        print(shown)
        if len(one["sites"]) > sites:
            print(f"… {len(one['sites']) - sites} more (--all)")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"
