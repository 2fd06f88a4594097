"""Which rows are read?  Three data sets, made once by this module and kept outside of the repository.

======== ============ ======================================================================== =========================
name     rows, full   a row                                                                    batches
======== ============ ======================================================================== =========================
tabular  8,000,000    41 columns: a label, 14 float32, 25 int32 of 10 to 10⁶ values, the id    4096; small: 256
tokens   400,000      a list of 16 to ~900 int32, 300 on average, and the id                   32; large: 512
images   20,000       20 to 80 KB that do not compress, a label, the id                        64; small: 8
resume   16,000       a list of ~30 int32 and the id; once more with 16,003 rows               50
======== ============ ======================================================================== =========================

Every one is a folder of eight Parquet files (pyarrow's defaults: snappy, dictionaries where they help) with row groups
of 131,072, 8,192 and 256 rows: 20, 10 and 13 MB. ``row`` numbers the rows. The same seed makes the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["DATA", "TABLES", "DataSet", "make"]

DATA = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lakeckpt-benchmarks"
"""Where data sets lie unless another folder is named."""

FILES = 8
_FORMAT = 1  # of the data: a change makes all of them anew


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A data set on disk."""

    name: str
    folder: str
    rows: int
    row_bytes: float
    batch_sizes: tuple[int, ...]
    """The one that everybody is measured with, then others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    rows: int
    group: int
    batch_sizes: tuple[int, ...]
    fill: Callable[[np.random.Generator, int], dict[str, pa.Array]]
    fixed: bool = False
    """Of this many rows whatever the scale."""


def _tabular(random: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    found = {"label": random.integers(0, 2, rows, np.int32)}
    found |= {f"dense_{n}": random.standard_normal(rows, np.float32) for n in range(13)}
    found |= {f"category_{n}": random.integers(0, int(10 ** (1 + n / 5)), rows, np.int32) for n in range(25)}
    found["weight"] = random.random(rows, np.float32)
    return {name: pa.array(column) for name, column in found.items()}


def _lists(random: np.random.Generator, rows: int, mean: int) -> pa.Array:
    lengths = np.clip(random.gamma(4.0, mean / 4.0, rows).astype(np.int32), max(1, mean // 20), 3 * mean)
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(random.integers(0, 50_000, offsets[-1], np.int32)))


def _images(random: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    lengths = random.integers(20_000, 80_000, rows)
    return {
        "image": pa.array([random.bytes(int(length)) for length in lengths], pa.binary()),
        "label": pa.array(random.integers(0, 1000, rows, np.int32)),
    }


def _tokens(random: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    return {"tokens": _lists(random, rows, 300)}


def _short(random: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    return {"tokens": _lists(random, rows, 30)}


TABLES = {
    "tabular": _Kind(rows=8_000_000, group=131_072, batch_sizes=(4096, 256), fill=_tabular),
    "tokens": _Kind(rows=400_000, group=8_192, batch_sizes=(32, 512), fill=_tokens),
    "images": _Kind(rows=20_000, group=256, batch_sizes=(64, 8), fill=_images),
    "resume": _Kind(rows=16_000, group=250, batch_sizes=(50,), fill=_short, fixed=True),
    "resume-odd": _Kind(rows=16_003, group=250, batch_sizes=(50,), fill=_short, fixed=True),
}


def make(name: str, scale: float, data: Path = DATA, *, at_most: int | None = None) -> DataSet:
    """Return the data set ``name`` with ``scale`` times its full number of rows (not more than ``at_most``, which is
    rounded to whole batches); it is made if it is not there yet."""
    kind = TABLES[name]
    batch = max(kind.batch_sizes)
    rows = kind.rows if kind.fixed else max(FILES * batch, int(kind.rows * scale))
    if at_most is not None and rows > at_most:
        rows = max(FILES * batch, at_most // batch * batch)
    group = min(kind.group, max(batch, rows // 64 // batch * batch))
    folder = data / f"{name}-{rows}-v{_FORMAT}"
    about = folder.with_name(folder.name + ".json")  # beside it: a table's folder holds nothing but its files
    if not about.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        size = _write(kind, folder, rows, group)
        about.write_text(json.dumps({"rows": rows, "bytes": size}))
    size = json.loads(about.read_text())["bytes"]
    return DataSet(name=name, folder=str(folder), rows=rows, row_bytes=size / rows, batch_sizes=kind.batch_sizes)


def _write(kind: _Kind, folder: Path, rows: int, group: int) -> int:
    """Write the files; return the bytes of all values."""
    size = 0
    for number in range(FILES):
        begin, end = (-(-rows * at // (FILES * group)) * group for at in (number, number + 1))
        writer: pq.ParquetWriter | None = None
        for table in _groups(kind, begin, min(end, rows), group):
            writer = writer or pq.ParquetWriter(folder / f"part-{number:02d}.parquet", table.schema)
            writer.write_table(table, row_group_size=group)
            size += table.nbytes
        if writer is not None:
            writer.close()
    return size


def _groups(kind: _Kind, begin: int, end: int, group: int) -> Iterator[pa.Table]:
    for at in range(begin, end, group):
        rows = min(group, end - at)
        columns = kind.fill(np.random.default_rng(at), rows)
        yield pa.table({**columns, "row": pa.array(np.arange(at, at + rows, dtype=np.int64))})
