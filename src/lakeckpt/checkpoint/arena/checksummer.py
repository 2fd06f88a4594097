"""This module lets another process, the agent, take the checksums of captured slices.

A checksum takes and releases the interpreter's lock a thousand times for each gigabyte, and each time the thread that
trains may wait for the lock while it has kernels to queue. The agent has an interpreter of its own, and maps the arena.
`Checksummer` sends requests on one pipe, and takes the answers in the same order from another pipe; `answer` is the
agent's side, which only reads arenas. `answer` starts and joins its threads. Neither starts a process. Imports without
torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import select
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection

from lakeckpt.checkpoint.format.digests import leaf_digests
from lakeckpt.errors import AgentError

__all__ = ["Checksummer", "answer"]

_REQUEST = struct.Struct("<64sQQQQ")
"""The name and the inode of the arena's file, [start, stop): bytes of the file, and how long leaves are."""
_THREADS = 3
_PATIENCE_S = 60.0
_ONCE_MORE_S = 2.0


class Checksummer:
    """Requests checksums on the pipe ``requests``, and takes them from the pipe ``answers``. Called by one thread."""

    def __init__(self, requests: Connection, answers: Connection) -> None:
        self._requests, self._answers = requests, answers
        self._name, self._inode, self._leaf_bytes = b"", 0, 1
        self.is_lost = False
        """Whether the agent has stopped answering: it has ended, or nothing came from it in a minute."""

    def use(self, name: str, inode: int, *, leaf_bytes: int) -> None:
        """Request checksums of the arena ``name`` from now on. An arena that is made anew has the same name, and
        another ``inode``."""
        self._name, self._inode, self._leaf_bytes = name.encode(), inode, leaf_bytes

    def ask(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Request the checksums of bytes [start, stop), for each of ``bounds``. Raises `AgentError` if the agent does
        not answer."""
        with self._answering():
            for start, stop in bounds:
                _wait(self._requests, select.POLLOUT)
                self._requests.send_bytes(_REQUEST.pack(self._name, self._inode, start, stop, self._leaf_bytes))

    def take(self) -> bytes:
        """Return the checksums that were requested first and not taken yet. Raises as `ask` does."""
        with self._answering():
            _wait(self._answers, select.POLLIN)
            return self._answers.recv_bytes()

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            self.is_lost = True
            why = str(error) or "it has ended"
            raise AgentError(f"the agent, which takes the checksums of an arena, does not answer ({why})") from error


def _wait(pipe: Connection, what: int) -> None:
    """Wait until the pipe may be read or written. Raises ``TimeoutError``; the time for which this process was stopped
    does not count."""
    waits = select.poll()
    waits.register(pipe, what)
    if not (waits.poll(1000 * _PATIENCE_S) or waits.poll(1000 * _ONCE_MORE_S)):
        raise TimeoutError(f"nothing came in {_PATIENCE_S:.0f} s")


def answer(requests: int, answers: int, folder: str) -> None:
    """Answer on the pipe ``answers`` what the pipe ``requests`` asks of arenas in ``folder``, until that pipe ends.

    An arena that cannot be mapped, or has another inode, ends it, and closes the pipe: the trainer then takes the
    checksums itself.
    """
    found: queue.SimpleQueue[Future[bytes] | None] = queue.SimpleQueue()
    with (
        ThreadPoolExecutor(_THREADS) as pool,
        Connection(requests, writable=False) as requested,
        Connection(answers, readable=False) as answered,
    ):
        sender = threading.Thread(target=_send, args=(found, answered), daemon=True)
        sender.start()
        mapped, data = (b"", 0), memoryview(b"")
        with contextlib.suppress(EOFError, OSError):
            while True:
                name, inode, start, stop, leaf_bytes = _REQUEST.unpack(requested.recv_bytes())
                if (name, inode) != mapped:  # no other file gets the inode of a file that is mapped
                    mapped, data = (name, inode), _mapped(os.path.join(folder, name.rstrip(b"\0").decode()), inode)
                found.put(pool.submit(leaf_digests, data[start:stop], leaf_bytes))
        found.put(None)
        sender.join()


def _send(found: queue.SimpleQueue[Future[bytes] | None], answered: Connection) -> None:
    with contextlib.suppress(BrokenPipeError):  # the trainer has died
        while (one := found.get()) is not None:
            answered.send_bytes(one.result())


def _mapped(path: str, inode: int) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino != inode:
            raise FileNotFoundError(f"another file has the name {path!r}")
        return memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
