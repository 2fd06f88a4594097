"""This module reads the ranges of a pinned file that its wanted pieces need.

`coalesced` plans, and does no I/O: pieces, such as column chunks, that lie close together share a range while that
stays small; a piece is never cut. `PinnedBytes.begin` starts to read ranges, and `Arriving.wait` returns them, each in
a buffer of its own. A local file is mapped by the thread that waits (data files are immutable).
An object in a store is asked for in requests of at most 8 MiB, all of them at once as far as the threads of this
process go: 32, started when first needed, so that at most 256 MiB are in flight. The threads end with the process: each
finishes at most the attempt that it is in. A forked process has its own.

A file that is not as it was pinned raises `DataFileChanged` (written again, or of another length) or
`TableVersionGone`.
This module never retries: retries and deadlines are the storage's.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from lakeckpt.errors import DataFileChanged, ObjectChanged, ObjectMissing, TableVersionGone
from lakeckpt.lake.storage.base import ObjectInfo, Storage
from lakeckpt.lake.storage.retry import stop_retrying_when

__all__ = [
    "ADVICE",
    "KEEP",
    "LOCAL_HOLE_BYTES",
    "STORE_HOLE_BYTES",
    "Arriving",
    "LocalBytes",
    "PinnedBytes",
    "Range",
    "StoredBytes",
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
"""What one request asks for at most: a storage answers so much by a single one."""
THREADS = 32
MAPPED_BYTES = 256 << 10
"""Less of a local file is copied: that is done before the file were mapped."""
LOCAL_HOLE_BYTES, STORE_HOLE_BYTES = 64 << 10, 256 << 10
"""Pieces that are no further apart are read together: what lies between costs less than another call."""
ADVICE = "Open the table again to start on its new state, or put the pinned files back to go on with a run"

KEEP = "docs/how-to/keep-a-version.md says how to keep the files of a version while a run reads it"


def changed(uri: str, differences: Sequence[str]) -> DataFileChanged:
    """The error that says how the table at ``uri`` differs from what was pinned."""
    return DataFileChanged(f"the table {uri!r} is not as it was pinned: {some(differences)}. {ADVICE}")


def gone(uri: str, path: str) -> TableVersionGone:
    """The error that says that a file of the pinned version of the table at ``uri`` is gone."""
    return TableVersionGone(
        f"the table {uri!r} is not as it was pinned: {path!r} is gone (vacuumed, expired, or written again under "
        f"another name). {ADVICE}. {KEEP}",
        files=(path,),
    )


def some(differences: Sequence[str]) -> str:
    """The first 20 of ``differences``, and how many more there are."""
    return "; ".join(differences[:20]) + (f"; and {len(differences) - 20} more" if len(differences) > 20 else "")


def coalesced(pieces: Iterable[Range], *, hole_bytes: int, most_bytes: int = REQUEST_BYTES) -> list[Range]:
    """Ranges, ascending, so that each of ``pieces`` lies whole in one of them.

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


class Arriving(Protocol):
    """Ranges of a file that were set out for."""

    @property
    def whole(self) -> pa.Buffer | None:
        """After `wait`: all of the file, of which the ranges may be looked at; None where they are apart."""
        ...

    def wait(self) -> list[pa.Buffer]:
        """The bytes of each range, shorter where the file ends before. Once at most. Raises what reading raises."""
        ...

    def abandon(self) -> None:
        """Read nothing more, and let go of what has come: what `wait` returned is not looked at any more."""
        ...


class PinnedBytes(Protocol):
    """The bytes of one pinned file. All threads may use it; buffers belong to who asked for them."""

    @property
    def hole_bytes(self) -> int:
        """Bytes between two pieces that cost less than a call of their own."""
        ...

    def begin(self, ranges: Sequence[Range]) -> Arriving:
        """Set out to read ``ranges``; never waits."""
        ...

    def close(self) -> None:
        """Let go of the file; what was begun has been waited for, or abandoned."""
        ...


class LocalBytes:
    """A local file, ``opened``. Many bytes are mapped, few are copied."""

    hole_bytes = LOCAL_HOLE_BYTES

    def __init__(self, opened: pa.NativeFile) -> None:
        self._opened = opened

    def begin(self, ranges: Sequence[Range]) -> Arriving:
        return _Unread(self._opened, ranges)

    def close(self) -> None:
        self._opened.close()


