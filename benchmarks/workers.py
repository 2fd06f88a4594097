"""What does it cost that micro-batches come from worker processes?  Ours and peers, with two workers and without.

The same rows by each, in one run, interleaved: `LakeLoader` with no worker and with two; a hand-written Arrow dataset
in a torch DataLoader, and HF datasets (where it is installed), each with two workers. A table of 41 columns of numbers,
rows of tokens, and images, each once more with a transform of a millisecond of Python for each micro-batch. Whole
epochs are timed, with workers that live on, so that starting them is not; nothing looks at the rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.measure import Measured, report
from lakeckpt import LakeDataset, LakeLoader, ReadOptions

WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A table, and how it is read."""

    name: str
    rows: int
    files: int
    row_group: int
    batch_size: int
    make: Callable[[int, np.random.Generator], pa.Table]


def tabular(rows: int, random: np.random.Generator) -> pa.Table:
    """One key and forty features."""
    features = {f"f{n}": random.random(rows, np.float32) for n in range(40)}
    return pa.table({"key": np.arange(rows), **features})


def tokens(rows: int, random: np.random.Generator) -> pa.Table:
    """Some 300 numbers a row."""
    offsets = np.concatenate([[0], np.cumsum(random.integers(100, 500, rows))]).astype(np.int32)
    values = random.integers(0, 50_000, offsets[-1], dtype=np.int32)
    return pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))})


def images(rows: int, random: np.random.Generator) -> pa.Table:
    """Bytes that do not compress, 20 to 80 kB a row."""
    content = [random.bytes(int(size)) for size in random.integers(20_000, 80_000, rows)]
    return pa.table({"image": pa.array(content, pa.binary()), "label": np.arange(rows)})


KINDS = [
    Kind(name="tabular", rows=2_000_000, files=4, row_group=125_000, batch_size=4096, make=tabular),
    Kind(name="tokens", rows=200_000, files=4, row_group=10_000, batch_size=32, make=tokens),
    Kind(name="images", rows=10_000, files=4, row_group=500, batch_size=64, make=images),
]


def write(kind: Kind, folder: Path, scale: float) -> list[str]:
    """Write the table; return its files."""
    folder.mkdir()
    random = np.random.default_rng(7)
    paths = []
    for number in range(kind.files):
        rows = max(1, int(kind.rows * scale) // kind.files)
        paths.append(str(folder / f"part-{number}.parquet"))
        compression = "none" if kind.name == "images" else "snappy"
        pq.write_table(kind.make(rows, random), paths[-1], row_group_size=kind.row_group, compression=compression)
    return paths


def a_millisecond(batch: Any) -> Any:
    """Python that holds its lock for a millisecond of processor time."""
    end = time.thread_time() + 0.001
    while time.thread_time() < end:
        pass
    return batch


class ByHand(IterableDataset[Any]):
    """Row groups dealt to workers, read by pyarrow, sliced, and made tensors without a copy."""

    def __init__(self, paths: list[str], batch_size: int, transform: Callable[[Any], Any] | None) -> None:
        self._paths, self._batch_size, self._transform = paths, batch_size, transform

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        groups = [(path, n) for path in self._paths for n in range(pq.ParquetFile(path).num_row_groups)]
        for path, number in groups[worker::workers]:
            table = pq.ParquetFile(path).read_row_group(number, use_threads=False)
            for start in range(0, len(table), self._batch_size):
                batch = to_tensors(table.slice(start, self._batch_size))
                yield batch if self._transform is None else self._transform(batch)


def to_tensors(table: pa.Table) -> dict[str, torch.Tensor]:
    """Columns by name; of lists and bytes their contents and their offsets."""
    found = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if pa.types.is_list(array.type) or pa.types.is_binary(array.type):
            offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
            is_list = pa.types.is_list(array.type)
            content = array.values.to_numpy() if is_list else np.frombuffer(array.buffers()[2], np.uint8)
            found[name] = torch.from_numpy(content[offsets[0] : offsets[-1]])
            found[name + ".offsets"] = torch.from_numpy(offsets - offsets[0])
        else:
            found[name] = torch.from_numpy(array.to_numpy())
    return found


def ours(folder: Path, kind: Kind, workers: int, transform: Any, shuffle: bool = False) -> Iterable[Any]:
    """`LakeLoader`."""
    dataset = LakeDataset(
        folder, batch_size=kind.batch_size, options=ReadOptions(num_lanes=WORKERS), transform=transform, shuffle=shuffle
    )
    return LakeLoader(dataset, num_workers=workers, persistent_workers=workers > 0)


def by_hand(paths: list[str], kind: Kind, transform: Any) -> Iterable[Any]:
    """What people write."""
    dataset = ByHand(paths, kind.batch_size, transform)
    return DataLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True)


