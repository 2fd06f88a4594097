"""What real table does the demo train on, and which rows must therefore count?

How: the source text of the running Python's standard library is joined in the order of the paths and cut into
blocks of one length. A row is one block: ``id`` (int64, 0 .. rows - 1), ``source`` (the path in which the block
begins) and ``tokens`` (the bytes, a fixed-size list of uint8). Files and row groups get sizes that are uneven on
purpose, by a rule and not by chance, so that one Python always gives one lake.

Never: it reads nothing from the network, and nothing of lakeckpt: what the demo later proves is checked against
`lake_ids`, which asks pyarrow alone.
"""

from __future__ import annotations

import bisect
import itertools
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import ConfigError

__all__ = ["LakeFacts", "build_lake", "lake_ids", "sample_rows", "source_files"]

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}
_FILE_SHARES = (13, 5, 21, 8, 3, 17, 11, 22)
_GROUP_SHARES = (7, 2, 11, 5, 3, 13, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeFacts:
    """What was built. ``text_bytes`` is the text that went in, ``file_bytes`` the Parquet files on disk."""

    folder: Path
    sources: int
    text_bytes: int
    rows: int
    block: int
    files: int
    row_groups: int
    smallest_group: int
    largest_group: int
    file_bytes: int


def source_files(root: Path) -> list[Path]:
    """The ``*.py`` files under ``root``, without installed packages, in the order of their POSIX paths."""
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _LEFT_OUT]
        found.extend(Path(folder) / name for name in files if name.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read_text(root: Path, paths: list[Path], limit: int | None) -> tuple[bytes, list[int], list[str]]:
    """The joined text, and for each source where it begins; stops once ``limit`` bytes are there."""
    pieces: list[bytes] = []
    starts: list[int] = []
    names: list[str] = []
    size = 0
    for path in paths:
        if limit is not None and size >= limit:
            break
        try:
            text = path.read_bytes()
        except OSError:  # a file that this user may not read is no part of the lake
            continue
        if not text:
            continue
        starts.append(size)
        names.append(path.relative_to(root).as_posix())
        pieces.append(text)
        size += len(text)
    return b"".join(pieces), starts, names


def _uneven(total: int, shares: tuple[int, ...], parts: int) -> list[int]:
    """Cut ``total`` into ``parts`` sizes in the proportion of ``shares`` (cycled), each at least 1 where it can be."""
    cycle = [shares[i % len(shares)] for i in range(parts)]
    borders = [round(total * share / sum(cycle)) for share in np.cumsum([0, *cycle]).tolist()]
    return [b - a for a, b in itertools.pairwise(borders) if b > a]


def _schema(block: int) -> pa.Schema:
    tokens = pa.list_(pa.field("element", pa.uint8(), nullable=False), block)
    return pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("source", pa.string(), nullable=False),
            pa.field("tokens", tokens, nullable=False),
        ]
    )


def build_lake(
    folder: Path, *, block: int = 4096, max_rows: int | None = None, source: Path | None = None, group_rows: int = 320
) -> LakeFacts:
    """Write the lake into ``folder`` (made; must be empty) and say what it holds.

    ``block`` is the bytes of a row, ``max_rows`` bounds the rows (None: all the text there is), ``group_rows`` the mean
    rows of a row group. Raises `ConfigError` where ``source`` (the standard library) holds too little text.
    """
    root = source if source is not None else Path(sysconfig.get_path("stdlib"))
    limit = None if max_rows is None else max_rows * block
    text, starts, names = _read_text(root, source_files(root), limit)
    rows = -(-len(text) // block)
    rows = rows if max_rows is None else min(rows, max_rows)
    if rows < 64:
        raise ConfigError(
            f"the demo trains on Python source text, and {root} holds {len(text)} bytes of it: "
            f"{rows} rows of {block} bytes, at least 64 are needed; run it with a Python whose library is unpacked"
        )
    data = np.frombuffer(text[: rows * block].ljust(rows * block, b"\n"), dtype=np.uint8).reshape(rows, block)
    where = [names[bisect.bisect_right(starts, row * block) - 1] for row in range(rows)]
    folder.mkdir(parents=True, exist_ok=True)
    groups: list[int] = []
    first = 0
    schema = _schema(block)
    for number, size in enumerate(_uneven(rows, _FILE_SHARES, len(_FILE_SHARES))):
        with pq.ParquetWriter(folder / f"part-{number:03d}.parquet", schema, compression="snappy") as writer:
            for count in _uneven(size, _GROUP_SHARES, max(2, round(size / group_rows))):
                writer.write_table(_table(schema, data[first : first + count], where, first), row_group_size=count)
                groups.append(count)
                first += count
    written = sorted(folder.glob("*.parquet"))
    return LakeFacts(
        folder=folder,
        sources=len(names),
        text_bytes=min(len(text), rows * block),
        rows=rows,
        block=block,
        files=len(written),
        row_groups=len(groups),
        smallest_group=min(groups),
        largest_group=max(groups),
        file_bytes=sum(path.stat().st_size for path in written),
    )


def _table(schema: pa.Schema, blocks: npt.NDArray[np.uint8], where: list[str], first: int) -> pa.Table:
    count = len(blocks)
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(blocks.reshape(-1)), type=schema.field("tokens").type)
    columns = [
        pa.array(np.arange(first, first + count, dtype=np.int64)),
        pa.array(where[first : first + count], type=pa.string()),
        tokens,
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def lake_ids(folder: Path) -> npt.NDArray[np.int64]:
    """Every ``id`` of the lake, int64[rows], sorted, as pyarrow alone reads them."""
    parts = [pq.read_table(path, columns=["id"]).column("id").to_numpy() for path in sorted(folder.glob("*.parquet"))]
    return np.sort(np.concatenate(parts).astype(np.int64))


def sample_rows(folder: Path, count: int) -> npt.NDArray[np.uint8]:
    """``count`` rows spread evenly over the lake, uint8[count, block], as pyarrow alone reads them."""
    table = pq.ParquetDataset(folder).read(columns=["tokens"])
    places = np.linspace(0, table.num_rows - 1, count).astype(np.int64)
    taken = table.column("tokens").take(pa.array(places)).combine_chunks()
    flat = taken.flatten().to_numpy(zero_copy_only=False)
    return np.array(flat, dtype=np.uint8).reshape(count, -1)
