"""How does pyarrow seek and read in an object of a store?  Each read is one of that range, of the pinned ETag.

What is not as it was pinned is `DataFileChanged` (written again, of another length) or `TableVersionGone` (gone),
whoever notices it first.
"""

from __future__ import annotations

import io
from typing import Any

from lakeckpt.lake.index import DataFile
from lakeckpt.lake.ranges import read_pinned
from lakeckpt.lake.storage import Storage

__all__ = ["RangeFile"]


class RangeFile(io.RawIOBase):
    """A pinned ``file`` of the table at ``uri``, for reading."""

    def __init__(self, storage: Storage, uri: str, file: DataFile) -> None:
        super().__init__()
        self._storage, self._uri, self._file = storage, uri, file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._file.size_bytes

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        file, start = self._file, self._position
        stop = file.size_bytes if size is None or size < 0 else min(file.size_bytes, start + size)
        if stop <= start:
            return b""
        data = read_pinned(self._storage, self._uri, file, start, stop)
        self._position = stop
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
