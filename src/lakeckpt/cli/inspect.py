"""This module runs ``lakeckpt inspect RUN``: it prints checkpoints, attempts, and the places of readers.

It reads the log, and lists the other files.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from lakeckpt.cli.output import (
    TextTable,
    add_run_arguments,
    options_of,
    print_json,
    say_bytes,
    say_many,
    say_when,
)

if TYPE_CHECKING:
    from lakeckpt.checkpoint.format.manifest import Manifest
    from lakeckpt.checkpoint.ledger.verify import Kept
    from lakeckpt.checkpoint.persist.history import History

__all__ = ["add_arguments", "overview", "run"]

_NEWEST = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lakeckpt inspect``."""
    add_run_arguments(parser)
    parser.add_argument("--all", action="store_true", help="every checkpoint and attempt, not only the newest")


def run(args: argparse.Namespace) -> int:
    """Inspect and print. Returns 0, also if there is damage."""
    from lakeckpt.checkpoint.ledger.audit import read_run
    from lakeckpt.checkpoint.ledger.verify import Kept
    from lakeckpt.lake.storage.base import describe
    from lakeckpt.lake.storage.open import open_storage

    storage = open_storage(args.place, storage_options=options_of(args.storage_options))
    newest = None if args.json or args.all else _NEWEST
    plain = overview(read_run(storage), Kept(storage), newest=newest)
    if args.json:
        print_json(plain)
    else:
        _show(plain, describe(storage), newest=newest or 10**9)
    return 0


