"""This module finds the rows that made one optimizer step.

One manifest holds the record of step K: the place of the reader after each step, and the states between which it moved.
The same plan deals the rows between steps K-1 and K to the ranks again, and their positions are looked up in the order.

The module reads only ``log/`` and ``index/``, and never the table, unless documents of packed sequences are to be
named (`lakeckpt.checkpoint.ledger.document_finder`). It never imports torch, and starts no threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from lakeckpt.checkpoint.consumed.rows import GroupRows, RowOrder, name_rows, order_name
from lakeckpt.checkpoint.consumed.source_records import SourceRecord, readers_in
from lakeckpt.checkpoint.consumed.steps_used import StepsUsed
from lakeckpt.checkpoint.format.manifest import Excluded, Manifest
from lakeckpt.checkpoint.ledger.audit import read_run
from lakeckpt.checkpoint.ledger.audit_report import plain_of
from lakeckpt.checkpoint.ledger.document_finder import DocumentFinder, DocumentTokens
from lakeckpt.checkpoint.ledger.indexes import orders_of
from lakeckpt.checkpoint.persist.history import History, index_path, selection_path
from lakeckpt.checkpoint.persist.log import slot_path
from lakeckpt.core.identity import Identity
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.plan import LayoutKey, Plan
from lakeckpt.core.receipts import Span
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, ConfigError
from lakeckpt.lake.storage.base import Storage

__all__ = ["MicroBatch", "RankRows", "ReaderStep", "StepExplained", "explain", "explain_history"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The rows that one rank got in one step of its loader."""

    number: int
    lane: int
    """The lane; -1 if an epoch's last rows are divided equally."""
    loader_step: int
    spans: tuple[Span, ...]
    excluded: str = ""
    """Why its rows trained nothing (`ExcludedFor`); empty: the step used them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """The rows of one rank."""

    rank: int
    micro_batches: tuple[MicroBatch, ...]
    table_rows: npt.NDArray[np.int64] = field(repr=False, compare=False)
    """int64, shape (rows,): rows of the table (row group after row group), in the order in which they were read; packed
    sequences by their numbers in the epoch."""
    where: tuple[GroupRows, ...]
    """The same rows by file and row group. Of packed sequences: the tokens of the windows that hold them, because only
    the table has the lengths of documents."""
    documents: tuple[DocumentTokens, ...] | None = None
    """The documents in the packed sequences, in the order of delivery; None: rows were read, or no table was given."""

    @property
    def rows(self) -> int:
        """How many rows, or packed sequences, the rank got."""
        return len(self.table_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderStep:
    """The rows that one reader gave to an optimizer step."""

    reader: str
    table: str
    """Digest of the pinned table."""
    selection: str
    """Digest of the row selection; empty: every row."""
    world_size: int
    epochs: tuple[int, ...]
    ranks: tuple[RankRows, ...]
    order: RowOrder = field(repr=False, compare=False)
    left_out: tuple[Excluded, ...] = ()
    """What left the deal before the step: no rank got it."""

    @property
    def rows(self) -> int:
        """Rows of the ranks that were asked for."""
        return sum(rank.rows for rank in self.ranks)

    def to_plain(self, *, every_row: bool = False) -> dict[str, object]:
        """Return JSON-able values; with ``every_row``, each row as [file, row group, row] in the order of reading, and
        "selected" behind it if the row is counted among those that the filter keeps."""
        return {
            "reader": self.reader,
            "table": self.table,
            "selection": self.selection,
            "world_size": self.world_size,
            "epochs": list(self.epochs),
            "rows": self.rows,
            "left_out": [
                {"reason": one.reason, "rows": _size(one), "steps": None if one.steps is None else list(one.steps)}
                for one in self.left_out
            ],
            "ranks": [
                {
                    "rank": rank.rank,
                    "rows": rank.rows,
                    "micro_batches": plain_of(rank.micro_batches),
                    "row_groups": plain_of(rank.where),
                    **({} if rank.documents is None else {"documents": plain_of(rank.documents)}),
                    **({"order": [self._place(row) for row in rank.table_rows.tolist()]} if every_row else {}),
                }
                for rank in self.ranks
            ],
        }

    def _place(self, row: int) -> tuple[object, ...]:
        return (*self.order.place(row), *(() if self.order.is_stored(row) else ("selected",)))


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
        """Return JSON-able values; see `ReaderStep.to_plain`."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**plain, "readers": [reader.to_plain(every_row=every_row) for reader in self.readers]}


