"""This module reads the ranges of an object that its wanted pieces need.

`coalesced` plans, and does no I/O: pieces, such as column chunks, that lie close together share a range while that
stays small; a piece is never cut. A `Fetch` starts to read ranges when it is made, and `Fetch.wait` returns a file that
holds them. Each request asks for at most 8 MiB. All requests are made at once, by the 32 threads of this process, which
are started when first needed; so at most 256 MiB are in flight. The threads end with the process: each finishes the
request that it is in, within the deadline of the storage. A forked process has its own.

An object that is not as it was pinned raises `DataFileChanged` (written again, or of another length) or
`TableVersionGone`. This module never retries: retries and deadlines are the storage's.
"""

from __future__ import annotations

import io
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from lakeckpt.errors import DataFileChanged, ObjectChanged, ObjectMissing, TableVersionGone
from lakeckpt.lake.storage.base import ObjectInfo, Storage

__all__ = [
    "ADVICE",
    "KEEP",
    "Fetch",
    "Range",
    "changed",
    "coalesced",
    "gone",
    "in_background",
    "read_pinned",
    "some",
    "unless_ending",
]

Range = tuple[int, int]
"""Bytes [start, stop) of a file."""
T = TypeVar("T")

REQUEST_BYTES = 8 << 20
"""The most that one request asks for: a storage answers it by a single request of its own."""
THREADS = 32
_RELEASE_S, _LOOK_S = 1.0, 1e-4
HOLE_BYTES = 256 << 10
"""Pieces that are no further apart are read together: the bytes between them cost less than another request."""
ADVICE = "Open the table again to start on its new state, or put the pinned files back to go on with a run"

KEEP = "docs/how-to/keep-a-version.md says how to keep the files of a version while a run reads it"


def changed(uri: str, differences: Sequence[str]) -> DataFileChanged:
    """Return the error that says how the table at ``uri`` differs from what was pinned."""
    return DataFileChanged(f"the table {uri!r} is not as it was pinned: {some(differences)}. {ADVICE}")


def gone(uri: str, path: str) -> TableVersionGone:
    """Return the error that says that a file of the pinned version of the table at ``uri`` is gone."""
    return TableVersionGone(
        f"the table {uri!r} is not as it was pinned: {path!r} is gone (vacuumed, expired, or written again under "
        f"another name). {ADVICE}. {KEEP}",
        files=(path,),
    )


def some(differences: Sequence[str]) -> str:
    """Return the first 20 of ``differences``, and how many more there are."""
    return "; ".join(differences[:20]) + (f"; and {len(differences) - 20} more" if len(differences) > 20 else "")


def coalesced(pieces: Iterable[Range], *, hole_bytes: int = HOLE_BYTES, most_bytes: int = REQUEST_BYTES) -> list[Range]:
    """Return ranges, ascending, so that each of ``pieces`` lies whole in one of them.

    Pieces share a range if they are no further apart than ``hole_bytes`` and it has no more than ``most_bytes``; a
    piece that is larger has a range of its own.

    >>> coalesced([(50, 60), (0, 10), (12, 30)], hole_bytes=5)
    [(0, 30), (50, 60)]
    >>> coalesced([(0, 40), (40, 90), (90, 95)], hole_bytes=5, most_bytes=60)
    [(0, 40), (40, 95)]
    """
    found: list[Range] = []
    for start, stop in sorted(pieces):
        first, last = found[-1] if found else (start, start)
        if found and (stop <= last or (start <= last + hole_bytes and stop - first <= most_bytes)):
            found[-1] = first, max(stop, last)
        else:
            found.append((start, stop))
    return found