def overview(history: History, kept: Kept, *, newest: int | None = None) -> dict[str, Any]:
    """Return the output of ``inspect`` as JSON-able values; checkpoints and attempts are in the order of the log.

    Positions of readers are computed for the ``newest`` checkpoints (None: all). ``best_slot`` is the slot of the
    checkpoint with the best metric, among the checkpoints of the history that have their data. A metric that is not a
    finite number is null.
    """
    from lakeckpt.checkpoint.keep import best_first

    in_history = {manifest.slot for manifest in history.chain}
    manifests = sorted([*history.chain, *history.abandoned], key=lambda one: one.slot)
    counts: dict[int, int] = {}
    for manifest in manifests:
        counts[manifest.attempt] = counts.get(manifest.attempt, 0) + 1
    files, size_bytes = kept.besides(manifests)
    restored = {one.attempt: one.restored for one in history.restores}
    tip = history.tip
    with_data = [manifest for manifest in history.chain if kept.of(manifest)[0]]
    best = best_first(with_data, "lowest" if tip is None or tip.keep is None else tip.keep.best_is)
    return {
        "run": history.run,
        "step": None if tip is None else tip.step,
        "slot": None if tip is None else tip.slot,
        "best_slot": best[0].slot if best else None,
        "library": None if tip is None else tip.library,
        "checkpoints": [
            _checkpoint(manifest, manifest.slot in in_history, kept, placed=newest is None or place < newest)
            for place, manifest in zip(range(len(manifests) - 1, -1, -1), manifests, strict=True)
        ],
        "attempts": [
            {
                "attempt": begin.attempt,
                "restored": begin.attempt in restored,
                "restored_slot": restored.get(begin.attempt),
                "world_size": begin.world_size,
                "library": begin.library,
                "created_s": begin.created_s,
                "checkpoints": counts.get(begin.attempt, 0),
            }
            for begin in history.begins
        ],
        "roll_backs": [
            {
                "slot": one.slot,
                "step": one.rolled_back_to,
                "restored_slot": one.restored,
                "attempt": one.attempt,
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
        "readers": {name: _position(one.state) for name, one in sorted(manifest.readers.items()) if placed},
    }


def _position(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the place of a reader, and the topology of its last segment."""
    from lakeckpt.core.plan import Plan, consumed
    from lakeckpt.core.state import ReaderState
    from lakeckpt.errors import StateError

    try:
        state = ReaderState.from_plain(plain)
        done = consumed(state)
    except StateError as error:
        return {"unreadable": str(error)}
    rows = state.identity.rows
    epoch = state.epoch
    if state.identity.endless:
        epoch = next((one for one in range(max(done, default=0) + 1) if one not in done or done[one].size < rows), 0)
        epoch = max(done) + 1 if done and all(one.size == rows for one in done.values()) else epoch
    steps = Plan(state).steps
    lanes, batch_size, world_size = state.segment.topology
    return {
        "epoch": epoch,
        "rows_done": done[epoch].size if epoch in done else 0,
        "rows": rows,
        "step": state.step,
        "steps": steps,
        "lanes": lanes,
        "batch_size": batch_size,
        "world_size": world_size,
        "segments": state.to_plain()["segments"],
        "endless": state.identity.endless,
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
        print(f"rolled back to step {one['step']:,} (slot {one['restored_slot']}) {say_when(one['created_s'])}")
    print()
    _show_checkpoints(plain["checkpoints"], plain["best_slot"], newest)
    if plain["leftover_files"]:
        print(
            f"{say_many(plain['leftover_files'], 'file')} ({say_bytes(plain['leftover_bytes'])}) of uncommitted saves",
        )
    if plain["broken_at"] is not None:
        print(f"✗ the history is broken: slot {plain['broken_at']} cannot be read")
    for damage in plain["damage"]:
        print(f"✗ {damage['path']}: {damage['reason']}")


def _show_attempts(attempts: list[dict[str, Any]], steps: dict[int, int], newest: int) -> None:
    table = TextTable(">attempt", "began", "went on from", ">ranks", ">checkpoints", title="Attempts")
    _omitted(table, len(attempts) - newest, 5)
    for one in attempts[-newest:]:
        slot = one["restored_slot"]
        source = (
            "nothing: it ended before"
            if not one["restored"]
            else "a fresh start"
            if slot is None
            else f"step {steps[slot]:,} (slot {slot})"
            if slot in steps
            else f"slot {slot}"
        )
        table.add_row(
            str(one["attempt"]), say_when(one["created_s"]), source, str(one["world_size"]), f"{one['checkpoints']:,}"
        )
    print(table)


def _show_checkpoints(checkpoints: list[dict[str, Any]], best: int | None, newest: int) -> None:
    several = len({name for one in checkpoints for name in one["readers"]}) > 1
    heads = (">slot", ">step", ">attempt", "saved", ">data", ">metric", "reader", "topology", "")
    table = TextTable(*heads, title="Checkpoints")
    shown = [one for one in checkpoints[:-newest] if one["slot"] == best] + checkpoints[-newest:]
    _omitted(table, len(checkpoints) - len(shown), len(heads))
    for one in shown:
        places = [_say_position(name if several else "", at) for name, at in one["readers"].items()] or [("", "")]
        table.add_row(
            str(one["slot"]),
            f"{one['step']:,}",
            str(one["attempt"]),
            say_when(one["created_s"]),
            say_bytes(one["size_bytes"]) if one["files"] else "removed",
            "-" if one["metric"] is None else f"{one['metric']:.6g}",
            "\n".join(place for place, _ in places),
            "\n".join(topology for _, topology in places),
            "best" if one["slot"] == best else "" if one["in_history"] else "rolled back",
        )
    print(table)


def _omitted(table: Any, count: int, columns: int) -> None:
    if count > 0:
        table.add_row("…", f"{count:,} older", *[""] * (columns - 2))


def _say_position(name: str, at: dict[str, Any]) -> tuple[str, str]:
    head = f"{name}: " if name else ""
    if "unreadable" in at:
        return f"{head}unreadable", ""
    share = 100 * at["rows_done"] / at["rows"] if at["rows"] else 100.0
    topology = f"{at['world_size']} × {at['batch_size']} of {at['lanes']} lanes"
    return f"{head}epoch {at['epoch']}, {share:.1f} %", topology
