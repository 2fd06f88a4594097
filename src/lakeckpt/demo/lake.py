"""This module builds the table that the demo trains on, from the source text of Python's standard library.

The text is joined in the order of the paths and cut into blocks of 4 KiB. A row is one block: ``id`` (int64,
0 .. rows - 1) and ``tokens`` (a fixed-size list of uint8). Files get uneven sizes by a fixed rule, so one Python always
gives one lake. The last row group of a file is smaller than the others.

`lake_ids` reads the lake with pyarrow alone, because the verdict is compared with these ids.
"""

from __future__ import annotations

import itertools
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import ConfigError

__all__ = ["build_lake", "lake_ids"]

_SKIPPED = {"site-packages", "dist-packages", "__pycache__"}
_FILE_SHARES = (13, 5, 21, 8, 3, 17, 11, 22)
_GROUPS = 48
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
    borders = np.cumsum([0, *_FILE_SHARES]) * rows // sum(_FILE_SHARES)
    for number, (first, stop) in enumerate(itertools.pairwise(borders.tolist())):
        table = _table(data[first:stop], first)
        pq.write_table(table, folder / f"part-{number:03d}.parquet", row_group_size=-(-rows // _GROUPS))
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


def _table(blocks: npt.NDArray[np.uint8], first: int) -> pa.Table:
    """Return ``blocks``, uint8[rows, block], as rows whose ids count from ``first``."""
    rows, block = blocks.shape
    kind = pa.list_(pa.field("element", pa.uint8(), nullable=False), block)
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(blocks.reshape(-1)), type=kind)
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("tokens", kind, nullable=False)])
    return pa.Table.from_arrays([pa.array(np.arange(first, first + rows)), tokens], schema=schema)
