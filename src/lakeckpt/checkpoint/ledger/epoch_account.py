"""This module counts which rows of one epoch were consumed once, twice, or never: set algebra over recorded positions.

Positions of one order are compared directly. If an epoch was read in several orders (it was begun again with other
lanes), the same position means different rows, and all positions are converted into rows of the table first.

The module is pure. It never imports torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lakeckpt.checkpoint.consumed.rows import RowOrder, order_name
from lakeckpt.checkpoint.format.manifest import Manifest
from lakeckpt.checkpoint.ledger.audit_report import EpochAudit, EpochStatus, FindingKind
from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import LayoutKey, Plan
from lakeckpt.core.state import State

__all__ = ["Piece", "Space", "Wrong", "count_epoch", "piece_of", "space_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Positions of one epoch in one order, and the checkpoint that records or claims them."""

    identity: Identity
    key: LayoutKey
    positions: Intervals
    manifest: Manifest

    @property
    def order(self) -> tuple[object, ...]:
        """The order of the positions: in equal orders, equal positions are the same rows. Without shuffling, lanes do
        not matter."""
        spec = self.identity.spec
        return (spec, self.identity.rows, *((self.key.num_lanes, self.key.rotation) if spec.shuffle else ()))

    @property
    def is_whole(self) -> bool:
        """True if this is the whole epoch, which has the same rows in every order."""
        return self.positions == Intervals.whole(self.identity.rows_of(self.key.epoch))


def piece_of(state: State, epoch: int, positions: Intervals, manifest: Manifest) -> Piece:
    """Return positions of ``epoch`` in the layout that ``state`` gives it."""
    key = LayoutKey(epoch=epoch, num_lanes=state.segment.num_lanes, rotation=0)
    if state.identity.endless or epoch == state.epoch:
        with contextlib.suppress(ValueError):  # the epoch is over: all rows of it, in any order
            key = Plan(state).layout(epoch)
    return Piece(identity=state.order_of(epoch), key=key, positions=positions, manifest=manifest)


class Space:
    """Makes the pieces of one epoch comparable: as positions, or as rows of the table."""

    def __init__(self, orders: Mapping[str, RowOrder], common: Piece | None) -> None:
        self._orders = orders
        self._common = common

    def of(self, piece: Piece) -> Intervals:
        """Return a piece in this space."""
        return piece.positions if self._common is not None or piece.is_whole else self._rows(piece, piece.positions)

    def table_rows(self, found: Intervals) -> Intervals | None:
        """Return positions of this space as rows of the table; None if the index cannot be read."""
        if self._common is None:
            return found
        is_named = self._common.identity.unit == 1 and order_name(self._common.identity) in self._orders
        return self._rows(self._common, found) if is_named else None

    def _rows(self, piece: Piece, positions: Intervals) -> Intervals:
        return self._orders[order_name(piece.identity)].table_rows(piece.identity.spec, piece.key, positions)


def space_of(pieces: Sequence[Piece], orders: Mapping[str, RowOrder]) -> Space | None:
    """Return the space in which ``pieces``, at least one, can be compared; None if there is none."""
    partial = [piece for piece in pieces if not piece.is_whole] or list(pieces)
    if len({piece.identity.rows for piece in pieces}) > 1:
        return None
    if len({piece.order for piece in partial}) == 1:
        return Space(orders, partial[0])
    named = all(piece.identity.unit == 1 and order_name(piece.identity) in orders for piece in partial)
    return Space(orders, None) if named else None


class Wrong(NamedTuple):
    """Rows of an epoch that were not consumed exactly once, in the epoch's space."""

    kind: FindingKind
    rows: Intervals
    first: Manifest | None = None
    """The checkpoint in which a row was first consumed again; None for other kinds."""


def count_epoch(
    epoch: int,
    *,
    rows: int,
    status: EpochStatus,
    space: Space,
    pieces: Sequence[Piece],
    before: Piece | None,
    claim: Piece | None,
    dropped: Piece | None,
    excluded: Sequence[Piece] = (),
) -> tuple[EpochAudit, list[Wrong]]:
    """Count the ``rows`` rows of an epoch, and return those that are wrong.

    ``pieces`` were recorded, in order; ``excluded`` trained nothing. ``before`` was consumed before the record begins.
    ``claim`` holds the rows that the newest state claims as consumed. ``dropped`` holds the rows that the tail of the
    epoch drops. None means no row.
    """
    none, every = Intervals.empty(), Intervals.whole(rows)
    over = status in ("complete", "skipped")
    recorded = ([] if before is None else [before]) + list(pieces)
    seen, twice, first = _add_up(recorded, space)
    surplus = sum(piece.positions.size for piece in recorded) - seen.size
    omitted = none if dropped is None else space.of(dropped).difference(seen)
    if status == "skipped":
        omitted = every.difference(seen)
    claimed = every.difference(omitted) if over else none if claim is None else space.of(claim)
    lost = claimed.difference(seen)
    again = seen.difference(claimed.union(omitted))
    again = again.difference(twice)
    inherited = none if before is None else space.of(before).difference(twice.union(again))
    came = seen.difference(twice.union(again, inherited))
    nothing = came.intersection(none.union(*map(space.of, excluded)))
    audit = EpochAudit(
        epoch=epoch,
        status=status,
        rows=rows,
        once=came.size - nothing.size,
        excluded=nothing.size,
        repeated=twice.size,
        again=again.size,
        surplus=surplus,
        lost=lost.size,
        dropped=omitted.size,
        left=every.difference(claimed.union(seen, omitted)).size,
        before=inherited.size,
    )
    wrong = [Wrong("repeated", twice, first), Wrong("lost", lost), Wrong("again", again)]
    return audit, [one for one in wrong if one.rows]


def _add_up(recorded: Sequence[Piece], space: Space) -> tuple[Intervals, Intervals, Manifest | None]:
    """Return the consumed rows, the rows consumed more than once, and the first checkpoint with such a row."""
    each = [space.of(piece) for piece in recorded]
    seen = Intervals.empty().union(*each)
    if sum(positions.size for positions in each) == seen.size:
        return seen, Intervals.empty(), None
    had, twice, first = Intervals.empty(), [], None
    for piece, positions in zip(recorded, each, strict=True):
        common = had.intersection(positions)
        if common:
            first = first or piece.manifest
            twice.append(common)
        had = had.union(positions)
    return seen, Intervals.empty().union(*twice), first
