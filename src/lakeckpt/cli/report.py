"""This module runs ``lakeckpt report RUN``: it shows where each rank was idle, and which bytes moved in its bubbles."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lakeckpt.cli.output import TextTable, add_run_arguments, options_of, print_json, say_bytes, say_many
from lakeckpt.errors import CheckpointNotFound, ConfigError

if TYPE_CHECKING:
    from lakeckpt.checkpoint.bubbles.profile import BubbleProfile

__all__ = ["add_arguments", "overview", "run", "trace_of"]

_SITES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt report``."""
    add_run_arguments(parser)
    parser.add_argument("--attempt", type=int, help="of which attempt; default: the newest that has a profile")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--all", action="store_true", help="every place where ranks wait, not only the longest")


def run(args: argparse.Namespace) -> int:
    """Report and print. Returns 0. `CheckpointNotFound` if there is no run."""
    from lakeckpt.checkpoint.bubbles.profile import read_profiles
    from lakeckpt.checkpoint.persist.log import list_slots
    from lakeckpt.lake.storage.base import describe
    from lakeckpt.lake.storage.open import open_storage

    storage = open_storage(args.place, storage_options=options_of(args.storage_options))
    profiles = read_profiles(storage, args.attempt)
    if not profiles and not list_slots(storage):
        raise CheckpointNotFound(f"there is no run at {describe(storage)}: name the place of a run")
    if args.trace is not None and profiles:
        try:
            args.trace.write_text(json.dumps(trace_of(profiles)), "utf-8")
        except OSError as error:
            raise ConfigError(f"the trace cannot be written to {str(args.trace)!r}: {error.strerror}") from error
    if args.json:
        print_json(overview(profiles))
    elif not profiles:
        print(f"{describe(storage)}  no profile of idle windows was saved here")
    else:
        _show(overview(profiles), describe(storage), sites=10**9 if args.all else _SITES)
    return 0


def overview(profiles: Sequence[BubbleProfile]) -> dict[str, Any]:
    """Return the output of ``report`` as JSON-able values; times are seconds, per iteration."""
    return {
        "attempt": profiles[0].attempt if profiles else None,
        "world_size": profiles[0].world_size if profiles else None,
        "ranks": [_rank(profile) for profile in profiles],
    }


def _rank(profile: BubbleProfile) -> dict[str, Any]:
    from lakeckpt.checkpoint.bubbles.profile import shares, windows_by_site

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


def trace_of(profiles: Sequence[BubbleProfile]) -> dict[str, Any]:
    """Return a trace in the Trace Event Format of the Chromium project: one process for each rank, on one clock."""
    begins = [profile.epoch_s + one.begin_s for profile in profiles for one in profile.records]
    events = [
        {
            "ph": "X",
            "pid": profile.rank,
            "tid": line,
            "name": name,
            "ts": round((profile.epoch_s + begin_s - min(begins)) * 1e6, 3),
            "dur": round((end_s - begin_s) * 1e6, 3),
            "args": args,
        }
        for profile in profiles
        for line, name, begin_s, end_s, args in _spans(profile)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _spans(profile: BubbleProfile) -> Iterator[tuple[str, str, float, float, dict[str, object]]]:
    """Yield (line, name, begin, end, details) for each window, slice and iteration of a rank."""
    for record in profile.records:
        yield "iterations", f"after step {record.step}", record.begin_s, record.end_s, {}
        for window in record.windows:
            yield window.kind, window.site, window.begin_s, window.end_s, {}
        for one in record.slices:
            details: dict[str, object] = {"size_bytes": one.size_bytes, "at_the_fence": one.urgent}
            yield "slices", "slice", one.begin_s, one.end_s, details


def _show(plain: dict[str, Any], place: str, *, sites: int) -> None:
    print(f"{place}  attempt {plain['attempt']}, {say_many(plain['world_size'], 'rank')}")
    times = (">rank", ">iterations", ">each", ">bubbles")
    table = TextTable(*times, ">moved", ">in bubbles", ">free time", ">outside", ">at the fence")
    for one in plain["ranks"]:
        moved = one["moved_bytes"]
        parts = ("in_bubbles_bytes", "in_free_time_bytes", "outside_bytes", "at_the_fence_bytes")
        table.add_row(
            str(one["rank"]),
            f"{one['iterations']:,}",
            _milliseconds(one["iteration_s"]),
            _milliseconds(one["bubble_s"]),
            say_bytes(moved),
            *(f"{one[name] / moved:.1%}" if moved else "-" for name in parts),
        )
    print(table)
    for one in plain["ranks"]:
        shown = TextTable("site", "kind", ">times", ">mean", ">moved", title=f"rank {one['rank']}")
        for site in one["sites"][:sites]:
            mean, moved = _milliseconds(site["mean_s"]), say_bytes(site["moved_bytes"])
            shown.add_row(site["site"], site["kind"], f"{site['times']:,}", mean, moved)
        print()
        print(shown)
        if len(one["sites"]) > sites:
            print(f"… {len(one['sites']) - sites} more (--all)")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"
