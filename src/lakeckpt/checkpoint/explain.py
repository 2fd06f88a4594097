"""Which rows made optimizer step K?  Found from the ledger, the footer index and the order, without reading the table.

The manifest whose record holds step K says up to where the reader had been consumed after each of its steps, and
between which states it went. What lies between steps K-1 and K is dealt to the ranks again by the same plan, and its
positions are looked up in the order.

Reads only ``log/`` and ``index/``. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lakeckpt.checkpoint.audit import orders_of, read_run
from lakeckpt.checkpoint.ledger import History, index_path, selection_path
from lakeckpt.checkpoint.log import slot_path
from lakeckpt.checkpoint.manifest import Manifest, ReaderRecord
from lakeckpt.checkpoint.rows import GroupRows, Order, name_rows, order_name
from lakeckpt.checkpoint.skipped import rows_skipped
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import LayoutKey, Plan
from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.core.state import Identity, ReaderState
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, ConfigError
from lakeckpt.lake.storage import Storage
from lakeckpt.tracking.steps import Frontier

__all__ = ["MicroBatch", "RankRows", "ReaderStep", "StepExplained", "explain", "explain_history"]

Place = tuple[int, int]
"""(loader steps done, rows of the next micro-batch done)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one rank got in one step of its loader."""

    number: int
    lane: int
    """-1 where an epoch's last rows are dealt out equally."""
    loader_step: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """The rows of one rank."""

    rank: int
    micro_batches: tuple[MicroBatch, ...]
    table_rows: npt.NDArray[np.int64] = field(repr=False, compare=False)
    """int64, shape (rows,): rows of the table (row group after row group), in the order in which they were read."""
    where: tuple[GroupRows, ...]
    """The same by file and row group."""
    skipped: int = 0
    """Rows that were dealt to the rank and had not come, being damaged; they are not among the others."""

    @property
    def rows(self) -> int:
        """How many rows the rank got."""
        return len(self.table_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderStep:
    """What one reader gave to an optimizer step."""

    reader: str
    table: str
    """Digest of the pinned table."""
    selection: str
    """Digest of the row selection; empty: every row."""
    world_size: int
    epochs: tuple[int, ...]
    ranks: tuple[RankRows, ...]
    order: Order = field(repr=False, compare=False)

    @property
    def rows(self) -> int:
        """Rows of the ranks that were asked for."""
        return sum(rank.rows for rank in self.ranks)

    def to_plain(self, *, every_row: bool = False) -> dict[str, object]:
        """JSON-able values; with ``every_row``, each row as [file, row group, row] in the order of reading."""
        return {
            "reader": self.reader,
            "table": self.table,
            "selection": self.selection,
            "world_size": self.world_size,
            "epochs": list(self.epochs),
            "rows": self.rows,
            "ranks": [self._rank_to_plain(rank, every_row) for rank in self.ranks],
        }

    def _rank_to_plain(self, rank: RankRows, every_row: bool) -> dict[str, object]:
        plain: dict[str, object] = {
            "rank": rank.rank,
            "rows": rank.rows,
            "skipped": rank.skipped,
            "micro_batches": [
                {
                    "number": one.number,
                    "lane": one.lane,
                    "loader_step": one.loader_step,
                    "positions": [[span.epoch, span.start, span.stop] for span in one.spans],
                }
                for one in rank.micro_batches
            ],
            "row_groups": [one.to_plain() for one in rank.where],
        }
        if every_row:
            plain["order"] = [list(self.order.place(row)) for row in rank.table_rows.tolist()]
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplained:
    """The rows of an optimizer step of the history."""

    run: str
    step: int
    slot: int
    """The checkpoint whose record holds the step."""
    attempt: int
    world_size: int
    readers: tuple[ReaderStep, ...]

    def to_plain(self, *, every_row: bool = False) -> dict[str, object]:
        """JSON-able values; see `ReaderStep.to_plain`."""
        return {
            "run": self.run,
            "step": self.step,
            "slot": self.slot,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "readers": [reader.to_plain(every_row=every_row) for reader in self.readers],
        }


def explain(
    storage: Storage, step: int, *, tip: int | None = None, ranks: Collection[int] | None = None
) -> StepExplained:
    """The rows of optimizer step ``step`` (counted from 1) of the run at ``storage``, for all ranks or for ``ranks``.

    The history is that of the newest checkpoint, or of the one in slot ``tip``. Raises `CheckpointNotFound` for a step
    that it does not have, `CheckpointDamaged` where the record or the index cannot be read, `ConfigError` for a rank
    that there is not.
    """
    history = read_run(storage, tip=tip)
    return explain_history(history, orders_of(storage, history), step, ranks=ranks)


def explain_history(
    history: History, orders: Mapping[str, Order], step: int, *, ranks: Collection[int] | None = None
) -> StepExplained:
    """As `explain`, of a history that was read; ``orders`` are those of its tables by digest."""
    manifest = _holder(history, step)
    readers = []
    for name, record in sorted(manifest.readers.items()):
        readers += _Explainer(manifest, name, record, orders).steps(step, ranks)
    if not readers:
        raise CheckpointNotFound(f"{slot_path(manifest.slot)}: no reader was tracked, and no rows were recorded")
    return StepExplained(
        run=manifest.run,
        step=step,
        slot=manifest.slot,
        attempt=manifest.attempt,
        world_size=manifest.world_size,
        readers=tuple(readers),
    )


def _holder(history: History, step: int) -> Manifest:
    """The manifest whose record holds ``step``."""
    if step < 1:
        raise ConfigError(f"optimizer steps are counted from 1, got {step}")
    tip = history.tip
    if tip is None or step > tip.step:
        reached = "has no checkpoint" if tip is None else f"ends at step {tip.step:,}"
        raise CheckpointNotFound(f"the history {reached}: step {step:,} was not committed, or was rolled back")
    found = next(manifest for manifest in history.chain if manifest.step >= step)
    firsts = [record.steps.runs[0].first for record in found.readers.values() if record.steps.runs]
    if history.broken_at is not None and found is history.chain[0] and (not firsts or step < min(firsts)):
        raise CheckpointDamaged(
            f"step {step:,} lies before what can be read of the history: {slot_path(history.broken_at)} is damaged"
        )
    return found


class _Explainer:
    """One reader in one manifest."""

    def __init__(self, manifest: Manifest, name: str, record: ReaderRecord, orders: Mapping[str, Order]) -> None:
        self._manifest = manifest
        self._name = name
        self._record = record
        state = ReaderState.from_plain(record.state)
        self._identity = state.identity
        self._orders = orders
        self._pairs = [
            (ReaderState.from_plain(stretch.begin), ReaderState.from_plain(stretch.end)) for stretch in record.stretches
        ]

    def steps(self, step: int, ranks: Collection[int] | None) -> list[ReaderStep]:
        """The rows of ``step``; one entry for each table version that it read of, where an epoch began inside of it."""
        by_order: dict[str, tuple[Identity, list[tuple[Plan, Place, Place]]]] = {}
        for one in self._stretches(step):
            identity = one[0].state.identity
            by_order.setdefault(order_name(identity), (identity, []))[1].append(one)
        if not by_order:
            by_order[order_name(self._identity)] = self._identity, []
        return [self._step(step, ranks, identity, stretches) for identity, stretches in by_order.values()]

    def _order_of(self, identity: Identity) -> Order:
        order = self._orders.get(order_name(identity))
        if order is None:
            table, selection = identity.table, identity.selection
            paths = [index_path(table), *([selection_path(table, selection)] if selection else [])]
            raise CheckpointDamaged(
                f"{' or '.join(paths)} cannot be read, and without it no row of {self._name!r} can be named"
            )
        return order

    def _step(
        self,
        step: int,
        ranks: Collection[int] | None,
        identity: Identity,
        stretches: list[tuple[Plan, Place, Place]],
    ) -> ReaderStep:
        order = self._order_of(identity)
        world_size = stretches[0][0].segment.world_size if stretches else self._manifest.world_size
        wanted = sorted(range(world_size) if ranks is None else set(ranks))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < world_size:
            raise ConfigError(f"step {step:,} was made by ranks 0 to {world_size - 1}, there is no rank {wanted[-1]}")
        found = [self._rank(rank, stretches, identity) for rank in wanted]
        epochs = {span.epoch for rank in found for one in rank.micro_batches for span in one.spans}
        return ReaderStep(
            reader=self._name,
            table=identity.table,
            selection=identity.selection,
            world_size=world_size,
            epochs=tuple(sorted(epochs)),
            ranks=tuple(found),
            order=order,
        )

    # --- between which places did the step go?

    def _stretches(self, step: int) -> Iterator[tuple[Plan, Place, Place]]:
        """What the step consumed: (plan, from, to), each in one stretch."""
        at, begin = 0, _place(self._pairs[0][0]) if self._pairs else (0, 0)
        for frontier, is_it in self._frontiers(step):
            upto = self._find(frontier, at, begin)
            if upto is None:
                continue  # nothing was consumed yet since the parent
            if is_it:
                for index in range(at, upto + 1):
                    first, last = self._pairs[index]
                    low = begin if index == at else _place(first)
                    high = (frontier.step, frontier.row) if index == upto else _place(last)
                    if low < high:
                        yield Plan(last), low, high
            at, begin = upto, (frontier.step, frontier.row)

    def _frontiers(self, step: int) -> Iterator[tuple[Frontier, bool]]:
        """The frontiers up to that of ``step`` that tell the way, and whether each is that of ``step``."""
        for run in self._record.steps.runs:
            if run.first > step:
                return
            index = min(step - run.first, run.count - 1)
            for one in sorted({0, max(index - 1, 0), index}):
                yield run.at(one), run.first + one == step

    def _find(self, frontier: Frontier, at: int, begin: Place) -> int | None:
        """The first stretch from ``at`` on in which ``frontier`` lies; None where it lies before all of them.

        A frontier that does not move is a step that read nothing, not one that began the epoch again and came as far.
        """
        place = (frontier.step, frontier.row)
        for index in range(at, len(self._pairs)):
            first, last = self._pairs[index]
            low = begin if index == at else _place(first)
            if first.epoch == frontier.epoch and low <= place <= _place(last):
                return index
        start = self._pairs[0][0] if self._pairs else None
        if start is None or (at == 0 and begin == _place(start) and frontier.epoch < start.epoch):
            return None
        raise CheckpointDamaged(
            f"{slot_path(self._manifest.slot)}: the record of optimizer steps of {self._name!r} names epoch "
            f"{frontier.epoch}, step {frontier.step}, and no recorded stretch goes there"
        )

    # --- which rows are that?

    def _rank(self, rank: int, stretches: list[tuple[Plan, Place, Place]], identity: Identity) -> RankRows:
        order, missing = self._order_of(identity), self._missing(identity)
        micro_batches, rows, skipped = [], [np.zeros(0, np.int64)], 0
        for plan, low, high in stretches:
            for loader_step in range(low[0], high[0] + (high[1] > 0)):
                assignment = plan.assignment(loader_step, rank)
                start = low[1] if loader_step == low[0] else 0
                stop = high[1] if loader_step == high[0] else assignment.receipt.rows
                spans = _cut(assignment.receipt, start, stop)
                keys = {key.epoch: key for key in assignment.layouts}
                came = [_without(missing.get(span.epoch), _rows(span, keys[span.epoch], plan, order)) for span in spans]
                skipped += sum(span.rows for span in spans) - sum(map(len, came))
                rows += came
                micro_batches.append(
                    MicroBatch(
                        number=assignment.receipt.micro_batch,
                        lane=assignment.receipt.lane,
                        loader_step=loader_step,
                        spans=tuple(spans),
                    )
                )
        found = np.concatenate(rows)
        every = Intervals.of([(row, row + 1) for row in found.tolist()])
        return RankRows(
            rank=rank,
            micro_batches=tuple(micro_batches),
            table_rows=found,
            where=tuple(name_rows(order, every, most=len(found))),
            skipped=skipped,
        )

    def _missing(self, identity: Identity) -> dict[int, Intervals]:
        return rows_skipped(self._record.skips, identity, self._order_of(identity))


def _rows(span: Span, key: LayoutKey, plan: Plan, order: Order) -> npt.NDArray[np.int64]:
    return order.locate(plan.state.identity.spec, key, Intervals.of([(span.start, span.stop)]))


def _without(missing: Intervals | None, found: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The table rows ``found``, less those that were skipped."""
    if not missing:
        return found
    before = np.searchsorted(missing.starts, found, side="right") - 1
    return found[(before < 0) | (found >= missing.stops[before])]


def _place(state: ReaderState) -> Place:
    return state.step, state.row


def _cut(receipt: Receipt, start: int, stop: int) -> list[Span]:
    """The rows ``start`` to ``stop`` (exclusive) of a micro-batch."""
    found, before = [], 0
    for span in receipt.spans:
        low, high = max(start - before, 0), min(stop - before, span.rows)
        if low < high:
            found.append(Span(epoch=span.epoch, start=span.start + low, stop=span.start + high))
        before += span.rows
    return found
