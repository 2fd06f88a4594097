"""What do planning, beginning and resuming a very large epoch cost?  ``python -m benchmarks.planning [--json FILE]``

First the order of an epoch over a million row groups: the limit is 1 s and 100 MB (DESIGN section 7). Beside it, in
the same run: numpy's own shuffle of as many numbers, and the bare sort of as many random 64-bit words, which is the
physical limit of ordering by hash.

Then all that stands before the first batch, of tables of 25,000, 50,000 and 100,000 files with ten row groups of 41
columns each: the footers that an earlier run saved become an index, an index is read, an epoch is ordered, a first
batch is read at 0 % and at 90 % of it, and the table travels to a worker process. Every file holds the same bytes,
which a storage in memory answers with. The last column is how often more the largest takes than the smallest, which
has a quarter of its files: 4 is linear.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import Measured, measure, report, show
from lakeckpt import LakeDataset, LakeLoader
from lakeckpt.core.changes import start
from lakeckpt.core.identity import Identity
from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.core.plan import Plan
from lakeckpt.core.state import State
from lakeckpt.lake.formats.footer_cache import dump_footers, load_footers
from lakeckpt.lake.formats.pinning import index_of
from lakeckpt.lake.parquet.footer import summarize
from lakeckpt.lake.storage.base import Buffer, ObjectInfo
from lakeckpt.lake.table.index import TableIndex
from lakeckpt.lake.table.table import Table

GROUPS = 1_000_000
SPEC = OrderSpec(seed=7, shuffle=True, window=4)
SCALES = (25_000, 50_000, 100_000)
PER_FILE, ROWS, COLUMNS = 10, 100, 41
REPETITIONS = 3


class OneFile:
    """A storage in which every object is the same file."""

    name = "one file"

    def __init__(self) -> None:
        generator, out = np.random.default_rng(0), io.BytesIO()
        table = {f"c{place}": generator.random(PER_FILE * ROWS, np.float32) for place in range(COLUMNS)}
        pq.write_table(pa.table(table), out, row_group_size=ROWS)
        self.content = out.getvalue()

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        return self.content[start:stop]

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        raise NotImplementedError("nothing lists")

    def put(self, path: str, chunks: Iterable[Buffer]) -> int:
        raise NotImplementedError("nothing writes")

    def put_new(self, path: str, data: bytes) -> None:
        raise NotImplementedError("nothing writes")

    def delete(self, path: str) -> None:
        raise NotImplementedError("nothing deletes")


def scaled(files: int, storage: OneFile) -> dict[str, Callable[[], object]]:
    """What stands before the first batch of a table of so many files."""
    paths = sorted(f"day=2026-01-{number % 28:02d}/part-{number:08d}.snappy.parquet" for number in range(files))
    size = len(storage.content)
    listed = tuple(ObjectInfo(path=path, size_bytes=size, etag=f"{n:032x}") for n, path in enumerate(paths))
    summary = summarize(storage, "any", size)
    footers = dump_footers(listed, (summary,) * files)
    index = index_of(listed, [summary] * files)
    document = index.dumps()
    table = Table(uri="one", storage=storage, index=index)

    def opened() -> TableIndex:
        known = load_footers(footers)
        return index_of(listed, [known[info.path][1] for info in listed])

    def loader() -> LakeLoader:
        return LakeLoader(LakeDataset(table, batch_size=64, shuffle=True, shuffle_window=SPEC.window, seed=SPEC.seed))

    first = loader()
    next(iter(first))
    begun = State.from_plain(first.state_dict())
    steps = Plan(begun).steps
    assert steps is not None
    late = replace(begun, step=steps * 9 // 10).to_plain()

    def batch(state: dict[str, object] | None) -> None:
        made = loader()
        if state is not None:
            made.load_state_dict(state)
        next(iter(made))

    return {
        "index from saved footers": opened,
        "index read": lambda: TableIndex.loads(document),
        "index written": index.dumps,
        "order of an epoch": lambda: EpochLayout.build(index.group_rows, SPEC, 3, 8),
        "first batch": lambda: batch(None),
        "first batch at 90 %": lambda: batch(late),
        "index read, order, first batch": lambda: (TableIndex.loads(document), batch(None)),
        "table to a worker and there": lambda: pickle.loads(pickle.dumps(table)),
    }


def scale() -> tuple[list[Measured], list[tuple[str, ...]]]:
    """All scales, each interleaved; what was measured, and the rows of the table."""
    storage = OneFile()
    found = [measure(scaled(files, storage), REPETITIONS) for files in SCALES]
    rows = []
    for cases in zip(*found, strict=True):
        times = [min(one.processor_seconds) for one in cases]
        shown = [f"{took * 1e3:.0f} ms, {one.peak_bytes / 1e6:.0f} MB" for took, one in zip(times, cases, strict=True)]
        rows.append((cases[0].name, *shown, f"{times[-1] / max(times[0], 1e-6):.1f}"))
    named = [
        replace(one, name=f"{files:,} files: {one.name}")
        for files, cases in zip(SCALES, found, strict=True)
        for one in cases
    ]
    return named, rows


def order() -> tuple[list[Measured], list[tuple[str, ...]]]:
    """The order of an epoch, beside numpy's own."""
    generator = np.random.default_rng(0)
    group_rows = generator.integers(1, 200_000, GROUPS)
    words = generator.integers(0, 2**63, GROUPS, dtype=np.uint64)
    rows = int(group_rows.sum())

    def build() -> None:
        EpochLayout.build(group_rows, SPEC, 3, 1024)

    def build_and_first_step() -> None:
        layout = EpochLayout.build(group_rows, SPEC, 3, 1024)
        identity = Identity(table="", selection="", rows=rows, spec=SPEC, tail="short", endless=False)
        plan = Plan(start(identity, epoch=3, num_lanes=1024, batch_size=4096, world_size=128))
        spans = plan.assignment(plan.steps * 9 // 10 if plan.steps else 0, 17).receipt.spans
        layout.window_at(spans[0].start)

    cases = {
        "lakeckpt: order of an epoch": build,
        "lakeckpt: order, lanes, plan, a window at 90 %": build_and_first_step,
        "numpy: Generator.permutation": lambda: np.random.default_rng(0).permutation(GROUPS),
        "numpy: argsort of random words": lambda: np.argsort(words),
    }
    measured = measure(cases, repetitions=7)
    base = measured[-1].median_s
    rows_shown = [
        (
            one.name,
            f"{one.median_s * 1e3:.0f} ms",
            f"{min(one.seconds) * 1e3:.0f} … {max(one.seconds) * 1e3:.0f} ms",
            f"{one.median_s / base:.2f}",
            f"{one.peak_bytes / 1e6:.0f} MB",
        )
        for one in measured
    ]
    return measured, rows_shown


def main() -> None:
    measured, rows = order()
    columns = ("planning", "median", "spread", "to the bare sort", "peak memory")
    show(f"{GROUPS:,} row groups", columns, rows)
    scales, rows = scale()
    columns = ("processor time, peak memory", *(f"{files:,} files" for files in SCALES), "growth")
    report(f"tables of {PER_FILE} row groups a file", columns, rows, [*measured, *scales])


if __name__ == "__main__":
    main()
