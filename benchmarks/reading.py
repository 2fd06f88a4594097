"""How near to bare pyarrow is reading in process?  ``python -m benchmarks.reading [--only K] [--repetitions N] …``

Three tables (41 numeric columns; ragged tokens; images of 20 to 80 KB) are read into tensors, unshuffled and shuffled
with the default window, and beside it, interleaved in the same run, what pyarrow does without us: every way that it has
of reading, its columns cut into the same micro-batches and turned into the same tensors, with as little Python as that
takes. What counts is the ratio to the fastest of those (DESIGN section 7: 0.95 unshuffled, 0.85 shuffled).

Each case reads its table twice in a row, and the second reading counts: an epoch after another. The first one, which is
shown beside, also gets memory from the system that the cases in between have made Arrow's allocator give back, which a
run of training does once, and which on a virtual machine may cost more than reading does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch

from benchmarks.measure import Measured, report
from lakeckpt import LakeDataset, LakeLoader, Ragged, open_table

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A table to read, and the rows of a micro-batch."""

    name: str
    batch_size: int
    rows: int
    group_rows: int
    make: Callable[[np.random.Generator, int], pa.Table]


def _tabular(generator: np.random.Generator, rows: int) -> pa.Table:
    columns: dict[str, Any] = {"id": np.arange(rows)}
    for number in range(20):
        columns[f"f{number}"] = generator.standard_normal(rows, np.float32)
        columns[f"i{number}"] = generator.integers(0, 1 << 30, rows, dtype=np.int32)
    return pa.table(columns)


def _tokens(generator: np.random.Generator, rows: int) -> pa.Table:
    lengths = generator.integers(200, 400, rows)
    values = generator.integers(0, 50_000, int(lengths.sum()), dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))})


def _images(generator: np.random.Generator, rows: int) -> pa.Table:
    lengths = generator.integers(20_000, 80_000, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    content = pa.py_buffer(generator.bytes(int(offsets[-1])))
    return pa.table({"image": pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), content])})


KINDS = (
    Kind(name="tabular", batch_size=4096, rows=1 << 23, group_rows=1 << 17, make=_tabular),
    Kind(name="tokens", batch_size=32, rows=400_000, group_rows=10_000, make=_tokens),
    Kind(name="images", batch_size=64, rows=20_000, group_rows=500, make=_images),
)


# --- bare pyarrow


def _cut(table: pa.Table | pa.RecordBatch, size: int) -> Iterator[Batch]:
    """Micro-batches of decoded columns, as tensors over the same memory."""
    columns = [_whole(column) for column in table.columns]
    if all(isinstance(column, torch.Tensor) for column in columns):
        for parts in zip(*(column.split(size) for column in columns), strict=True):
            yield dict(zip(table.schema.names, parts, strict=True))
        return
    for start in range(0, table.num_rows, size):
        stop = min(start + size, table.num_rows)
        yield {name: _rows(column, start, stop) for name, column in zip(table.schema.names, columns, strict=True)}


def _whole(column: Any) -> Any:
    array = column if isinstance(column, pa.Array) else column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    if pa.types.is_primitive(array.type):
        dtype = array.type.to_pandas_dtype()
        return torch.from_numpy(np.frombuffer(array.buffers()[1], dtype)[array.offset : array.offset + len(array)])
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    dtype = np.uint8 if pa.types.is_binary(array.type) else np.int32
    values = np.frombuffer(array.buffers()[2 if dtype is np.uint8 else 3], dtype)
    return values, offsets


