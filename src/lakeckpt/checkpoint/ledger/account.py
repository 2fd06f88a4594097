"""This module accounts for the rows of one reader, epoch by epoch: was every row consumed exactly once?

`lakeckpt.checkpoint.ledger.walk` collects what the manifests of a history record. For each epoch:

1. the recorded intervals must be disjoint: rows in two of them were repeated;
2. the rows that the newest state claims as consumed (`lakeckpt.core.plan.consumed`, computed from its segments alone)
   must be their union: additional rows were lost, and missing rows would be read again;
3. an epoch that is over must be whole, except for the rows that ``drop_last=True`` drops on purpose.

The module is pure. It never imports torch, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from lakeckpt.checkpoint.consumed.rows import RowOrder, name_rows, order_name
from lakeckpt.checkpoint.consumed.source_records import Records
from lakeckpt.checkpoint.format.manifest import Excluded, Manifest
from lakeckpt.checkpoint.ledger.audit_report import (
    EpochAudit,
    EpochStatus,
    ExcludedRows,
    Finding,
    FindingKind,
    ReaderAudit,
)
from lakeckpt.checkpoint.ledger.epoch_account import Piece, Space, count_epoch, piece_of, space_of
from lakeckpt.checkpoint.ledger.tranches import doubts_of_tranches
from lakeckpt.checkpoint.ledger.walk import ReaderWalk
from lakeckpt.core.consumption import consumed, dropped
from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import LayoutKey, Plan
from lakeckpt.core.state import State
from lakeckpt.errors import StateError

__all__ = ["account"]

_FOLLOWED = "a growing table is followed: epochs are tranches, and the rows left of one are part of the next"
_NAMED_ROWS = 2**22
"""Findings name at most so many rows: permutations of windows are computed for them."""


def account(
    name: str,
    records: Records,
    orders: Mapping[str, RowOrder],
    *,
    skipped: Collection[int] = (),
    advance: Callable[[], object] = lambda: None,
) -> ReaderAudit:
    """Return the account of reader ``name``; ``records`` are its records in the history, at least one.

    ``orders`` are the orders of the tables by digest, for tables whose index can be read. ``skipped`` are the epochs
    whose rest an attempt skipped. ``advance`` is called after each record.
    """
    return _Account(name, records, orders, skipped).audit(advance)


class _Account:
    def __init__(self, name: str, records: Records, orders: Mapping[str, RowOrder], skipped: Collection[int]) -> None:
        self._skipped = skipped
        self._name = name
        self._records = records
        self._orders = orders
        self._walk = ReaderWalk(records, orders)
        self._epochs: list[EpochAudit] = []
        self._findings: list[Finding] = []
        self._excluded: list[ExcludedRows] = []

    def audit(self, advance: Callable[[], object]) -> ReaderAudit:
        walk = self._walk
        identity: Identity | None = None
        counted, batch_of = "row", "row"
        try:
            origin, tip = walk.collect(advance)
            identity = tip.identity
            counted, batch_of = _units(tip)
            if any(end.identity.tail == "carry" for end in walk.ends.values()):
                walk.notes[_FOLLOWED] = None
            if identity.unit > 1:
                walk.notes[f"sequences are of {identity.unit:,} tokens; an epoch has {identity.tokens:,} tokens"] = None
            for doubt in doubts_of_tranches(walk.ends, self._orders):
                walk.doubt(doubt)
            self._audit_epochs(origin, tip)
        except StateError as error:
            walk.doubt(f"a recorded state cannot be used: {error}")
        return ReaderAudit(
            name=self._name,
            table="" if identity is None else identity.table,
            tail="" if identity is None else identity.tail,
            endless=identity is not None and identity.endless,
            topologies=tuple(walk.topologies),
            epochs=tuple(self._epochs),
            findings=tuple(self._findings),
            doubts=tuple(walk.doubts),
            notes=tuple(walk.notes),
            excluded=tuple(self._excluded),
            counted=counted,
            batch_of=batch_of,
            inferred=walk.inferred,
        )

    def _audit_epochs(self, origin: State, tip: State) -> None:
        known, carried = consumed(tip), self._walk.carried
        touched = [*self._walk.pieces, *known]
        first, last = (0, -1) if tip.identity.endless else (origin.epoch, tip.epoch)
        for epoch in range(min([first, *touched]), max([last, *touched]) + 1):
            for before in carried.get(epoch, []):
                self._audit_carried(epoch, origin, before)
            self._audit_epoch(epoch, origin, tip, known)
            if self._epochs and self._epochs[-1].epoch == epoch:
                self._list_excluded(epoch, tip)
        if not self._epochs and (rows := tip.identity.rows_of(tip.epoch)):  # a source that was never read is named
            counts = dict.fromkeys(("once", "repeated", "again", "surplus", "lost", "dropped", "before"), 0)
            self._epochs.append(EpochAudit(epoch=tip.epoch, status="in progress", rows=rows, left=rows, **counts))

    def _list_excluded(self, epoch: int, tip: State) -> None:
        order = self._orders.get(order_name(self._identity_of(epoch, tip)))
        for file, group, rows in [] if order is None else order.excluded:
            self._excluded.append(ExcludedRows(epoch=epoch, reason="damaged", file=file, row_group=group, rows=rows))
        for piece, one in self._walk.excluded.get(epoch, []):
            self._excluded += self._named(piece, one)

    def _named(self, piece: Piece, one: Excluded) -> list[ExcludedRows]:
        """Return what was consumed and trained nothing, row group by row group; packed sequences as they are."""
        order = self._orders.get(order_name(piece.identity))
        whole = ExcludedRows(
            epoch=piece.key.epoch,
            reason=one.reason,
            file="",
            row_group=-1,
            rows=piece.positions.size,
            step=one.step,
            rank=one.rank,
            steps=one.steps,
        )
        if order is None or order.unit > 1:
            return [whole]
        rows = order.table_rows(piece.identity.spec, piece.key, piece.positions)
        return [
            replace(
                whole,
                file=at.file,
                row_group=at.row_group,
                rows=at.rows.size,
                ranges=tuple(at.rows.pairs()),
                how_counted=at.how_counted,
            )
            for at in name_rows(order, rows)
        ]

    def _audit_carried(self, epoch: int, origin: State, state: State) -> None:
        """Audit the part of an epoch up to ``state``, from which the rest was carried over."""
        pieces, ends = self._walk.pieces, self._walk.ends
        name, known = order_name(state.identity), consumed(state)
        later, every = ends.get(epoch), pieces.get(epoch, [])
        pieces[epoch] = [one for one in every if order_name(one.identity) == name]
        ends[epoch] = state
        self._audit_epoch(epoch, origin, state, known)
        pieces[epoch] = [one for one in every if order_name(one.identity) != name]
        if later is not None:
            ends[epoch] = later
        if self._epochs and self._epochs[-1].epoch == epoch:
            one = self._epochs[-1]  # the rows that the tail would have dropped were carried over, too
            self._epochs[-1] = replace(one, status="carried over", dropped=0, left=one.left + one.dropped)

    def _audit_epoch(self, epoch: int, origin: State, tip: State, known: Mapping[int, Intervals]) -> None:
        pieces, newest = self._walk.pieces.get(epoch, []), self._records[-1][0]
        begun = origin.identity.endless or epoch == origin.epoch
        inherits = begun and (origin.identity.table == tip.identity.table or epoch not in self._walk.carried)
        before = self._claim(origin, epoch, self._records[0][0]) if inherits else None
        claim = self._claim(tip, epoch, newest, known)
        every = [*pieces, *(one for one in (before, claim) if one is not None)]
        status = _status(epoch, tip, claim)
        rows = self._identity_of(epoch, tip).rows_of(epoch)
        if not every and (status == "in progress" or not rows):
            return  # not begun
        if status == "complete" and epoch in self._skipped:
            status = "skipped"
            self._walk.notes[f'the rest of epoch {epoch} was skipped, as on_version_gone="next_epoch" asks'] = None
        tables = {piece.identity.table for piece in every}
        if len(tables) > 1:
            self._walk.doubt(f"epoch {epoch} was read from {len(tables)} versions of the table, as the user allowed")
        if len({piece.identity.selection for piece in every}) > 1:
            self._walk.doubt(f"epoch {epoch} was read with several filters, as the user allowed")
        space = space_of(every, self._orders) if every else Space(self._orders, None)
        if space is None:
            self._walk.doubt(f"epoch {epoch} was read in orders that cannot be compared, and is not counted")
            return
        audit, wrong = count_epoch(
            epoch,
            rows=rows,
            status=status,
            space=space,
            pieces=pieces,
            before=before,
            claim=claim,
            dropped=self._dropped(epoch) if status == "complete" else None,
            excluded=self._excluded_of(epoch, {order_name(one.identity) for one in pieces}),
        )
        if status == "complete" and self._identity_of(epoch, tip).tail == "carry":
            audit = replace(audit, status="carried over", dropped=0, left=audit.left + audit.dropped)
        self._epochs.append(audit)
        for one in wrong:
            first = self._first_to_claim(epoch, one.rows, space) if one.kind == "lost" else one.first or newest
            self._findings.append(self._finding(one.kind, epoch, one.rows, first, space, tip))

    def _claim(
        self, state: State, epoch: int, manifest: Manifest, known: Mapping[int, Intervals] | None = None
    ) -> Piece | None:
        """Return the rows of ``epoch`` that a state claims as consumed; None if there are none. ``known`` is `consumed`
        of the state."""
        if not state.identity.endless and epoch != state.epoch:
            if epoch > state.epoch:
                return None
            identity = self._identity_of(epoch, state)
            key = LayoutKey(epoch=epoch, num_lanes=state.segment.num_lanes, rotation=0)
            whole = Intervals.whole(identity.rows)
            return Piece(identity=identity, key=key, positions=whole, manifest=manifest) if whole else None
        found = consumed(state) if known is None else known
        positions = found.get(epoch, Intervals.empty())
        last = self._identity_of(epoch, state)
        if positions and last != state.order_of(epoch):  # an epoch that is over, in an order that is over
            key = LayoutKey(epoch=epoch, num_lanes=state.segment.num_lanes, rotation=0)
            return Piece(identity=last, key=key, positions=Intervals.whole(last.rows_of(epoch)), manifest=manifest)
        return piece_of(state, epoch, positions, manifest) if positions else None

    def _identity_of(self, epoch: int, state: State) -> Identity:
        """Return the order in which ``epoch`` was read last: each epoch may have another table version."""
        if state.identity.endless:
            pieces = self._walk.pieces.get(epoch)
            return pieces[-1].identity if pieces else state.order_of(epoch)
        return self._walk.ends.get(epoch, state).order_of(epoch)

    def _dropped(self, epoch: int) -> Piece | None:
        """Return the rows that the tail drops from ``epoch`` on purpose, by the plan of its last state."""
        end = self._walk.ends.get(epoch)
        left = Intervals.empty() if end is None else dropped(end)
        return piece_of(end, epoch, left, self._records[-1][0]) if end is not None and left else None

    def _excluded_of(self, epoch: int, orders: Collection[str]) -> list[Piece]:
        every = self._walk.excluded.get(epoch, [])
        return [piece for piece, _ in every if order_name(piece.identity) in orders]

    # --- findings

    def _first_to_claim(self, epoch: int, rows: Intervals, space: Space) -> Manifest:
        """Return the first checkpoint whose state claims any of ``rows`` as consumed."""
        for manifest, record in self._records:
            claim = self._claim(record.state, epoch, manifest)
            if claim is not None and space.of(claim).intersection(rows):
                return manifest
        return self._records[-1][0]

    def _finding(
        self, kind: FindingKind, epoch: int, found: Intervals, manifest: Manifest, space: Space, tip: State
    ) -> Finding:
        rows = space.table_rows(Intervals.of(found.take(0, min(found.size, _NAMED_ROWS))))
        order = self._orders.get(order_name(self._identity_of(epoch, tip)))
        where = [] if rows is None or order is None else name_rows(order, rows)
        return Finding(
            kind=kind,
            reader=self._name,
            epoch=epoch,
            rows=found.size,
            slot=manifest.slot,
            step=manifest.step,
            attempt=manifest.attempt,
            where=tuple(where),
            more=found.size - sum(one.rows.size for one in where),
        )


def _units(tip: State) -> tuple[str, str]:
    """Return the names of what an epoch counts, and of what a batch is counted in."""
    maker = tip.identity.maker
    if maker is None:
        return ("sequence", "sequence") if tip.identity.unit > 1 else ("row", "row")
    if maker.how and not maker.name:  # whole documents
        return "window", "sequence"
    if not maker.length:
        return "row", "row"
    return "row", "token" if tip.mixing is None else "sequence"


def _status(epoch: int, tip: State, claim: Piece | None) -> EpochStatus:
    if tip.identity.endless:
        return "complete" if claim is not None and claim.is_whole else "in progress"
    if epoch == tip.epoch:
        return "complete" if Plan(tip).at_end and tip.identity.tail != "carry" else "in progress"
    return "complete" if epoch < tip.epoch else "left behind"
