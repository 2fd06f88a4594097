"""Which rows did a run leave out because they could not be read?  Told from the skip lists of its ledger.

A list names row groups and intervals of positions; which of those positions are the row group's own, the order says.
Nothing here judges: `lakeckpt.checkpoint.account` counts the rows, and says so openly.

Never reads storage. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lakeckpt.checkpoint.audit_report import SkippedRows
from lakeckpt.checkpoint.epoch_account import Piece
from lakeckpt.checkpoint.manifest import Manifest, ReaderRecord
from lakeckpt.checkpoint.rows import Order, order_name
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import LayoutKey
from lakeckpt.core.skips import SkipList, SkippedGroup
from lakeckpt.core.state import MAX_LANES, Identity, ReaderState

__all__ = ["rows_skipped", "skipped_in"]


def _positions(entry: SkippedGroup, identity: Identity, order: Order) -> tuple[LayoutKey, Intervals] | None:
    """The positions at which the rows of ``entry`` stand, and in which layout; None where it is not of that order.

    ``identity`` and ``order`` are those of the table that the entry names.
    """
    if not (1 <= entry.num_lanes <= MAX_LANES and entry.rotation < entry.num_lanes):
        return None
    if entry.group >= len(order.group_rows) or (entry.positions and entry.positions.stops[-1] > order.num_rows):
        return None
    key = LayoutKey(epoch=entry.epoch, num_lanes=entry.num_lanes, rotation=entry.rotation)
    return key, order.at_group(identity.spec, key, entry.positions, entry.group)


def skipped_in(
    records: Sequence[tuple[Manifest, ReaderRecord]], orders: Mapping[str, Order]
) -> tuple[dict[int, list[Piece]], list[SkippedRows], list[str]]:
    """What ``records`` of one reader say was skipped: pieces by epoch, the same for people, and what cannot be told."""
    identities: dict[str, Identity] = {}
    for _, record in records:
        for plain in (record.state, *(stretch.begin for stretch in record.stretches)):
            mine = ReaderState.from_plain(plain).identity
            identities.setdefault(order_name(mine), mine)
    pieces: dict[int, list[Piece]] = {}
    rows: list[SkippedRows] = []
    doubts: dict[str, None] = {}
    for entry in SkipList().union(*(record.skips for _, record in records)):
        identity, order = identities.get(entry.table), orders.get(entry.table)
        found = None if identity is None or order is None else _positions(entry, identity, order)
        if identity is None or found is None:
            doubts[f"which rows of the skipped row group {entry.row_group} of {entry.file!r} stood where"] = None
            continue
        key, positions = found
        piece = Piece(identity=identity, key=key, positions=positions, manifest=records[-1][0])
        pieces.setdefault(entry.epoch, []).append(piece)
        rows.append(
            SkippedRows(
                epoch=entry.epoch,
                file=entry.file,
                row_group=entry.row_group,
                rows=positions.size,
                reason=entry.reason,
            )
        )
    return pieces, rows, [f"{doubt} cannot be told" for doubt in doubts]


def rows_skipped(skips: SkipList, identity: Identity, order: Order) -> dict[int, Intervals]:
    """epoch → the table rows that ``skips`` leave out, of the order of ``identity``."""
    found: dict[int, Intervals] = {}
    for entry in skips:
        if entry.table != order_name(identity):
            continue
        at = _positions(entry, identity, order)
        if at is not None:
            mine = order.table_rows(identity.spec, *at)
            found[entry.epoch] = found.get(entry.epoch, Intervals.empty()).union(mine)
    return found