def explain(
    storage: Storage,
    step: int,
    *,
    tip: int | None = None,
    ranks: Collection[int] | None = None,
    documents: DocumentFinder | None = None,
) -> StepExplained:
    """Return the rows of optimizer step ``step`` (from 1) of the run at ``storage``, for all ranks or for ``ranks``.

    The history is that of the newest checkpoint, or of the checkpoint in slot ``tip``. ``documents`` names those that
    stand in packed sequences. Raises `CheckpointNotFound` if the history does not have the step, `CheckpointDamaged` if
    the record or the index cannot be read, `ConfigError` for a rank that does not exist, and what `DocumentFinder.of`
    does.
    """
    history = read_run(storage, tip=tip)
    return explain_history(history, orders_of(storage, history), step, ranks=ranks, documents=documents)


def explain_history(
    history: History,
    orders: Mapping[str, RowOrder],
    step: int,
    *,
    ranks: Collection[int] | None = None,
    documents: DocumentFinder | None = None,
) -> StepExplained:
    """Explain a step as `explain` does, from a history and the orders of its tables."""
    manifest = _holder(history, step)
    if not all(record.steps.is_known(step) for record in manifest.readers.values()):
        raise CheckpointNotFound(
            f"other processes did step {step:,}, and this run got their state: the log has the rows of the steps up to "
            "it together. `lakeckpt audit` counts these rows"
        )
    explainers = [_Explainer(manifest, name, record, orders) for name, record in readers_in(manifest).items()]
    if documents is not None:
        _packed_one(explainers, documents.reader).documents = documents
    readers = [one for explainer in explainers for one in explainer.steps(step, ranks)]
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
    """Return the manifest whose record holds ``step``."""
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


def _packed_one(explainers: Sequence[_Explainer], name: str | None) -> _Explainer:
    """Return the reader of packed sequences that is called ``name``; None: the only one."""
    packed = {one.name: one for one in explainers if one.is_packed}
    if not packed:
        raise ConfigError("--table names the documents of packed sequences, and this run reads rows: leave it out")
    wanted = next(iter(packed)) if name is None and len(packed) == 1 else name
    if wanted not in packed:
        found = f"there is no {name!r}" if name is not None else "there are several"
        raise ConfigError(
            f"--reader says which reader of packed sequences reads the --table, and {found}: {', '.join(packed)}"
        )
    return packed[wanted]