def hf_datasets(paths: list[str], kind: Kind, cache: Path, transform: Any) -> Iterable[Any] | None:
    """HF datasets in its Arrow format, which is its fastest; None where it is not installed."""
    try:
        import datasets
    except ImportError:
        return None
    datasets.disable_progress_bars()
    whole = datasets.load_dataset("parquet", data_files=paths, split="train", cache_dir=str(cache))
    shards = whole.with_format("arrow").to_iterable_dataset(num_shards=8)

    def made(table: pa.Table) -> Any:
        batch = to_tensors(table)
        return batch if transform is None else transform(batch)

    return DataLoader(
        _Batches(shards, kind.batch_size, made), batch_size=None, num_workers=WORKERS, persistent_workers=True
    )


class _Batches(IterableDataset[Any]):
    def __init__(self, rows: Any, batch_size: int, made: Callable[[pa.Table], Any]) -> None:
        self._rows, self._batch_size, self._made = rows, batch_size, made

    def __iter__(self) -> Iterator[Any]:
        for table in self._rows.iter(batch_size=self._batch_size):
            yield self._made(table)


def rows_of(batch: Any) -> int:
    """Rows of whatever a reader gives."""
    offsets = next((column for name, column in batch.items() if name.endswith(".offsets")), None)
    return len(offsets) - 1 if offsets is not None else len(next(iter(batch.values())))


def seconds_a_row(loader: Iterable[Any]) -> float:
    """Read an epoch."""
    begin, rows = time.perf_counter(), 0
    for batch in loader:
        rows += rows_of(batch)
    return (time.perf_counter() - begin) / rows


def readers(kind: Kind, root: Path, paths: list[str], transform: Any) -> dict[str, Iterable[Any]]:
    """Each reader of one table."""
    found: dict[str, Iterable[Any] | None] = {
        "ours, in process": ours(root / kind.name, kind, 0, transform),
        "ours, 2 workers": ours(root / kind.name, kind, WORKERS, transform),
        "ours, shuffled, in process": ours(root / kind.name, kind, 0, transform, shuffle=True),
        "ours, shuffled, 2 workers": ours(root / kind.name, kind, WORKERS, transform, shuffle=True),
        "by hand in torch, 2 workers": by_hand(paths, kind, transform),
        "HF datasets, 2 workers": hf_datasets(paths, kind, root / "hf", transform),
    }
    return {name: one for name, one in found.items() if one is not None}


def main() -> None:
    """Measure all kinds, and print rows per second."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scale", type=float, default=1.0, help="of the tables' sizes")
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--kinds", nargs="+", default=[kind.name for kind in KINDS])
    arguments.add_argument("--only", default="", help="readers whose names contain this")
    arguments.add_argument("--no-transform", action="store_true", help="leave the cases with a transform out")
    asked, rest = arguments.parse_known_args()
    sys.argv[1:] = rest
    measured: list[Measured] = []
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="lakeckpt-workers-", dir=os.environ.get("TMPDIR")) as folder:
        for kind in KINDS:
            if kind.name not in asked.kinds:
                continue
            paths = write(kind, Path(folder) / kind.name, asked.scale)
            for transform in (None, a_millisecond)[: 1 if asked.no_transform else 2]:
                cases = readers(kind, Path(folder), paths, transform)
                cases = {name: loader for name, loader in cases.items() if asked.only in name}
                found: dict[str, list[float]] = {name: [] for name in cases}
                for loader in cases.values():
                    seconds_a_row(loader)  # starts workers, warms caches
                for _ in range(asked.repetitions):
                    for name, loader in cases.items():
                        found[name].append(seconds_a_row(loader))
                what = kind.name if transform is None else f"{kind.name}, 1 ms of Python"
                first = statistics.median(next(iter(found.values())))
                for name, seconds in found.items():
                    median = statistics.median(seconds)
                    measured.append(Measured(name=f"{what}: {name}", seconds=tuple(seconds), peak_bytes=0))
                    spread = f"{1 / max(seconds):,.0f} - {1 / min(seconds):,.0f}"
                    rows.append([f"{what}: {name}", f"{1 / median:,.0f}", spread, f"{first / median:.2f}"])
    columns = ["reader", "rows/s", "least - most", "of ours in process"]
    report("micro-batches from worker processes", columns, rows, measured)


if __name__ == "__main__":
    main()
