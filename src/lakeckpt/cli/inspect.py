"""This module runs ``lakeckpt inspect RUN``: it prints checkpoints, attempts, and the places of readers.

It reads the log, and lists the other files.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import Any

from lakeckpt.checkpoint.consumed.source_records import SourceRecord, readers_in
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.format.register import best_first
from lakeckpt.checkpoint.ledger.audit import read_run
from lakeckpt.checkpoint.ledger.verify import Kept
from lakeckpt.checkpoint.persist.history import History
from lakeckpt.cli.output import TextTable, format_bytes, format_count, format_time, print_json
from lakeckpt.cli.run_arguments import add_run_arguments, open_run
from lakeckpt.core.consumption import consumed
from lakeckpt.errors import StateError
from lakeckpt.progress import progress_bar

__all__ = ["add_arguments", "overview_of", "run"]

_NEWEST = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt inspect``."""
    add_run_arguments(parser)
    parser.add_argument("--all", action="store_true", help="every checkpoint and attempt, not only the newest")


def run(args: argparse.Namespace) -> int:
    """Inspect and print. Returns 0, also if there is damage."""
    storage, place = open_run(args)
    newest = 10**9 if args.json or args.all else _NEWEST
    with progress_bar("log", show=not args.json) as progress:
        history = read_run(storage, progress=progress)
    plain = overview_of(history, Kept(storage), newest=newest)
    if args.json:
        print_json(plain)
    else:
        _show(plain, place, newest=newest)
    return 0


def overview_of(history: History, kept: Kept, *, newest: int) -> dict[str, Any]:
    """Return what ``inspect`` prints, as JSON-able values; checkpoints and attempts are in the order of the log.

    Places of readers are computed for the ``newest`` checkpoints. ``best_slot`` is the slot of the checkpoint with the
    best metric, among the checkpoints of the history that have their data. A metric that is not a finite number is
    null.
    """
    in_history = {manifest.slot for manifest in history.chain}
    manifests = sorted([*history.chain, *history.abandoned], key=lambda one: one.slot)
    files, size_bytes = kept.besides(manifests)
    tip = history.tip
    with_data = [manifest for manifest in history.chain if kept.of(manifest)[0]]
    best = best_first(with_data, "lowest" if tip is None else tip.keep.best_is)
    return {
        "run": history.run,
        "step": None if tip is None else tip.step,
        "slot": None if tip is None else tip.slot,
        "best_slot": best[0].slot if best else None,
        "checkpoints": [
            _checkpoint(manifest, manifest.slot in in_history, kept, placed=place >= len(manifests) - newest)
            for place, manifest in enumerate(manifests)
        ],
        "attempts": _attempts(history, Counter(manifest.attempt for manifest in manifests)),
        "roll_backs": [
            {
                "step": one.rolled_back_to,
                "restored_slot": one.restored,
                "exclude_steps": one.exclude_steps,
                "created_s": one.created_s,
            }
            for one in history.restores
            if one.rolled_back_to is not None
        ],
        "damage": [{"path": one.path, "reason": one.reason} for one in history.damaged],
        "broken_at": history.broken_at,
        "leftover_files": files,
        "leftover_bytes": size_bytes,
    }


def _attempts(history: History, checkpoints: Mapping[int, int]) -> list[dict[str, Any]]:
    restored = {one.attempt: one.restored for one in history.restores}
    return [
        {
            "attempt": begin.attempt,
            "restored": begin.attempt in restored,
            "restored_slot": restored.get(begin.attempt),
            "world_size": begin.world_size,
            "library": begin.library,
            "host": begin.host,
            "pid": begin.pid,
            "created_s": begin.created_s,
            "checkpoints": checkpoints.get(begin.attempt, 0),
        }
        for begin in history.begins
    ]


def _checkpoint(manifest: Manifest, in_history: bool, kept: Kept, *, placed: bool) -> dict[str, Any]:
    files, size_bytes = kept.of(manifest)
    return {
        "slot": manifest.slot,
        "parent": manifest.parent,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "created_s": manifest.created_s,
        "metric": manifest.metric if manifest.metric is not None and isfinite(manifest.metric) else None,
        "in_history": in_history,
        "files": files,
        "size_bytes": size_bytes,
        "readers": {name: _place_of(one) for name, one in readers_in(manifest).items() if placed},
    }