def _rows(column: Any, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, offsets = column
    mine = offsets[start : stop + 1].astype(np.int64)
    return torch.from_numpy(values[mine[0] : mine[-1]]), torch.from_numpy(mine - mine[0])


def _by_row_group(paths: list[Path], size: int, *, use_threads: bool) -> Iterator[Batch]:
    for path in paths:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield from _cut(file.read_row_group(group, use_threads=use_threads), size)


def _by_batches(paths: list[Path], size: int) -> Iterator[Batch]:
    for path in paths:
        with pq.ParquetFile(path, pre_buffer=True) as file:
            for batch in file.iter_batches(size, use_threads=True):
                yield from _cut(batch, size)


def _by_scanner(paths: list[Path], size: int) -> Iterator[Batch]:
    for batch in ds.dataset(paths, format="parquet").to_batches(batch_size=size):
        yield from _cut(batch, size)


def _bare(paths: list[Path], size: int) -> dict[str, Callable[[], Iterable[Any]]]:
    return {
        "read_row_group, 1 thread": partial(_by_row_group, paths, size, use_threads=False),
        "read_row_group, threads": partial(_by_row_group, paths, size, use_threads=True),
        "iter_batches, threads, pre_buffer": partial(_by_batches, paths, size),
        "dataset scanner": partial(_by_scanner, paths, size),
    }


# --- ours


def _ours(folder: Path, kind: Kind) -> dict[str, Callable[[], Iterable[Any]]]:
    def loader(**options: Any) -> LakeLoader:
        return LakeLoader(LakeDataset(open_table(folder), batch_size=kind.batch_size, **options))

    return {"lakeckpt": loader, "lakeckpt, shuffled": partial(loader, shuffle=True)}


def _drain(batches: Iterable[Any]) -> int:
    rows = 0
    for batch in batches:
        column = next(iter(batch.values()))
        rows += len(column[1]) - 1 if isinstance(column, tuple) else len(column)
        assert isinstance(column, (torch.Tensor, tuple, Ragged))
    return rows


def written(kind: Kind, folder: Path, share: float) -> list[Path]:
    generator = np.random.default_rng(0)
    paths = []
    rows = max(kind.group_rows * 4, int(kind.rows * share))
    for number, start in enumerate(range(0, rows, 4 * kind.group_rows)):
        path = folder / f"{number:04}.parquet"
        table = kind.make(generator, min(4 * kind.group_rows, rows - start))
        pq.write_table(table, path, row_group_size=kind.group_rows)
        paths.append(path)
    return paths


def _interleaved(
    cases: dict[str, Callable[[], Iterable[Any]]], rows: int, repetitions: int
) -> tuple[list[Measured], list[Measured]]:
    """The first readings, and those that followed."""
    walls: dict[str, list[float]] = {name: [] for name in cases}
    used: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for repetition in range(repetitions + 1):
        for place in range(len(names)):
            name = names[(place + repetition) % len(names)]  # what one case leaves in caches and pools, all inherit
            case = cases[name]
            for _ in range(2):
                begin, before = time.perf_counter(), time.process_time()
                assert _drain(case()) == rows, name
                if repetition:  # the first one warms up
                    walls[name].append(time.perf_counter() - begin)
                    used[name].append(time.process_time() - before)

    def measured(first: int, what: str) -> list[Measured]:
        return [
            Measured(
                name=name + what,
                seconds=tuple(walls[name][first::2]),
                peak_bytes=0,
                processor_seconds=tuple(used[name][first::2]),
            )
            for name in cases
        ]

    return measured(0, ", at first"), measured(1, "")


def main() -> None:
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=[kind.name for kind in KINDS])
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows, fewer repetitions")
    parser.add_argument("--repetitions", type=int)
    args, others = parser.parse_known_args()
    sys.argv[1:] = others  # what is left is for `report`
    shown, every = [], []
    for kind in KINDS:
        if args.only not in (None, kind.name):
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            paths = written(kind, folder, 0.25 if args.quick else 1.0)
            rows = sum(pq.read_metadata(path).num_rows for path in paths)
            bare, ours = _bare(paths, kind.batch_size), _ours(folder, kind)
            repetitions = args.repetitions or (3 if args.quick else 7)
            firsts, measured = _interleaved({**bare, **ours}, rows, repetitions)
        every += [*firsts, *measured]
        best_first = min(one.median_s for one in firsts[: len(bare)])
        best = min(one.median_s for one in measured[: len(bare)])
        cheapest = min(one.processor_s for one in measured[: len(bare)])
        for first, one in zip(firsts, measured, strict=True):
            shown.append(
                (
                    f"{kind.name}: {one.name}",
                    f"{rows / one.median_s:,.0f}",
                    f"{rows / max(one.seconds):,.0f} … {rows / min(one.seconds):,.0f}",
                    f"{best / one.median_s:.2f}",
                    f"{cheapest / one.processor_s:.2f}",
                    f"{best_first / first.median_s:.2f}",
                )
            )
    columns = ("reading", "rows/s", "spread", "to fastest", "processor", "at first")
    report("Tensors in process", columns, shown, every)


if __name__ == "__main__":
    main()
