"""Which rows of one epoch were consumed once, twice, or never?  Set algebra over what was recorded and what is claimed.

Positions of one order are compared as they are. Where an epoch was read in several orders (it was begun again with
other lanes), the same position means different rows: then everything is compared as rows of the table.

Pure. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.audit_report import EpochAudit, EpochStatus
from lakeckpt.checkpoint.manifest import Manifest
from lakeckpt.checkpoint.rows import Order, order_name
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import LayoutKey
from lakeckpt.core.state import Identity

__all__ = ["Counted", "Piece", "Space", "count_epoch", "space_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Positions of one epoch in one order, and the checkpoint that says something of them."""

    identity: Identity
    key: LayoutKey
    positions: Intervals
    manifest: Manifest

    @property
    def order(self) -> tuple[object, ...]:
        """What positions mean: equal orders, equal meaning. Unshuffled, lanes do not matter."""
        spec = self.identity.spec
        return (spec, self.identity.rows, *((self.key.num_lanes, self.key.rotation) if spec.shuffle else ()))

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole epoch: the same rows in every order."""
        return self.positions == Intervals.whole(self.identity.rows)


class Space:
    """Makes the pieces of one epoch comparable: as positions, or as rows of the table."""

    def __init__(self, orders: Mapping[str, Order], common: Piece | None) -> None:
        self._orders = orders
        self._common = common

    def of(self, piece: Piece) -> Intervals:
        """A piece in this space."""
        return piece.positions if self._common is not None or piece.is_whole else self._rows(piece, piece.positions)

    def table_rows(self, found: Intervals) -> Intervals | None:
        """What was found in this space, as rows of the table; None where the index cannot be read."""
        if self._common is None:
            return found
        return self._rows(self._common, found) if order_name(self._common.identity) in self._orders else None

    def _rows(self, piece: Piece, positions: Intervals) -> Intervals:
        return self._orders[order_name(piece.identity)].table_rows(piece.identity.spec, piece.key, positions)


def space_of(pieces: Sequence[Piece], orders: Mapping[str, Order]) -> Space | None:
    """The space in which ``pieces``, at least one, can be compared; None where there is none."""
    partial = [piece for piece in pieces if not piece.is_whole] or list(pieces)
    if len({piece.identity.rows for piece in pieces}) > 1:
        return None
    if len({piece.order for piece in partial}) == 1:
        return Space(orders, partial[0])
    return Space(orders, None) if all(order_name(piece.identity) in orders for piece in partial) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The counts of an epoch, and the rows that are wrong, in the epoch's space."""

    audit: EpochAudit
    twice: Intervals
    twice_first: Manifest | None
    """The checkpoint in which a row was first consumed again."""
    lost: Intervals
    again: Intervals
    """What was consumed once, and would be read again."""


def count_epoch(
    epoch: int,
    *,
    rows: int,
    status: EpochStatus,
    space: Space,
    pieces: Sequence[Piece],
    before: Piece | None,
    claim: Piece | None,
    skipped: Sequence[Piece],
    dropped: Piece | None,
) -> Counted:
    """Count the ``rows`` rows of an epoch.

    ``pieces`` are what was recorded, in order; ``before`` what had been consumed before the record begins; ``claim``
    what the newest state takes for consumed; ``skipped`` what had not come of that; ``dropped`` what its ends leave
    out. All None: nothing.
    """
    none, every = Intervals.empty(), Intervals.whole(rows)
    over = status in ("complete", "given up")
    told = ([] if before is None else [before]) + list(pieces)
    seen, twice, first = _add_up(told, space)
    surplus = sum(piece.positions.size for piece in told) - seen.size
    left_out = none if dropped is None else space.of(dropped).difference(seen)
    if status == "given up":
        left_out = every.difference(seen)
    claimed = every.difference(left_out) if over else none if claim is None else space.of(claim)
    lost = claimed.difference(seen)
    again = seen.difference(claimed.union(left_out))
    again = again.difference(twice)
    inherited = none if before is None else space.of(before).difference(twice.union(again))
    came = seen.difference(twice.union(again, inherited))
    missing = came.intersection(none.union(*(space.of(piece) for piece in skipped)))
    audit = EpochAudit(
        epoch=epoch,
        status=status,
        rows=rows,
        once=came.size - missing.size,
        skipped=missing.size,
        repeated=twice.size,
        again=again.size,
        surplus=surplus,
        lost=lost.size,
        dropped=left_out.size,
        left=every.difference(claimed.union(seen, left_out)).size,
        before=inherited.size,
    )
    return Counted(audit=audit, twice=twice, twice_first=first, lost=lost, again=again)


def _add_up(told: Sequence[Piece], space: Space) -> tuple[Intervals, Intervals, Manifest | None]:
    """All that was consumed, what of it more than once, and in which checkpoint that first shows."""
    each = [space.of(piece) for piece in told]
    seen = Intervals.empty().union(*each)
    if sum(positions.size for positions in each) == seen.size:
        return seen, Intervals.empty(), None
    had, twice, first = Intervals.empty(), [], None
    for piece, positions in zip(told, each, strict=True):
        common = had.intersection(positions)
        if common:
            first = first or piece.manifest
            twice.append(common)
        had = had.union(positions)
    return seen, Intervals.empty().union(*twice), first
