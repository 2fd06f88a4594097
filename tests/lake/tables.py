"""Small Parquet files for the tests of ``lakeckpt.lake``."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write(path: Path, columns: Mapping[str, Any] | pa.Table, **options: Any) -> Path:
    """Write a Parquet file, its folders too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(dict(columns)), path, **options)
    return path


def footer_of(data: bytes) -> bytes:
    """The bytes of a Parquet file's footer, without length and magic."""
    (length,) = struct.unpack("<I", data[-8:-4])
    return data[-8 - length : -8]
