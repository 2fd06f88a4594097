"""This module computes what reading a table takes with a topology: steps, bytes, memory, and what is unwise about it.

*Stored* bytes are those of the wanted columns on disk. *Decoded* bytes are an estimate of what they take in memory
(exact for fixed-width columns; text that is stored by dictionary can take more); see `lakeckpt.cli.plan.columns`. On
each rank, every lane has one window open at a time, and one or two that are prefetched (`memory_limit_bytes` lowers
that). The module reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lakeckpt.cli.plan.columns import ColumnBytes
from lakeckpt.core.changes import fit_lanes, start
from lakeckpt.core.identity import Identity
from lakeckpt.core.order import EpochLayout, OrderSpec, Tail
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import MAX_LANES
from lakeckpt.errors import ConfigError
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.windows.cache import windows_held_of

__all__ = ["PlannedTopology", "plan_facts", "warnings_of"]

Int64Array = npt.NDArray[np.int64]
_TINY_FILE, _MANY_FILES = 1_000_000, 32
_GIANT_GROUP = 512_000_000
_LARGEST = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTopology:
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

    @property
    def windows_held(self) -> int:
        """How many windows a rank holds at once: those that its processes open and read ahead, and one in each
        process, of which the loop holds the last micro-batch."""
        opened, processes = self.lanes // self.world_size, max(1, self.workers)
        each = [len(range(process, opened, processes)) for process in range(min(processes, opened))]
        return sum(windows_held_of(lanes) + 1 for lanes in each)


def plan_facts(table: Table, sizes: ColumnBytes, topology: PlannedTopology) -> dict[str, Any]:
    """Return what reading ``table`` takes, as JSON-able values."""
    index, lanes, rows = table.index, topology.lanes, table.num_rows
    spec = OrderSpec(seed=0, shuffle=topology.shuffle, window=topology.window if topology.shuffle else 1)
    layout = EpochLayout.build(index.group_rows, spec, 0, lanes)
    windows = _window_bytes(sizes.decoded[layout.order], spec.window, lanes)
    mean, most = (float(windows.mean()), float(windows.max())) if len(windows) else (0.0, 0.0)
    return {
        "table": table.uri,
        "format": index.version.format,
        "version": index.version.name or None,
        "version_ms": index.version.timestamp_ms,
        "files": len(index.paths),
        "file_bytes": int(index.size_bytes.sum()),
        "row_groups": len(index.group_rows),
        "rows": rows,
        "deleted_rows": index.deletes.total,
        "columns": list(sizes.names),
        "partition_columns": [one.name for one in index.partitions],
        "stored_bytes": int(sizes.stored.sum()),
        "decoded_bytes": int(sizes.decoded.sum()),
        "world_size": topology.world_size,
        "workers": topology.workers,
        "batch_size": topology.batch_size,
        "lanes": lanes,
        **_steps(index, spec, topology, rows),
        "cut_row_groups": _cut_by_lanes(layout),
        "windows_open": lanes // topology.world_size,
        "windows_held": topology.windows_held,
        "window_bytes": round(mean),
        "memory_bytes": round(topology.windows_held * mean),
        "most_memory_bytes": round(topology.windows_held * most),
    }


def _steps(index: TableIndex, spec: OrderSpec, topology: PlannedTopology, rows: int) -> dict[str, int]:
    """Return the steps of an epoch on every rank, how many of them have fewer rows than a full global batch, and the
    rows that ``tail="drop"`` drops."""
    identity = Identity(table=index.digest, selection="", rows=rows, spec=spec, tail=topology.tail, endless=False)
    lanes, batch_size, world_size = topology.lanes, topology.batch_size, topology.world_size
    plan = Plan(start(identity, epoch=0, num_lanes=lanes, batch_size=batch_size, world_size=world_size))
    steps, full = plan.steps or 0, batch_size * world_size
    return {
        "steps": steps,
        "short_steps": sum(plan.step_rows(step) < full for step in range(max(0, steps - 2 * lanes - 2), steps)),
        "dropped_rows": plan.rest(steps).of(0, rows).size if topology.tail == "drop" else 0,
    }


def _cut_by_lanes(layout: EpochLayout) -> int:
    """Return how many row groups a lane's border cuts: they are decoded once more for each border."""
    borders = layout.lane_bounds[1:-1]
    inside = borders[~np.isin(borders, layout.begins)]
    return len(np.unique(np.searchsorted(layout.begins, inside, side="right")))


def _window_bytes(ordered: Int64Array, window: int, lanes: int) -> npt.NDArray[np.float64]:
    """Return the decoded bytes of each window; a window lies inside of its lane."""
    if not len(ordered):
        return np.zeros(0)
    sums = np.add.reduceat(ordered, np.arange(0, len(ordered), window)).astype(np.float64)
    return np.asarray(np.minimum(sums, float(ordered.sum()) / lanes), np.float64)


def warnings_of(facts: Mapping[str, Any], table: Table, sizes: ColumnBytes) -> Iterator[str]:
    """Yield a sentence about each thing that is unwise. ``facts`` are the result of `plan_facts`."""
    files, rows = facts["files"], table.index.group_rows[table.index.group_rows > 0]
    if files >= _MANY_FILES and facts["file_bytes"] < _TINY_FILE * files:
        yield (
            f"tiny files: {files:,} of {facts['file_bytes'] / files / 1000:,.0f} kB on average; opening them "
            "costs more than reading them. Files of 100 MB and more read best"
        )
    giants = int((sizes.decoded > _GIANT_GROUP).sum())
    if giants:
        where = int(sizes.decoded.argmax())
        file, ordinal = table.index.group(where)
        yield (
            f"giant row groups: {giants:,} decode to more than 512 MB each; the largest, row group {ordinal} of "
            f"{table.index.paths[file]!r}, to {sizes.decoded[where] / 1e6:,.0f} MB. Write smaller ones, or ask for "
            "fewer columns"
        )
    if len(rows) and float(rows.mean()) < facts["batch_size"] / 2:
        yield (
            f"small row groups: {float(rows.mean()):,.0f} rows on average, for micro-batches of "
            f"{facts['batch_size']:,}; each micro-batch decodes several"
        )
    if 0 < len(rows) < facts["lanes"]:
        yield (
            f"more lanes ({facts['lanes']}) than row groups with rows ({len(rows):,}): each is decoded about "
            f"{1 + facts['cut_row_groups'] / len(rows):.1f} times and more; write more row groups, or use fewer workers"
        )
    if facts["dropped_rows"] > facts["rows"] / 100:
        yield (
            f"drop_last=True drops {100 * facts['dropped_rows'] / facts['rows']:.1f} % of each epoch "
            f"({facts['dropped_rows']:,} rows); drop_last=False keeps them"
        )
    if facts["deleted_rows"] > table.num_rows:
        yield (
            f"mostly deleted: {facts['deleted_rows']:,} rows that do not exist are decoded beside {table.num_rows:,} "
            "that do; compact the table"
        )
    if not facts["rows"]:
        yield "no row is read"
