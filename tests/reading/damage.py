"""Damage in a table's row groups that can be healed, byte for byte."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq

from lakeckpt.lake.table.table import Table


class Damage:
    """Hurts and heals the files of a local table, whose pages have checksums."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._whole = {path: self.path(path).read_bytes() for path in table.index.paths}

    def path(self, file: str) -> Path:
        return Path(self.table.storage.local_path(file))  # type: ignore[attr-defined]

    def hurt(self, file: str, group: int, column: int = 0) -> None:
        """Flip a byte near the end of a column chunk: the size and the footer stay."""
        chunk = pq.read_metadata(self.path(file)).row_group(group).column(column)
        begin = chunk.dictionary_page_offset or chunk.data_page_offset
        content = bytearray(self.path(file).read_bytes())
        content[begin + chunk.total_compressed_size - 2] ^= 0x55  # in the last page: its header is not covered
        self._write(file, bytes(content))

    def heal(self, file: str) -> None:
        self._write(file, self._whole[file])

    def _write(self, file: str, content: bytes) -> None:
        info = self.path(file).stat()
        with self.path(file).open("r+b") as opened:  # in place: others may be reading
            opened.write(content)
        os.utime(self.path(file), ns=(info.st_atime_ns, info.st_mtime_ns))