class _Unread:
    whole: pa.Buffer | None = None

    def __init__(self, opened: pa.NativeFile, ranges: Sequence[Range]) -> None:
        self._opened, self._ranges = opened, ranges

    def wait(self) -> list[pa.Buffer]:
        descriptor = self._opened.fileno()
        if sum(stop - start for start, stop in self._ranges) >= MAPPED_BYTES:
            self.whole = pa.py_buffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
            return [self.whole.slice(start, stop - start) for start, stop in self._ranges]
        return [_read_local(descriptor, start, stop) for start, stop in self._ranges]

    def abandon(self) -> None:
        self._ranges, self.whole = (), None


def _read_local(descriptor: int, start: int, stop: int) -> pa.Buffer:
    """Read bytes [start, stop) of an open file, which other threads may read, too; fewer where it ends before."""
    buffer = pa.allocate_buffer(stop - start)
    view, done = memoryview(buffer), 0
    while done < len(view) and (count := os.preadv(descriptor, [view[done:]], start + done)):
        done += count
    return buffer if done == len(view) else buffer.slice(0, done)


class StoredBytes:
    """The object of a store that is ``file`` of the table at ``uri``."""

    hole_bytes = STORE_HOLE_BYTES

    def __init__(self, storage: Storage, uri: str, file: ObjectInfo) -> None:
        self._read = partial(read_pinned, storage, uri, file)

    def begin(self, ranges: Sequence[Range]) -> Arriving:
        return _Requested(self._read, ranges)

    def close(self) -> None:
        """Nothing is open."""


class _Requested:
    whole: pa.Buffer | None = None

    def __init__(self, read: Callable[[int, int], bytes], ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        self._requests = [
            [(low, in_background(read, low, high)) for low, high in _requests(start, stop)] for start, stop in ranges
        ]

    def wait(self) -> list[pa.Buffer]:
        try:
            return [
                _joined(start, stop, requests)
                for (start, stop), requests in zip(self._ranges, self._requests, strict=True)
            ]
        finally:
            self.abandon()

    def abandon(self) -> None:
        for requests in self._requests:
            for _, request in requests:
                request.cancel()
        self._requests = []


def _requests(start: int, stop: int) -> Iterator[Range]:
    """Requests for the bytes of one range, as equal as can be: the last to come decides."""
    count = -(-(stop - start) // REQUEST_BYTES)
    for place in range(count):
        yield start + (stop - start) * place // count, start + (stop - start) * (place + 1) // count


def _joined(start: int, stop: int, requests: list[tuple[int, Future[bytes]]]) -> pa.Buffer:
    if len(requests) <= 1:
        return pa.py_buffer(requests[0][1].result() if requests else b"")
    whole = pa.allocate_buffer(stop - start)
    target = np.frombuffer(whole, np.uint8)
    while requests:  # what was copied is let go of, so that no more than one request's bytes are held twice
        at, request = requests.pop(0)
        content = np.frombuffer(request.result(), np.uint8)
        target[at - start : at - start + len(content)] = content
    return whole


def read_pinned(storage: Storage, uri: str, file: ObjectInfo, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a pinned ``file`` of the table at ``uri``, which has them all.

    Else `TableVersionGone`, where there is no such file, or `DataFileChanged`.
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
                self._pool = _pool()
            return self._pool.submit(unless_ending, self._pool, work, *arguments)


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.renew)


def _pool() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(
        THREADS, thread_name_prefix="lakeckpt-ranges", initializer=lambda: stop_retrying_when(ending)
    )

    looked_s = time.monotonic()

    def ending() -> bool:
        nonlocal looked_s
        now_s = time.monotonic()
        if now_s - looked_s > _LOOK_S:
            looked_s = now_s
            try:
                pool.submit(int).cancel()
            except RuntimeError:
                looked_s = -math.inf
                return True
        return False

    return pool


_LOOK_S = 0.5


def unless_ending(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    """Do ``work`` in a thread of ``pool``; RuntimeError, untried, where the interpreter is ending or the pool closed.

    A pool does all that it was given before the interpreter may end, but takes nothing more: so it is asked to.
    """
    pool.submit(int)
    return work(*arguments)


def in_background(work: Callable[..., T], *arguments: Any) -> Future[T]:
    """What ``work(*arguments)`` comes to, run by one of the threads. It must not wait for others of them."""
    return _threads.submit(work, *arguments)
