"""This module tells how it is known that optimizer steps used the rows that a ledger counts as consumed.

Each stretch of the ledger has a basis (`lakeckpt.core.read_ahead.Basis`). What the training loop stated needs nothing
else. What is inferred from delivery is that much weaker. What is suspected is no proof. An attempt's first steps are
undecided; later stretches of the same attempt decide for them, as it is the same loop.

Pure. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from lakeckpt.checkpoint.manifest import Manifest, ReaderRecord, Stretch

__all__ = ["used"]


def used(records: Sequence[tuple[Manifest, ReaderRecord]]) -> tuple[str, list[str]]:
    """How many attempts only inferred that rows were used, in words (empty: none did), and the doubts that they were.

    ``records`` are those of one reader in the history, oldest first.
    """
    by_attempt: dict[int, list[tuple[int, Stretch]]] = {}
    for manifest, record in records:
        for stretch in record.stretches:
            by_attempt.setdefault(manifest.attempt if stretch.attempt < 0 else stretch.attempt, []).append(
                (manifest.step, stretch)
            )
    inferred = 0
    doubts = []
    for attempt, stretches in by_attempt.items():
        last, newest = stretches[-1]
        suspected = next(((step, one.reason) for step, one in stretches if one.basis == "suspected"), None)
        if suspected is not None:
            step, reason = suspected
            doubts.append(
                f"attempt {attempt}, up to step {step:,}: {reason}: rows may count as consumed that no step used. Call "
                "manager.step(batch)"
            )
        elif newest.basis == "undecided":
            doubts.append(
                f"attempt {attempt} took too few steps, up to step {last:,}, to tell whether something reads ahead of "
                "the training loop. Call manager.step(batch)"
            )
        else:
            inferred += any(one.basis != "stated" for _, one in stretches)
    return ("" if not inferred else f"{inferred:,} of {len(by_attempt):,} attempts"), doubts