class Fetch:
    """Reads ``ranges`` in the background. ``read(start, stop)`` returns those bytes, or raises."""

    def __init__(self, read: Callable[[int, int], bytes], ranges: Sequence[Range]) -> None:
        self._parts = [(start, pa.allocate_buffer(stop - start)) for start, stop in ranges]
        self._requests = [
            in_background(_fill, part, low - start, read, low, high)
            for (start, part), (_, stop) in zip(self._parts, ranges, strict=True)
            for low, high in _requests(start, stop)
        ]

    def wait(self) -> pa.NativeFile:
        """Return a file that holds the ranges, at their places, and nothing else. Raises what ``read`` raised.

        The caller closes the file when it was decoded.
        """
        try:
            for request in self._requests:
                request.result()
        finally:
            self.cancel()
        return pa.PythonFile(_Parts(self._parts), mode="r")

    def cancel(self) -> None:
        """Begin no request any more. It takes no lock that another thread may hold for long."""
        for request in self._requests:
            request.cancel()


class _Parts(io.RawIOBase):
    """A file that has only ``parts``: pairs of an offset and the bytes from there.

    pyarrow calls ``read_buffer`` to read. Outside of the parts it gets nothing, and reports that the file ends there.

    pyarrow's own threads release a buffer shortly after it was decoded, and they need the interpreter for that. A
    process that ends at that moment aborts. So `close` waits until all buffers were released, a second at most.
    """

    def __init__(self, parts: Sequence[tuple[int, pa.Buffer]]) -> None:
        super().__init__()
        self._parts, self._position = parts, 0
        self._lent: list[weakref.ref[pa.Buffer]] = []

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        end = max((start + part.size for start, part in self._parts), default=0)
        self._position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: end}[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read_buffer(self, size: int) -> pa.Buffer:
        start, stop = self._position, self._position + size
        for first, part in self._parts:
            if first <= start and stop <= first + part.size:
                self._position = stop
                lent = part.slice(start - first, size)
                self._lent.append(weakref.ref(lent))
                return lent
        return pa.py_buffer(b"")

    def close(self) -> None:
        until_s = time.monotonic() + _RELEASE_S
        while any(one() is not None for one in self._lent) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        self._parts = ()
        super().close()


def _requests(start: int, stop: int) -> Iterator[Range]:
    """Yield requests for the bytes of one range, of sizes as equal as possible: the last one to arrive decides."""
    count = -(-(stop - start) // REQUEST_BYTES)
    for place in range(count):
        yield start + (stop - start) * place // count, start + (stop - start) * (place + 1) // count


def _fill(part: pa.Buffer, at: int, read: Callable[[int, int], bytes], start: int, stop: int) -> None:
    content = np.frombuffer(read(start, stop), np.uint8)
    np.copyto(np.frombuffer(part, np.uint8)[at : at + len(content)], content)  # without the interpreter's lock


def read_pinned(storage: Storage, uri: str, file: ObjectInfo, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a pinned ``file`` of the table at ``uri``, which has them all.

    Raises `TableVersionGone` if there is no such file, and `DataFileChanged` if it is another.
    """
    try:
        data = storage.read(file.path, start, stop, etag=file.etag)
    except ObjectMissing as error:
        raise gone(uri, file.path) from error
    except ObjectChanged as error:
        raise changed(uri, [f"{file.path!r} was written again (its ETag is not {file.etag})"]) from error
    if len(data) != stop - start:
        raise changed(uri, [f"{file.path!r} ends at {start + len(data)}, not at {file.size_bytes}"])
    return data


class _Threads:
    """The threads of this process; a forked process starts its own."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lakeckpt-ranges")
            return self._pool.submit(unless_ending, self._pool, work, *arguments)


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.renew)


def unless_ending(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    """Do ``work`` in a thread of ``pool``; RuntimeError, untried, if the interpreter is ending or the pool closed.

    A pool finishes what it was given before the interpreter ends, but takes nothing new. So this gives it something.
    """
    pool.submit(int)
    return work(*arguments)


def in_background(work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Let one of the threads run ``work(*arguments)``, which must not wait for others of them."""
    return _threads.submit(work, *arguments)
