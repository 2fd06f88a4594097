"""This module counts what a history of a job has consumed: rows by key, and positions, for each epoch.

It is the model that loaders are compared with. It counts what came out of loaders, and never looks at their states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.receipts import Receipt

__all__ = ["Observed", "Violation", "positions_of"]


class Violation(Exception):
    """The law does not hold. The message says why."""


@dataclass(slots=True, kw_only=True)
class Observed:
    """The rows that a history has consumed so far."""

    rows: dict[int, Counter[Hashable]] = field(default_factory=dict)
    """epoch → how often each row, or token of a packed document, was consumed."""
    positions: dict[int, Intervals] = field(default_factory=dict)
    """epoch → positions that receipts name as consumed."""
    counted: str = "rows"
    """The name of the things that are counted, for people."""

    def copy(self) -> Observed:
        """Return a copy that counts separately."""
        rows = {epoch: Counter(rows) for epoch, rows in self.rows.items()}
        return Observed(rows=rows, positions=dict(self.positions), counted=self.counted)

    def add(self, epoch: int, keys: Iterable[Hashable]) -> None:
        """Note that rows of ``epoch`` were consumed."""
        self.rows.setdefault(epoch, Counter()).update(keys)

    def add_positions(self, receipt: Receipt) -> None:
        """Note the positions of ``receipt``; Violation if one was consumed before."""
        for epoch, positions in positions_of(receipt).items():
            before = self.positions.get(epoch, Intervals.empty())
            again = before.intersection(positions)
            if again:
                raise Violation(f"positions {again} of epoch {epoch} were consumed before; again by {receipt}")
            self.positions[epoch] = before.union(positions)

    def check(self, epoch: int, expected: Counter[Hashable], *, may_miss: int) -> None:
        """Compare the rows consumed of ``epoch`` with ``expected``: no row more, and at most ``may_miss`` rows less."""
        seen = self.rows.get(epoch, Counter())
        more, less = seen - expected, expected - seen
        if more or less.total() > may_miss:
            parts = [
                _listed(f"{self.counted} consumed too often", more),
                _listed(f"{self.counted} never consumed", less),
            ]
            allowed = f" ({may_miss} may be dropped)" if may_miss and less else ""
            raise Violation(f"epoch {epoch}: {'; '.join(part for part in parts if part)}{allowed}")


def _listed(what: str, rows: Counter[Hashable]) -> str:
    if not rows:
        return ""
    shown = ", ".join(repr(row) if count == 1 else f"{row!r} ({count} times)" for row, count in list(rows.items())[:5])
    return f"{rows.total()} {what}: {shown}{', …' if len(rows) > 5 else ''}"


def positions_of(receipt: Receipt) -> dict[int, Intervals]:
    """Return the positions that ``receipt`` names, for each epoch."""
    found: dict[int, list[tuple[int, int]]] = {}
    for span in receipt.spans:
        found.setdefault(span.epoch, []).append((span.start, span.stop))
    return {epoch: Intervals.of(pairs) for epoch, pairs in found.items()}
