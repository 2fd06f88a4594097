"""What will reading a table take?  Steps, bytes and memory of a topology, and what is unwise about it.

Bytes are told from the footers: *stored* bytes are those of the asked columns on disk, *decoded* ones an estimate of
what they take in memory (exact for fixed-width columns; text that is stored by dictionary can take more). Per rank,
every lane has one window open at a time.

Reads no rows. The footers that `open_table` does not keep (sizes by column) are read by a few threads, which
`column_bytes` starts and joins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakeckpt.core.ends import Tail
from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.core.plan import Plan, fit_lanes, start
from lakeckpt.core.state import MAX_LANES, Identity
from lakeckpt.errors import ConfigError, SchemaError
from lakeckpt.lake.table import Table

__all__ = ["ColumnBytes", "PlanFacts", "Topology", "column_bytes", "plan_facts"]

Int64Array = npt.NDArray[np.int64]
_THREADS = 16
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
class ColumnBytes:
    """The asked columns of each row group: int64, shape (row groups,) each."""

    names: tuple[str, ...]
    stored: Int64Array
    decoded: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """All that ``plan`` says."""

    table: str
    format: str
    files: int
    file_bytes: int
    row_groups: int
    rows: int
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
    window_bytes: int
    """Decoded, on average."""
    memory_bytes: int
    """Expected for open windows, per rank."""
    most_memory_bytes: int
    """If the largest windows are open at once."""
    warnings: tuple[str, ...]

    def to_plain(self) -> dict[str, object]:
        """JSON-able values."""
        return asdict(self)


def column_bytes(
    table: Table, columns: Sequence[str] | None, *, progress: Callable[[int, int], None] | None = None
) -> ColumnBytes:
    """Sizes of ``columns`` (None: all) by row group; ``progress(files done, files)``.

    Raises `SchemaError` for a column that there is not, `DataFileChanged` where a file was written again.
    """
    partitions = {one.name for one in table.index.partitions}
    known = [name for name in table.schema.names if name not in partitions]
    unknown = [name for name in columns or () if name not in table.schema.names]
    if unknown:
        raise SchemaError(
            f"the table has no column {', '.join(map(repr, unknown))}; it has {', '.join(table.schema.names)}"
        )
    names = known if columns is None else [name for name in known if name in columns]
    widths = {name: _fixed_width(table.schema.field(name).type) for name in names}
    files = len(table.index.paths)
    parts: list[tuple[Int64Array, Int64Array]] = []
    with ThreadPoolExecutor(max(1, min(_THREADS, files)), thread_name_prefix="lakeckpt-plan") as pool:
        for done, found in enumerate(pool.map(lambda file: _of_file(table, file, widths), range(files)), start=1):
            parts.append(found)
            if progress is not None:
                progress(done, files)
    none = np.zeros(0, np.int64)
    return ColumnBytes(
        names=tuple(names),
        stored=np.concatenate([none, *(stored for stored, _ in parts)]),
        decoded=np.concatenate([none, *(decoded for _, decoded in parts)]),
    )


def _of_file(table: Table, file: int, widths: dict[str, int | None]) -> tuple[Int64Array, Int64Array]:
    footer = table.footer(file)
    leaves = [footer.schema.column(leaf).path for leaf in range(len(footer.schema))]
    of_leaf = [next((name for name in widths if path == name or path.startswith(name + ".")), None) for path in leaves]
    stored, decoded = np.zeros((2, footer.num_row_groups), np.int64)
    for ordinal in range(footer.num_row_groups):
        group = footer.row_group(ordinal)
        for leaf, name in enumerate(of_leaf):
            if name is not None:
                chunk = group.column(leaf)
                stored[ordinal] += max(chunk.total_compressed_size, 0)
                if widths[name] is None:
                    decoded[ordinal] += max(chunk.total_uncompressed_size, 0) + 4 * group.num_rows
        decoded[ordinal] += group.num_rows * sum(width for width in widths.values() if width is not None)
    return stored, decoded


def _fixed_width(kind: pa.DataType) -> int | None:
    """Bytes of one value as it is delivered; None where it varies."""
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_decimal(kind):
        return 8
    if pa.types.is_fixed_size_list(kind):
        inner = _fixed_width(kind.value_type)
        return None if inner is None else inner * int(kind.list_size)
    if pa.types.is_struct(kind):
        widths = [_fixed_width(kind.field(i).type) for i in range(kind.num_fields)]
        return None if None in widths else sum(width for width in widths if width is not None)
    return int(kind.byte_width) if pa.types.is_primitive(kind) else None


def plan_facts(table: Table, sizes: ColumnBytes, topology: Topology) -> PlanFacts:
    """What reading ``table`` on ``topology`` takes."""
    index = table.index
    lanes = topology.lanes
    window = topology.window if topology.shuffle else 1
    spec = OrderSpec(seed=0, shuffle=topology.shuffle, window=window)
    identity = Identity(
        table=index.digest, selection="", rows=index.num_rows, spec=spec, tail=topology.tail, endless=False
    )
    state = start(identity, epoch=0, num_lanes=lanes, batch_size=topology.batch_size, world_size=topology.world_size)
    plan = Plan(state)
    steps = plan.steps or 0
    full = topology.batch_size * topology.world_size
    layout = EpochLayout.build(index.group_rows, spec, 0, lanes)
    borders = layout.lane_bounds[1:-1]
    inside = borders[~np.isin(borders, layout.begins)]
    cut = len(np.unique(np.searchsorted(layout.begins, inside, side="right")))
    windows = _window_bytes(sizes.decoded[layout.order], window, lanes)
    opened = lanes // topology.world_size
    mean, most = (float(windows.mean()), float(windows.max())) if len(windows) else (0.0, 0.0)
    facts = PlanFacts(
        table=table.uri,
        format="Parquet",
        files=len(index.paths),
        file_bytes=int(index.size_bytes.sum()),
        row_groups=len(index.group_rows),
        rows=index.num_rows,
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
        dropped_rows=plan.rest(steps).of(0, index.num_rows).size if topology.tail == "drop" else 0,
        cut_row_groups=cut,
        windows_open=opened,
        window_bytes=round(mean),
        memory_bytes=round(opened * mean),
        most_memory_bytes=round(opened * most),
        warnings=(),
    )
    return _with_warnings(facts, table, sizes)


def _window_bytes(ordered: Int64Array, window: int, lanes: int) -> npt.NDArray[np.float64]:
    """Decoded bytes of each window; a window lies inside of its lane."""
    if not len(ordered):
        return np.zeros(0)
    sums = np.add.reduceat(ordered, np.arange(0, len(ordered), window)).astype(np.float64)
    return np.asarray(np.minimum(sums, float(ordered.sum()) / lanes), np.float64)


def _with_warnings(facts: PlanFacts, table: Table, sizes: ColumnBytes) -> PlanFacts:
    found = []
    rows = table.index.group_rows[table.index.group_rows > 0]
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
            f'tail="drop" leaves out {100 * facts.dropped_rows / facts.rows:.1f} % of each epoch '
            f'({facts.dropped_rows:,} rows); tail="short" keeps them'
        )
    if not facts.rows:
        found.append("the table has no rows")
    return replace(facts, warnings=tuple(found))
