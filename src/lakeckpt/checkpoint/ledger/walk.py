"""This module walks over the records of one reader in a history, and collects the consumption of each epoch.

The manifests of a history record consumption, stretch by stretch. `ReaderWalk` reads every stretch, and checks:

* the intervals of a stretch must be those that follow from the two states between which it lies;
* the record of optimizer steps must end where the last stretch does;
* a row of which some items were consumed (`lakeckpt.core.state.Begun`) must go on where it stopped;
* the states must count as many rows as the index of the table has.

It also counts the attempts whose training loops did not state which rows their steps used.

The module is pure. It never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lakeckpt.checkpoint.consumed.rest_of_epoch import rows_consumed
from lakeckpt.checkpoint.consumed.rows import RowOrder, order_name
from lakeckpt.checkpoint.consumed.source_records import Records, SourceRecord, SourceStretch
from lakeckpt.checkpoint.format.manifest import Excluded, Manifest
from lakeckpt.checkpoint.ledger.epoch_account import Piece, piece_of
from lakeckpt.core.changes import replan
from lakeckpt.core.consumption import consumed, consumption
from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import Begun
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.errors import StateMismatch
from lakeckpt.lake.table.index import TableIndex

__all__ = ["ReaderWalk"]


class ReaderWalk:
    """The contents of the ``records`` of one reader, at least one. `StateError` if a state cannot be used.

    ``doubts`` (reasons against a proof) and ``notes`` are sentences in the order in which they were found. The audit
    adds more sentences.
    """

    def __init__(self, records: Records, orders: Mapping[str, RowOrder]) -> None:
        self.orders = orders
        self.doubts: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.pieces: dict[int, list[Piece]] = {}
        """Epoch → its consumed pieces, in order."""
        self.ends: dict[int, State] = {}
        """Epoch → its last state, whose plan gives the rows that the tail drops."""
        self.carried: dict[int, list[State]] = {}
        """Epoch → the states from which its rest was carried over to another selection of rows."""
        self.excluded: dict[int, list[tuple[Piece, Excluded]]] = {}
        """Epoch → what was consumed there and trained nothing, in order."""
        self.topologies: dict[tuple[int, int, int], None] = {}
        self.inferred = ""
        """How many attempts did not state which rows their steps used, in words; empty if none."""
        self._records = records
        self._latest: State | None = None

    def collect(self, advance: Callable[[], object] = lambda: None) -> tuple[State, State]:
        """Read all records, and call ``advance`` after each. Returns the state that the reader began with, and the
        newest state."""
        origin: State | None = None
        tip: State | None = None
        identities: dict[str, Identity] = {}
        for manifest, record in self._records:
            for stretch in record.stretches:
                begin = stretch.begin
                origin = origin or begin
                identities |= {order_name(one): one for one in begin.epoch_orders}
                self._check_begun(manifest, begin)
                self._take(manifest, stretch)
                self._follow(begin)
                self._follow(stretch.end)
            tip = record.state
            self._follow(tip)
            self._take_excluded(manifest, record)
            origin = origin or tip
            self.topologies[tip.segment.topology] = None
            if record.stretches:
                self._check_frontier(manifest, record, record.stretches[-1].end)
            advance()
        assert tip is not None and origin is not None
        identities |= {order_name(one): one for one in tip.epoch_orders}
        for _, identity in sorted(identities.items()):
            self._check_rows(identity)
        self._check_origin(origin)
        self.inferred = self._unstated()
        return origin, tip

    def doubt(self, text: str) -> None:
        """Record a reason against a proof, once."""
        self.doubts[text] = None

    def _take(self, manifest: Manifest, stretch: SourceStretch) -> None:
        begin, recorded = stretch.begin, stretch.consumed
        self.topologies[begin.segment.topology] = None
        slot = f"slot {manifest.slot}"
        try:
            derived = consumption(begin, stretch.end)
        except StateMismatch as error:
            self.doubt(f"{slot}: two recorded states do not follow from one another: {error}")
        else:
            if derived != {epoch: positions for epoch, positions in recorded.items() if positions}:
                self.doubt(f"{slot}: the recorded intervals are not those that follow from the recorded states")
        for epoch, positions in recorded.items():
            rows = begin.rows_of(epoch)
            if positions and positions.stops[-1] > rows:
                self.doubt(f"{slot}: positions beyond the {rows:,} rows of epoch {epoch}")
                positions = positions.intersection(Intervals.whole(rows))
            if positions:
                self.pieces.setdefault(epoch, []).append(piece_of(begin, epoch, positions, manifest))

    def _take_excluded(self, manifest: Manifest, record: SourceRecord) -> None:
        """Collect what the record excludes, in the order of the stretch that consumed it."""
        for one in record.excluded:
            for epoch, positions in one.positions.items():
                found = record.state
                for stretch in record.stretches:
                    if positions.intersection(stretch.consumed.get(epoch, Intervals.empty())):
                        found = stretch.begin
                piece = piece_of(found, epoch, positions, manifest)
                self.excluded.setdefault(epoch, []).append((piece, one))

    # --- the last state of each epoch

    def _follow(self, state: State) -> None:
        """Record the last state of each epoch.

        The rest of an epoch may be too small for the next topology. Then no step of the epoch has this topology, and
        the last state of the epoch is planned again for the topology of the next epoch, as the reader did.
        """
        before = self._latest
        if before is not None:
            self._follow_to_rest(before, state)
        if before is not None and before.epoch < state.epoch:
            mine, follows = before.identity, "carry" in (before.identity.tail, state.identity.tail)
            identity = mine if follows else state.identity.of_version(mine)
            lanes, batch_size, ranks = state.segment.topology
            last = replan(replace(before, orders=(identity,)), num_lanes=lanes, batch_size=batch_size, world_size=ranks)
            self.ends[before.epoch] = last if Plan(last).at_end else before
        self.ends[state.epoch] = state
        self._latest = state

    def _follow_to_rest(self, before: State, state: State) -> None:
        """Note that ``state`` is of the rest of the epoch of ``before``, in another selection of rows, if it is."""
        index, earlier = (self._index_of(one.identity) for one in (state, before))
        rest = None if index is None else index.rest
        if index is None or rest is None or before.identity.table == state.identity.table:
            return
        if not rest.epoch == before.epoch == state.epoch:
            return
        self.carried.setdefault(state.epoch, []).append(before)
        if earlier is None:  # `_check_rows` doubts it already
            return
        read = rows_consumed(before, earlier)
        if read != rest.taken:
            self.doubt(
                f"{read.total:,} rows of epoch {state.epoch} had been consumed when the rest of it became another "
                f"selection, and {rest.taken.total:,} rows, or others, were taken out there"
            )
        self.notes[f"the rest of epoch {state.epoch} went on with other excluded row groups"] = None

    def _index_of(self, identity: Identity) -> TableIndex | None:
        order = self.orders.get(order_name(identity))
        return None if order is None else order.index

    # --- checks

    def _check_begun(self, manifest: Manifest, begin: State) -> None:
        """Positions of which some items were consumed must go on where they stopped."""
        before = self._latest
        if before is not None and before.epoch == begin.epoch and _begun(before) != _begun(begin):
            self.doubt(
                f"slot {manifest.slot}: rows of epoch {begin.epoch} of which some items were consumed go on elsewhere "
                "than where they stopped: the items between were lost, or repeated"
            )

    def _check_frontier(self, manifest: Manifest, record: SourceRecord, end: State) -> None:
        """The record of optimizer steps must end where the last stretch does."""
        frontier = record.record.steps.frontier(manifest.step)
        if frontier is None:
            return
        if (end.epoch, end.step) != frontier:
            self.doubt(
                f"slot {manifest.slot}: what was consumed ends at epoch {end.epoch}, step {end.step}, and the record "
                f"of optimizer steps at epoch {frontier.epoch}, step {frontier.step}"
            )

    def _check_rows(self, identity: Identity) -> None:
        """The states must count as many rows as the index, or the selection, of their table has."""
        table, order = identity.table, self.orders.get(order_name(identity))
        if order is None:
            what = f"row selection {identity.selection[:12]} of" if identity.selection else "index of"
            self.doubt(
                f"the {what} table {table[:12]} cannot be read: its number of rows is known only from the states, and "
                "no row can be named"
            )
        elif identity.rows != order.num_rows:
            what = "the row selection of" if identity.selection else "the index of"
            self.doubt(f"the states count {identity.rows:,} rows, and {what} table {table[:12]} {order.num_rows:,}")

    def _check_origin(self, origin: State) -> None:
        """The record must begin at the start of an epoch."""
        before = {epoch: positions.size for epoch, positions in consumed(origin).items()}
        if before or Plan(origin).begun:
            epoch, rows = max(before, default=origin.epoch), sum(before.values())
            self.doubt(
                f"the record begins inside of epoch {epoch}: {rows:,} rows had been consumed before it, according to "
                "the state that the reader began with"
            )
        index = self._index_of(origin.identity)
        if index is not None and index.rest is not None:
            self.notes[
                f"{index.rest.taken.total:,} rows were consumed before this run, by consumed=: epoch {origin.epoch} "
                "consists of the others"
            ] = None
        if origin.epoch and not before:
            self.notes[f"it began with epoch {origin.epoch}; the epochs before are not part of this run"] = None

    def _unstated(self) -> str:
        """Return how many attempts did not state which rows their steps used, in words; empty if none."""
        stated: dict[int, bool] = {}
        for manifest, record in self._records:
            for stretch in record.record.stretches:
                attempt = manifest.attempt if stretch.attempt < 0 else stretch.attempt
                stated[attempt] = stated.get(attempt, True) and stretch.basis == "stated"
        unstated = sum(not one for one in stated.values())
        return f"{unstated:,} of {len(stated):,} attempts" if unstated else ""


def _begun(state: State) -> list[Begun]:
    """Return the positions that have begun. The number of a source changes if another one joins a mixture."""
    return [replace(one, source=None) for one in Plan(state).begun]
