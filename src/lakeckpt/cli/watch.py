"""This module runs ``lakeckpt watch RUN``: where the ranks of this node are, which are slow, and the newest stall."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import Any

from lakeckpt.checkpoint.agent.generations import digest_of_run
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.faults.notes import living_pages
from lakeckpt.checkpoint.faults.records import slow_of, stalls_of
from lakeckpt.checkpoint.ledger.audit import read_run
from lakeckpt.cli.output import TextTable, print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run
from lakeckpt.errors import CheckpointNotFound
from lakeckpt.watch.beat import Page, process_state
from lakeckpt.watch.slow import SlowRank

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt watch``."""
    add_run_arguments(parser)
    parser.add_argument("--arenas", metavar="FOLDER", default=None, help="where captures lie, if not in /dev/shm")
    parser.add_argument(
        "--every", type=float, metavar="SECONDS", default=0.0, help="print again and again (default: once)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the ranks of this node. Returns 0, or 1 if none of them trains here."""
    storage, place = open_run(args)
    history = read_run(storage)
    if not history.begins:
        raise CheckpointNotFound(f"no attempt has begun at {place}")
    digest = digest_of_run(history.begins[-1].run, storage)
    folder = ArenaFolder(args.arenas).path
    while True:
        pages = living_pages(folder, digest)
        stalls = [one for _, one in stalls_of(storage)][-1:]
        slow = slow_of(storage, history.begins[-1].attempt)
        if args.json:
            found = {"slow": [_slow(one) for one in slow], "stall": [one.verdict.reason for one in stalls]}
            print_json({"ranks": [_facts(page) for page in pages], **found})
        else:
            print(f"{place}: {len(pages)} ranks train on {os.uname().nodename}\n{_table(pages) if pages else ''}")
            for rank in slow:
                print(f"Slow: {rank}")
            for one in stalls:
                over = (
                    "over" if one.ended_s else "the ranks were killed" if one.acted else "not over, as far as is known"
                )
                print(f"Newest stall, after step {one.step}: {one.verdict.reason} ({over})")
        if not args.every or not pages:
            return int(not pages)
        time.sleep(args.every)


def _facts(page: Page) -> Mapping[str, Any]:
    return {
        "rank": page.rank,
        "pid": page.pid,
        "step": page.step,
        "doing": page.doing,
        "for_s": round(time.monotonic() - page.since_s, 3),
        "state": process_state(page.pid),
        "batches": page.batches,
        "reader": page.reader,
        "step_s": round(page.step_s, 4),
        "spent_s": {phase: round(seconds, 3) for phase, seconds in page.spent_s.items() if seconds},
    }


def _slow(one: SlowRank) -> Mapping[str, Any]:
    return {
        "rank": one.rank,
        "node": one.node,
        "step": one.step,
        "phase": one.phase,
        "own_s": round(one.own_s, 4),
        "peers_s": round(one.peers_s, 4),
        "trend": one.trend,
        "at": round(one.at_s, 3),
        "over": one.is_over,
    }


def _table(pages: list[Page]) -> TextTable:
    table = TextTable(
        ">rank", ">process", "state", ">step", "doing", ">for", ">s a step", ">micro-batches", "reader", "time by phase"
    )
    for page in pages:
        total = sum(page.spent_s.values()) or 1.0
        parts = {phase: seconds / total for phase, seconds in page.spent_s.items() if seconds > 0.01 * total}
        table.add_row(
            page.rank,
            page.pid,
            process_state(page.pid),
            page.step,
            page.doing,
            f"{time.monotonic() - page.since_s:.1f} s",
            f"{page.step_s:.3f}",
            page.batches,
            page.reader,
            ", ".join(f"{phase} {100 * part:.0f} %" for phase, part in parts.items()),
        )
    return table