class _Explainer:
    """One reader in one manifest."""

    def __init__(self, manifest: Manifest, name: str, record: SourceRecord, orders: Mapping[str, RowOrder]) -> None:
        self._manifest = manifest
        self.name = name
        self._record = record
        if record.state.held is not None:
            raise ConfigError(
                f"which rows of {name!r} made a step depends on what its transform yielded, and the log has that from "
                "checkpoint to checkpoint only: `lakeckpt audit` counts these rows"
            )
        self._identity = record.state.identity
        self.is_packed = self._identity.unit > 1
        self._orders = orders
        self.documents: DocumentFinder | None = None
        self._used = StepsUsed(name, record, slot_path(manifest.slot))

    def steps(self, step: int, ranks: Collection[int] | None) -> list[ReaderStep]:
        """Return the rows of ``step``, one entry for each table version that it read."""
        by_order: dict[str, tuple[Identity, list[tuple[Plan, int, int]]]] = {}
        for state, low, high in self._used.between(step, step):
            for identity in state.epoch_orders:
                by_order.setdefault(order_name(identity), (identity, []))[1].append((Plan(state), low, high))
        if not by_order:
            by_order[order_name(self._identity)] = self._identity, []
        every = [self._step(step, ranks, identity, stretches) for identity, stretches in by_order.values()]
        found = [one for one in every if one.epochs] or every[-1:]
        left_out = tuple(one for one in self._record.excluded if one.step == step and one.reason != "trainer")
        return [replace(found[0], left_out=left_out), *found[1:]]

    def _order_of(self, identity: Identity) -> RowOrder:
        order = self._orders.get(order_name(identity))
        if order is None:
            table, selection = identity.table, identity.selection
            paths = [index_path(table), *([selection_path(table, selection)] if selection else [])]
            raise CheckpointDamaged(
                f"{' or '.join(paths)} cannot be read, and without it no row of {self.name!r} can be named"
            )
        return order

    def _step(
        self,
        step: int,
        ranks: Collection[int] | None,
        identity: Identity,
        stretches: list[tuple[Plan, int, int]],
    ) -> ReaderStep:
        order = self._order_of(identity)
        world_size = stretches[0][0].segment.world_size if stretches else self._manifest.world_size
        wanted = sorted(range(world_size) if ranks is None else set(ranks))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < world_size:
            raise ConfigError(f"step {step:,} was made by ranks 0 to {world_size - 1}, there is no rank {wanted[-1]}")
        found = [self._rank(rank, stretches, identity) for rank in wanted]
        epochs = {span.epoch for rank in found for one in rank.micro_batches for span in one.spans}
        return ReaderStep(
            reader=self.name,
            table=identity.table,
            selection=identity.selection,
            world_size=world_size,
            epochs=tuple(sorted(epochs)),
            ranks=tuple(found),
            order=order,
        )

    # --- the rows between two places

    def _rank(self, rank: int, stretches: list[tuple[Plan, int, int]], identity: Identity) -> RankRows:
        order = self._order_of(identity)
        micro_batches, rows = [], [np.zeros(0, np.int64)]
        tokens: list[GroupRows] = []
        named: list[DocumentTokens] = []
        for plan, low, high in stretches:
            for loader_step in range(low, high):
                assignment = plan.assignment(loader_step, rank)
                receipt, keys = assignment.receipt, {key.epoch: key for key in assignment.layouts}
                spans = tuple(span for span in receipt.spans if plan.state.order_of(span.epoch) == identity)
                if receipt.spans and not spans:
                    continue
                rows += [_rows(span, keys[span.epoch], plan, order) for span in spans]
                if order.unit > 1:
                    self._add_packed(tokens, named, spans, keys, identity)
                micro_batches.append(
                    MicroBatch(
                        number=receipt.micro_batch,
                        lane=receipt.lane,
                        loader_step=loader_step,
                        spans=spans,
                        excluded=self._why_excluded(rank, spans),
                    )
                )
        found = np.concatenate(rows)
        every = Intervals.of([(row, row + 1) for row in found.tolist()])
        return RankRows(
            rank=rank,
            micro_batches=tuple(micro_batches),
            table_rows=found,
            where=tuple(tokens if order.unit > 1 else name_rows(order, every)),
            documents=None if self.documents is None else tuple(named),
        )

    def _why_excluded(self, rank: int, spans: Sequence[Span]) -> str:
        """Return why the rows of a micro-batch of ``rank`` trained nothing; empty if a step used them."""
        for one in self._record.excluded:
            if one.rank == rank and all(_interval(span).size == _common(one, span).size for span in spans):
                return one.reason
        return ""

    def _add_packed(
        self,
        tokens: list[GroupRows],
        named: list[DocumentTokens],
        spans: Sequence[Span],
        keys: Mapping[int, LayoutKey],
        identity: Identity,
    ) -> None:
        """Add the tokens of the windows that hold packed sequences, and the documents that stand in these sequences."""
        order = self._order_of(identity)
        for span in spans:
            layout = order.layout(identity.spec, keys[span.epoch], identity.endless)
            tokens += order.tokens_of(layout, _interval(span))
            if self.documents is not None:
                named += self.documents.of(order, layout, _interval(span))


def _rows(span: Span, key: LayoutKey, plan: Plan, order: RowOrder) -> npt.NDArray[np.int64]:
    if order.unit > 1:
        return np.arange(span.start, span.stop)
    return order.locate(plan.state.identity.spec, key, _interval(span))


def _size(excluded: Excluded) -> int:
    return sum(one.size for one in excluded.positions.values())


def _common(excluded: Excluded, span: Span) -> Intervals:
    return _interval(span).intersection(excluded.positions.get(span.epoch, Intervals.empty()))


def _interval(span: Span) -> Intervals:
    return Intervals.of([(span.start, span.stop)])
