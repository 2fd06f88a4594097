"""This module builds the table that the demo trains on, from the source text of Python's standard library.

The text is joined in the order of the paths and cut into blocks of 4 KiB. A row is one block: ``id`` (int64,
0 .. rows - 1) and ``tokens`` (a fixed-size list of uint8). Files and row groups get uneven sizes by a fixed rule, so
one Python always gives one lake.

`lake_ids` reads the lake with pyarrow alone, because the verdict is compared with these ids.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import ConfigError

__all__ = ["build_lake", "lake_ids"]

_SKIPPED = {"site-packages", "dist-packages", "__pycache__"}
_FILE_SHARES = (13, 5, 21, 8, 3, 17, 11, 22)
_GROUP_SHARES = (7, 2, 11, 5, 3, 13, 9)
_GROUP_ROWS = 320
_FEWEST_ROWS = 64


def build_lake(folder: Path, *, block: int = 4096, max_rows: int | None = None, source: Path | None = None) -> int:
    """Write the lake into ``folder``, which is made. Return the number of rows.

    Args:
        folder: where the Parquet files go.
        block: bytes of a row.
        max_rows: bounds the rows; None: all the text there is.
        source: where the ``*.py`` files are; None: the standard library.

    Raises `ConfigError` where ``source`` holds less text than 64 rows.
    """
    root = source or Path(sysconfig.get_path("stdlib"))
    text = _text(root, None if max_rows is None else max_rows * block)
    rows = -(-len(text) // block)
    if rows < _FEWEST_ROWS:
        raise ConfigError(
            f"the demo trains on Python source text, and {root} holds {len(text)} bytes of it: {rows} rows of {block} "
            f"bytes, at least {_FEWEST_ROWS} are needed; run it with a Python whose library is unpacked"
        )
    data = np.frombuffer(text.ljust(rows * block, b"\n"), dtype=np.uint8).reshape(rows, block)
    folder.mkdir(parents=True)
    first = 0
    for number, size in enumerate(_uneven(rows, _FILE_SHARES, len(_FILE_SHARES))):
        with pq.ParquetWriter(folder / f"part-{number:03d}.parquet", _schema(block)) as writer:
            for count in _uneven(size, _GROUP_SHARES, max(2, round(size / _GROUP_ROWS))):
                writer.write_table(_table(data, first, count), row_group_size=count)
                first += count
    return rows


def lake_ids(folder: Path) -> npt.NDArray[np.int64]:
    """Return every ``id`` of the lake, int64[rows], sorted, as pyarrow alone reads them."""
    return np.sort(pq.ParquetDataset(folder).read(columns=["id"]).column("id").to_numpy())


def _text(root: Path, limit: int | None) -> bytes:
    """Return the joined text of the ``*.py`` files below ``root``, at most ``limit`` bytes of it."""
    pieces, size = [], 0
    for path in sorted(root.rglob("*.py"), key=Path.as_posix):
        if limit is not None and size >= limit:
            break
        if _SKIPPED.isdisjoint(path.relative_to(root).parts):
            pieces.append(path.read_bytes())
            size += len(pieces[-1])
    return b"".join(pieces)[:limit]


def _uneven(total: int, shares: Sequence[int], parts: int) -> list[int]:
    """Cut ``total`` into ``parts`` sizes in the proportion of ``shares``, which are cycled. Sizes of 0 are dropped."""
    cycle = [shares[i % len(shares)] for i in range(parts)]
    borders = [round(total * share / sum(cycle)) for share in np.cumsum([0, *cycle]).tolist()]
    return [b - a for a, b in itertools.pairwise(borders) if b > a]


def _schema(block: int) -> pa.Schema:
    tokens = pa.list_(pa.field("element", pa.uint8(), nullable=False), block)
    return pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("tokens", tokens, nullable=False)])


def _table(data: npt.NDArray[np.uint8], first: int, count: int) -> pa.Table:
    schema = _schema(data.shape[1])
    flat = pa.array(data[first : first + count].reshape(-1))
    tokens = pa.FixedSizeListArray.from_arrays(flat, type=schema.field("tokens").type)
    return pa.Table.from_arrays([pa.array(np.arange(first, first + count)), tokens], schema=schema)
