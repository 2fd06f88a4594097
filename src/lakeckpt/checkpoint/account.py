"""Was every row of one reader consumed exactly once?  Its account, epoch by epoch, from the recorded intervals.

The manifests of a history record what was consumed, stretch by stretch. For each epoch:

1. the recorded intervals must be disjoint: rows in two of them were repeated;
2. what the newest state takes for consumed (`lakeckpt.core.plan.consumed`, computed from its segments alone) must be
   their union: what it adds was lost, what it lacks would be read again;
3. an epoch that is over must be whole but for what ``tail="drop"`` leaves out on purpose;
4. each stretch's intervals are derived anew from the two states between which it lies, and compared; and the record of
   optimizer steps must end where the last stretch does.

Pure: it reads nothing and changes nothing. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lakeckpt.checkpoint.audit_report import EpochAudit, EpochStatus, Finding, FindingKind, ReaderAudit, SkippedRows
from lakeckpt.checkpoint.epoch_account import Piece, Space, count_epoch, space_of
from lakeckpt.checkpoint.manifest import Manifest, ReaderRecord
from lakeckpt.checkpoint.pieces import piece_of, undealt
from lakeckpt.checkpoint.rows import Order, name_rows, order_name
from lakeckpt.checkpoint.skipped import skipped_in
from lakeckpt.checkpoint.used import used
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import LayoutKey, Plan, consumed, consumption, replan
from lakeckpt.core.state import Identity, ReaderState
from lakeckpt.errors import StateError, StateMismatch
from lakeckpt.lake.index import RestOfEpoch

__all__ = ["account"]

_NAMED_ROWS = 2**22
"""Findings name at most so many rows: permutations of windows are computed for them."""

Records = Sequence[tuple[Manifest, ReaderRecord]]


def account(
    name: str,
    records: Records,
    orders: Mapping[str, Order],
    *,
    named_groups: int,
    given_up: Collection[int] = (),
) -> ReaderAudit:
    """The account of reader ``name``; ``records`` are its records in the history, oldest first, at least one.

    ``orders`` are the orders of the tables by digest, as far as their index can be read. A finding lists at most
    ``named_groups`` row groups. ``given_up`` are the epochs of which an attempt gave up the rest.
    """
    return _Account(name, records, orders, named_groups, given_up).audit()


class _Account:
    def __init__(
        self, name: str, records: Records, orders: Mapping[str, Order], named_groups: int, given_up: Collection[int]
    ) -> None:
        self._given_up = given_up
        self._name = name
        self._records = records
        self._orders = orders
        self._named_groups = named_groups
        self._doubts: dict[str, None] = {}
        self._notes: dict[str, None] = {}
        self._pieces: dict[int, list[Piece]] = {}
        self._ends: dict[int, ReaderState] = {}
        self._carried: dict[int, list[ReaderState]] = {}
        self._latest: ReaderState | None = None
        self._skipped: dict[int, list[Piece]] = {}
        self._skips: list[SkippedRows] = []
        self._topologies: dict[tuple[int, int, int], None] = {}
        self._inferred = ""

    def audit(self) -> ReaderAudit:
        epochs: list[EpochAudit] = []
        findings: list[Finding] = []
        identity: Identity | None = None
        try:
            origin, tip = self._collect()
            self._skipped, self._skips, unknown = skipped_in(self._records, self._orders)
            self._doubts.update(dict.fromkeys(unknown))
            self._inferred, suspected = used(self._records)
            self._doubts.update(dict.fromkeys(suspected))
            identity = tip.identity
            known = consumed(tip)
            for epoch in self._epochs(origin, tip, known):
                for before in self._carried.get(epoch, []):
                    self._audit_carried(epoch, origin, before, epochs, findings)
                self._audit_epoch(epoch, origin, tip, known, epochs, findings)
        except StateError as error:
            self._doubts[f"a recorded state cannot be used: {error}"] = None
        return ReaderAudit(
            name=self._name,
            table="" if identity is None else identity.table,
            tail="" if identity is None else identity.tail,
            endless=identity is not None and identity.endless,
            topologies=tuple(self._topologies),
            epochs=tuple(epochs),
            findings=tuple(findings),
            doubts=tuple(self._doubts),
            notes=tuple(self._notes),
            skips=tuple(self._skips),
            inferred=self._inferred,
        )

    # --- the records

    def _collect(self) -> tuple[ReaderState, ReaderState]:
        """Take in all stretches. Returns the state that the reader began with, and the newest one."""
        origin: ReaderState | None = None
        tip: ReaderState | None = None
        tables: dict[str, Identity] = {}
        for manifest, record in self._records:
            for stretch in record.stretches:
                begin, end = ReaderState.from_plain(stretch.begin), ReaderState.from_plain(stretch.end)
                origin = origin or begin
                tables[order_name(begin.identity)] = begin.identity
                self._take(manifest, begin, end, stretch.consumed)
                self._follow(begin)
                self._follow(end)
            tip = ReaderState.from_plain(record.state)
            self._follow(tip)
            origin = origin or tip
            self._topologies[tip.segment.topology] = None
            told = [one for one in record.stretches if one.consumed or one.basis != "suspected"]
            if told:
                self._check_frontier(manifest, record, ReaderState.from_plain(told[-1].end))
        assert tip is not None and origin is not None
        tables[order_name(tip.identity)] = tip.identity
        for _, identity in sorted(tables.items()):
            self._check_table(identity)
        self._check_origin(origin)
        return origin, tip

    def _take(
        self, manifest: Manifest, begin: ReaderState, end: ReaderState, recorded: Mapping[int, Intervals]
    ) -> None:
        self._topologies[begin.segment.topology] = None
        try:
            derived = consumption(begin, end)
        except StateMismatch as error:
            self._doubts[f"slot {manifest.slot}: two recorded states do not follow from one another: {error}"] = None
        else:
            if derived != {epoch: positions for epoch, positions in recorded.items() if positions}:
                self._doubts[
                    f"slot {manifest.slot}: the recorded intervals are not those that follow from the recorded states"
                ] = None
        rows = begin.identity.rows
        for epoch, positions in recorded.items():
            if positions and positions.stops[-1] > rows:
                self._doubts[f"slot {manifest.slot}: positions beyond the {rows:,} rows of epoch {epoch}"] = None
                positions = positions.intersection(Intervals.whole(rows))
            positions = positions.difference(undealt(end, epoch))
            if positions:
                self._pieces.setdefault(epoch, []).append(piece_of(begin, epoch, positions, manifest))

    def _follow(self, state: ReaderState) -> None:
        """Note the last state of each epoch: its plan says what the tail leaves out.

        What is left of an epoch may be too little for the next topology: then no step of that epoch shows it, and the
        last state of the epoch is planned anew for the topology of the next one, as the reader did.
        """
        before = self._latest
        if before is not None:
            self._follow_to_rest(before, state)
        if before is not None and before.epoch < state.epoch:
            lanes, batch_size, world_size = state.segment.topology
            last = replan(
                replace(before, identity=state.identity.of_version(before.identity)),
                num_lanes=lanes,
                batch_size=batch_size,
                world_size=world_size,
            )
            self._ends[before.epoch] = last if Plan(last).at_end else before
        self._ends[state.epoch] = state
        self._latest = state

    def _check_frontier(self, manifest: Manifest, record: ReaderRecord, end: ReaderState) -> None:
        """The record of optimizer steps must end where the last stretch does."""
        frontier = record.steps.frontier(manifest.step)
        if frontier is None:
            return
        # In row-wise use the last row of a micro-batch is the first place of the next step.
        following = (frontier.epoch, frontier.step + 1, 0) if frontier.row else frontier
        if (end.epoch, end.step, end.row) not in (tuple(frontier), tuple(following)):
            self._doubts[
                f"slot {manifest.slot}: what was consumed ends at epoch {end.epoch}, step {end.step}, and the record "
                f"of optimizer steps at epoch {frontier.epoch}, step {frontier.step}"
            ] = None

    def _check_table(self, identity: Identity) -> None:
        table, order = identity.table, self._orders.get(order_name(identity))
        if order is None:
            what = f"row selection {identity.selection[:12]} of" if identity.selection else "index of"
            self._doubts[
                f"the {what} table {table[:12]} cannot be read: how many rows it has is only the states' word, and "
                "no row can be named"
            ] = None
        elif identity.rows != order.num_rows:
            what = "the row selection of" if identity.selection else "the index of"
            self._doubts[
                f"the states count {identity.rows:,} rows, and {what} table {table[:12]} {order.num_rows:,}"
            ] = None

    def _check_origin(self, origin: ReaderState) -> None:
        before = {epoch: positions.size for epoch, positions in consumed(origin).items()}
        if before:
            self._doubts[
                f"the record begins inside of epoch {max(before)}: {sum(before.values()):,} rows had been consumed "
                "before it, by the word of the state that the reader began with"
            ] = None
        elif origin.epoch:
            self._notes[f"it began with epoch {origin.epoch}; the epochs before are not part of this run"] = None

    # --- the epochs

    def _epochs(self, origin: ReaderState, tip: ReaderState, known: Mapping[int, Intervals]) -> range:
        touched = [*self._pieces, *known]
        if tip.identity.endless:
            return range(min([0, *touched]), max([-1, *touched]) + 1)
        return range(min([origin.epoch, *touched]), max([tip.epoch, *touched]) + 1)

    def _follow_to_rest(self, before: ReaderState, state: ReaderState) -> None:
        """Note where ``state`` is of what is left of an epoch in another version, in whose midst ``before`` was."""
        rest, earlier = (self._rest_of(one.identity) for one in (state, before))
        is_same_epoch = rest is not None and rest.epoch == before.epoch == state.epoch
        if rest is None or not is_same_epoch or before.identity.table == state.identity.table:
            return
        self._carried.setdefault(state.epoch, []).append(before)
        read = consumed(before).get(state.epoch, Intervals.empty()).size
        read += 0 if earlier is None else earlier.taken.total
        if read != rest.taken.total:
            self._doubts[
                f"{read:,} rows of epoch {state.epoch} had been consumed when it was carried over to another version, "
                f"and {rest.taken.total:,} of them were found there"
            ] = None

    def _rest_of(self, identity: Identity) -> RestOfEpoch | None:
        order = self._orders.get(order_name(identity))
        return None if order is None else order.index.rest

    def _audit_carried(
        self,
        epoch: int,
        origin: ReaderState,
        state: ReaderState,
        epochs: list[EpochAudit],
        findings: list[Finding],
    ) -> None:
        """What was read of an epoch up to ``state``, from where it was carried over to another version."""
        name, known = order_name(state.identity), consumed(state)
        later, by_kind = self._ends.get(epoch), (self._pieces, self._skipped)
        every = [(pieces, pieces.get(epoch, [])) for pieces in by_kind]
        for pieces, some in every:
            pieces[epoch] = [one for one in some if order_name(one.identity) == name]
        self._ends[epoch] = state
        self._audit_epoch(epoch, origin, state, known, epochs, findings)
        for pieces, some in every:
            pieces[epoch] = [one for one in some if order_name(one.identity) != name]
        if later is not None:
            self._ends[epoch] = later
        if epochs and epochs[-1].epoch == epoch:
            one = epochs[-1]  # what its ends would have dropped was carried over, too
            epochs[-1] = replace(one, status="carried over", dropped=0, left=one.left + one.dropped)
        self._notes[
            f"what was left of epoch {epoch} was carried over to another version of the table; that these are the same "
            "rows was proved by a key, then"
        ] = None

    def _audit_epoch(
        self,
        epoch: int,
        origin: ReaderState,
        tip: ReaderState,
        known: Mapping[int, Intervals],
        epochs: list[EpochAudit],
        findings: list[Finding],
    ) -> None:
        pieces, newest = self._pieces.get(epoch, []), self._records[-1][0]
        begun = origin.identity.endless or epoch == origin.epoch
        inherits = begun and (origin.identity.table == tip.identity.table or epoch not in self._carried)
        before = self._claim(origin, epoch, self._records[0][0]) if inherits else None
        claim = self._claim(tip, epoch, newest, known)
        told = [*pieces, *(one for one in (before, claim) if one is not None)]
        status = _status(epoch, tip, claim)
        rows = self._identity_of(epoch, tip).rows
        if not told and (status == "in progress" or not rows):
            return  # not begun
        if status == "complete" and epoch in self._given_up:
            status = "given up"
            self._notes[f"the rest of epoch {epoch} was given up: its table version was gone"] = None
        tables = {piece.identity.table for piece in told}
        if len(tables) > 1:
            self._doubts[f"epoch {epoch} was read from {len(tables)} versions of the table, by the user's leave"] = None
        if len({piece.identity.selection for piece in told}) > 1:
            self._doubts[f"epoch {epoch} was read with several filters, by the user's leave"] = None
        missing = self._skipped.get(epoch, [])
        space = space_of([*told, *missing], self._orders) if told else Space(self._orders, None)
        if space is None:
            self._doubts[f"epoch {epoch} was read in orders that cannot be compared, and is not counted"] = None
            return
        counted = count_epoch(
            epoch,
            rows=rows,
            status=status,
            space=space,
            pieces=pieces,
            before=before,
            claim=claim,
            skipped=missing,
            dropped=self._dropped(epoch) if status == "complete" else None,
        )
        epochs.append(counted.audit)
        if counted.twice_first is not None:
            findings.append(self._finding("repeated", epoch, counted.twice, counted.twice_first, space, tip))
        if counted.lost:
            findings.append(
                self._finding("lost", epoch, counted.lost, self._first_to_claim(epoch, counted.lost, space), space, tip)
            )
        if counted.again:
            findings.append(self._finding("again", epoch, counted.again, newest, space, tip))

    def _claim(
        self, state: ReaderState, epoch: int, manifest: Manifest, known: Mapping[int, Intervals] | None = None
    ) -> Piece | None:
        """What of ``epoch`` a state takes for consumed; None: nothing. ``known`` is `consumed` of the state."""
        if not state.identity.endless and epoch != state.epoch:
            if epoch > state.epoch:
                return None
            identity = self._identity_of(epoch, state)
            key = LayoutKey(epoch=epoch, num_lanes=state.segment.num_lanes, rotation=0)
            whole = Intervals.whole(identity.rows)
            return Piece(identity=identity, key=key, positions=whole, manifest=manifest) if whole else None
        found = consumed(state) if known is None else known
        positions = found.get(epoch, Intervals.empty()).difference(undealt(state, epoch))
        return piece_of(state, epoch, positions, manifest) if positions else None

    def _identity_of(self, epoch: int, state: ReaderState) -> Identity:
        """The identity that ``epoch`` was read by: each epoch may be of another version; else that of ``state``."""
        end = None if state.identity.endless else self._ends.get(epoch)
        return state.identity if end is None else end.identity

    def _dropped(self, epoch: int) -> Piece | None:
        """What the ends leave out of ``epoch`` on purpose, by the plan of its last stretch."""
        end = self._ends.get(epoch)
        steps = None if end is None else Plan(end).steps
        if end is None or steps is None or end.identity.tail == "short":
            return None
        plan = Plan(end)
        left = plan.rest(steps).of(epoch, end.identity.rows).union(undealt(end, epoch))
        return piece_of(end, epoch, left, self._records[-1][0]) if left else None

    # --- findings

    def _first_to_claim(self, epoch: int, rows: Intervals, space: Space) -> Manifest:
        """The first checkpoint whose state takes any of ``rows`` for consumed."""
        for manifest, record in self._records:
            claim = self._claim(ReaderState.from_plain(record.state), epoch, manifest)
            if claim is not None and space.of(claim).intersection(rows):
                return manifest
        return self._records[-1][0]

    def _finding(
        self, kind: FindingKind, epoch: int, found: Intervals, manifest: Manifest, space: Space, tip: ReaderState
    ) -> Finding:
        rows = space.table_rows(found.take(0, min(found.size, _NAMED_ROWS)))
        order = self._orders.get(order_name(self._identity_of(epoch, tip)))
        where = [] if rows is None or order is None else name_rows(order, rows, most=self._named_groups)
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


def _status(epoch: int, tip: ReaderState, claim: Piece | None) -> EpochStatus:
    if tip.identity.endless:
        return "complete" if claim is not None and claim.is_whole else "in progress"
    if epoch == tip.epoch:
        return "complete" if Plan(tip).at_end else "in progress"
    return "complete" if epoch < tip.epoch else "left behind"