def _place_of(record: SourceRecord) -> dict[str, Any]:
    """Return the place of a reader, and the topology of its last segment.

    The epoch of an endless stream is the first epoch that is not consumed to its end.
    """
    try:
        state = record.state
        done = {epoch: intervals.size for epoch, intervals in consumed(state).items()}
    except StateError as error:
        return {"unreadable": str(error)}
    epoch, rows_of = state.epoch, state.rows_of
    if state.identity.endless:
        epoch = next(one for one in range(max(done, default=0) + 2) if done.get(one, 0) < rows_of(one))
    lanes, batch_size, world_size = state.segment.topology
    return {
        "epoch": epoch,
        "rows_done": done.get(epoch, 0),
        "rows": rows_of(epoch),
        "step": state.step,
        "lanes": lanes,
        "batch_size": batch_size,
        "world_size": world_size,
        "table": state.identity.table,
        "version": state.identity.version,
        "selection": state.identity.selection,
    }


# --- for people


def _show(plain: dict[str, Any], place: str, *, newest: int) -> None:
    reached = "no checkpoint" if plain["step"] is None else f"step {plain['step']:,} (slot {plain['slot']})"
    print(f"{place}  {reached}  run {plain['run']}")
    print()
    _show_attempts(plain["attempts"], {one["slot"]: one["step"] for one in plain["checkpoints"]}, newest)
    for one in plain["roll_backs"][-newest:]:
        first, stop = one["exclude_steps"] or (0, 0)
        but = f", without the batches of the steps {first:,} to {stop - 1:,}," if stop else ""
        when = format_time(one["created_s"])
        print(f"rolled back to step {one['step']:,} (slot {one['restored_slot']}){but} {when}")
    print()
    _show_checkpoints(plain["checkpoints"], plain["best_slot"], newest)
    if plain["leftover_files"]:
        files, size = format_count(plain["leftover_files"], "file"), format_bytes(plain["leftover_bytes"])
        print(f"{files} ({size}) of uncommitted saves")
    if plain["broken_at"] is not None:
        print(f"✗ the history is broken: slot {plain['broken_at']} cannot be read")
    for damage in plain["damage"]:
        print(f"✗ {damage['path']}: {damage['reason']}")


def _show_attempts(attempts: list[dict[str, Any]], steps: dict[int, int], newest: int) -> None:
    table = TextTable(">attempt", "began", "went on from", ">ranks", ">checkpoints", title="Attempts")
    _add_omitted(table, len(attempts) - newest, 5)
    for one in attempts[-newest:]:
        slot = one["restored_slot"]
        if not one["restored"]:
            source = "nothing: it ended before"
        elif slot is None:
            source = "a fresh start"
        else:
            source = f"step {steps[slot]:,} (slot {slot})" if slot in steps else f"slot {slot}"
        table.add_row(one["attempt"], format_time(one["created_s"]), source, one["world_size"], one["checkpoints"])
    print(table)


def _show_checkpoints(checkpoints: list[dict[str, Any]], best: int | None, newest: int) -> None:
    heads = (">slot", ">step", ">attempt", "saved", ">data", ">metric", "", "reader", "topology")
    table = TextTable(*heads, title="Checkpoints")
    shown = [one for one in checkpoints[:-newest] if one["slot"] == best] + checkpoints[-newest:]
    _add_omitted(table, len(checkpoints) - len(shown), len(heads))
    for one in shown:
        first, *others = [_format_place(name, at) for name, at in one["readers"].items()] or [("", "")]
        table.add_row(
            one["slot"],
            one["step"],
            one["attempt"],
            format_time(one["created_s"]),
            format_bytes(one["size_bytes"]) if one["files"] else "removed",
            "-" if one["metric"] is None else f"{one['metric']:.6g}",
            "best" if one["slot"] == best else "" if one["in_history"] else "rolled back",
            *first,
        )
        for other in others:
            table.add_row(*[""] * (len(heads) - 2), *other)
    print(table)


def _add_omitted(table: TextTable, count: int, columns: int) -> None:
    if count > 0:
        table.add_row("…", f"{count:,} older", *[""] * (columns - 2))


def _format_place(name: str, at: dict[str, Any]) -> tuple[str, str]:
    if "unreadable" in at:
        return f"{name}: unreadable", ""
    share = 100 * at["rows_done"] / at["rows"] if at["rows"] else 100.0
    topology = f"{at['world_size']} × {at['batch_size']} of {format_count(at['lanes'], 'lane')}"
    return f"{name}: epoch {at['epoch']}, {share:.1f} %", topology
