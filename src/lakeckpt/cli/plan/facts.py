"""This module computes what reading a table takes with a topology: steps, bytes, memory, and what is unwise about it.

*Stored* bytes are those of the wanted columns on disk. *Decoded* bytes are an estimate of what they take in memory
(exact for fixed-width columns; text that is stored by dictionary can take more); see `lakeckpt.cli.plan.columns`. On
each rank, every lane has one window open at a time, and one or two that are prefetched (`memory_limit_bytes` lowers
that). The module reads nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from lakeckpt.cli.output import say_many
from lakeckpt.cli.plan.columns import ColumnBytes
from lakeckpt.cli.plan.filters import Kept
from lakeckpt.core.lanes import Tail
from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.core.plan import Plan, fit_lanes, start
from lakeckpt.core.state import MAX_LANES, Identity
from lakeckpt.errors import ConfigError
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.windows.cache import windows_held_of

__all__ = ["PlanFacts", "Topology", "plan_facts"]

Int64Array = npt.NDArray[np.int64]
_TINY_FILE, _MANY_FILES = 1_000_000, 32
_GIANT_GROUP = 512_000_000
_LARGEST = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How the table is to be read."""

    world_size: int
    workers: int
    batch_size: int
    num_lanes: int | None
    shuffle: bool
    window: int
    tail: Tail

    def __post_init__(self) -> None:
        for name in ("world_size", "batch_size", "window"):
            if not 1 <= getattr(self, name) <= _LARGEST:
                raise ConfigError(f"{name} must be at least 1 and at most {_LARGEST}, got {getattr(self, name)}")
        if self.workers < 0 or (self.num_lanes is not None and self.num_lanes < 1):
            raise ConfigError(f"{self.workers} workers and {self.num_lanes} lanes cannot be")
        if self.lanes > MAX_LANES:
            raise ConfigError(f"an epoch has at most {MAX_LANES} lanes, got {self.lanes}")

    @property
    def lanes(self) -> int:
        """The lanes that a loader would have."""
        return fit_lanes(self.num_lanes, None, self.world_size, self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """All that ``plan`` says."""

    table: str
    format: str
    version: str | None
    """What the format calls it; None: plain Parquet has no versions."""
    version_ms: int | None
    """When it was made: milliseconds since 1970."""
    files: int
    file_bytes: int
    row_groups: int
    rows: int
    """That exist."""
    deleted_rows: int
    """That files hold, and that do not exist in this version."""
    filter: str | None
    """The filter, for people. With one, ``rows`` are those that stay."""
    pruned_row_groups: int
    """Of which no row stays, by the values of partition columns or by statistics."""
    whole_row_groups: int
    """Of which every row stays, by partition values or statistics."""
    tried_row_groups: int
    """Whose rows had to be looked at."""
    columns: tuple[str, ...]
    partition_columns: tuple[str, ...]
    stored_bytes: int
    decoded_bytes: int
    world_size: int
    workers: int
    batch_size: int
    lanes: int
    steps: int
    """Per epoch, on every rank."""
    short_steps: int
    """How many of them have fewer rows than a full global batch."""
    dropped_rows: int
    cut_row_groups: int
    """Row groups that a lane's border cuts: they are decoded once more for each border."""
    windows_open: int
    """Per rank, at once."""
    windows_held: int
    """Per rank, at once: those that are open, those read ahead (as many, two at least in each process that reads), and
    one in each of these processes, of which the loop holds the last micro-batch."""
    window_bytes: int
    """Decoded, on average."""
    memory_bytes: int
    """Expected for windows that are held, per rank."""
    most_memory_bytes: int
    """If the largest windows are held at once."""
    warnings: tuple[str, ...]

    def to_plain(self) -> dict[str, object]:
        """JSON-able values."""
        return asdict(self)


def plan_facts(table: Table, sizes: ColumnBytes, topology: Topology, kept: Kept | None = None) -> PlanFacts:
    """What reading ``table`` on ``topology`` takes; of rows that a filter keeps, where ``kept`` is given."""
    index = table.index
    group_rows = index.group_rows if kept is None else kept.selection.group_rows
    rows = int(group_rows.sum())
    lanes = topology.lanes
    window = topology.window if topology.shuffle else 1
    spec = OrderSpec(seed=0, shuffle=topology.shuffle, window=window)
    identity = Identity(table=index.digest, selection="", rows=rows, spec=spec, tail=topology.tail, endless=False)
    state = start(identity, epoch=0, num_lanes=lanes, batch_size=topology.batch_size, world_size=topology.world_size)
    plan = Plan(state)
    steps = plan.steps or 0
    full = topology.batch_size * topology.world_size
    layout = EpochLayout.build(group_rows, spec, 0, lanes)
    borders = layout.lane_bounds[1:-1]
    inside = borders[~np.isin(borders, layout.begins)]
    cut = len(np.unique(np.searchsorted(layout.begins, inside, side="right")))
    windows = _window_bytes(sizes.decoded[layout.order], window, lanes)
    opened = lanes // topology.world_size
    processes = max(1, topology.workers)
    held = sum(windows_held_of(len(range(process, opened, processes))) + 1 for process in range(min(processes, opened)))
    mean, most = (float(windows.mean()), float(windows.max())) if len(windows) else (0.0, 0.0)
    facts = PlanFacts(
        table=table.uri,
        format=index.version.format,
        version=index.version.name or None,
        version_ms=index.version.timestamp_ms,
        files=len(index.paths),
        file_bytes=int(index.size_bytes.sum()),
        row_groups=len(index.group_rows),
        rows=rows,
        deleted_rows=index.deletes.total,
        filter=None if kept is None else kept.selection.text,
        pruned_row_groups=0 if kept is None else kept.counted.by_partition + kept.counted.by_statistics,
        whole_row_groups=0 if kept is None else kept.counted.whole,
        tried_row_groups=0 if kept is None else kept.counted.decoded,
        columns=sizes.names,
        partition_columns=tuple(one.name for one in index.partitions),
        stored_bytes=int(sizes.stored.sum()),
        decoded_bytes=int(sizes.decoded.sum()),
        world_size=topology.world_size,
        workers=topology.workers,
        batch_size=topology.batch_size,
        lanes=lanes,
        steps=steps,
        short_steps=sum(plan.step_rows(step) < full for step in range(max(0, steps - 2 * lanes - 2), steps)),
        dropped_rows=plan.rest(steps).of(0, rows).size if topology.tail == "drop" else 0,
        cut_row_groups=cut,
        windows_open=opened,
        windows_held=held,
        window_bytes=round(mean),
        memory_bytes=round(held * mean),
        most_memory_bytes=round(held * most),
        warnings=(),
    )
    return _with_warnings(facts, table, sizes, group_rows[group_rows > 0])


def _window_bytes(ordered: Int64Array, window: int, lanes: int) -> npt.NDArray[np.float64]:
    """Decoded bytes of each window; a window lies inside of its lane."""
    if not len(ordered):
        return np.zeros(0)
    sums = np.add.reduceat(ordered, np.arange(0, len(ordered), window)).astype(np.float64)
    return np.asarray(np.minimum(sums, float(ordered.sum()) / lanes), np.float64)


def _with_warnings(facts: PlanFacts, table: Table, sizes: ColumnBytes, rows: Int64Array) -> PlanFacts:
    """``rows`` are those of each row group that has any."""
    found = []
    if facts.files >= _MANY_FILES and facts.file_bytes < _TINY_FILE * facts.files:
        found.append(
            f"tiny files: {facts.files:,} of {facts.file_bytes / facts.files / 1000:,.0f} kB on average; opening them "
            "costs more than reading them. Files of 100 MB and more read best"
        )
    giants = int((sizes.decoded > _GIANT_GROUP).sum())
    if giants:
        where = int(sizes.decoded.argmax())
        file, ordinal = table.index.group(where)
        found.append(
            f"giant row groups: {giants:,} decode to more than 512 MB each; the largest, row group {ordinal} of "
            f"{table.index.paths[file]!r}, to {sizes.decoded[where] / 1e6:,.0f} MB. Write smaller ones, or ask for "
            "fewer columns"
        )
    if len(rows) and float(rows.mean()) < facts.batch_size / 2:
        found.append(
            f"small row groups: {float(rows.mean()):,.0f} rows on average, for micro-batches of {facts.batch_size:,}; "
            "each micro-batch decodes several"
        )
    if 0 < len(rows) < facts.lanes:
        found.append(
            f"more lanes ({facts.lanes}) than row groups with rows ({len(rows):,}): each is decoded about "
            f"{1 + facts.cut_row_groups / len(rows):.1f} times and more; write more row groups, or use fewer workers"
        )
    if facts.rows < facts.world_size:
        found.append(
            f"fewer rows ({facts.rows:,}) than ranks ({facts.world_size}): some get micro-batches without a row"
        )
    if facts.dropped_rows > facts.rows / 100:
        found.append(
            f"drop_last=True leaves out {100 * facts.dropped_rows / facts.rows:.1f} % of each epoch "
            f'({facts.dropped_rows:,} rows); tail="short" keeps them'
        )
    if sizes.with_checksums < sizes.looked_at:
        found.append(
            f"no page checksums: {sizes.looked_at - sizes.with_checksums:,} of {say_many(sizes.looked_at, 'file')} "
            "looked at have none, so damage that still decodes is not noticed. Write them with checksums (pyarrow: "
            "write_page_checksum=True)"
        )
    if facts.deleted_rows > table.num_rows:
        found.append(
            f"mostly deleted: {facts.deleted_rows:,} rows that do not exist are decoded beside {table.num_rows:,} "
            "that do; compact the table"
        )
    if not facts.rows:
        found.append("the table has no rows" if facts.filter is None else "the filter keeps no row")
    return replace(facts, warnings=tuple(found))
