"""This module has the checksums of captured slices taken by another process, which maps the arena: the agent.

A checksum takes and releases the interpreter's lock a thousand times for each gigabyte, and each time the thread that
trains may wait for the lock while it has kernels to queue. The agent has a lock of its own. `Checksummer` asks on a
pipe and takes the answers in the same order from another pipe; `answer` is the agent's side. Neither starts a process.
The agent's side reads arenas and never writes to them. Imports without torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import select
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, leaf_digests
from lakeckpt.errors import ArenaError

__all__ = ["Checksummer", "answer"]

_ASKED = struct.Struct("<64sQQQ")
"""The name of the arena's file, [start, stop): bytes of it, and how long leaves are."""
_THREADS = 3
_PATIENCE_S = 60.0
_ONCE_MORE_S = 2.0


class Checksummer:
    """Asks on the pipe ``to`` for checksums, and takes them from the pipe ``come``. Called by one thread."""

    def __init__(self, to: int, come: int) -> None:
        self._to, self._from = to, come
        self._asked: deque[int] = deque()
        """How many bytes each answer has that was not taken yet."""
        self._come = bytearray()
        self._name, self._leaf_bytes = b"", 1
        # Not closed before the last user has let go: another thread may be about to read.
        self._close = weakref.finalize(self, _closed, to, come)

    def use(self, name: str, *, leaf_bytes: int) -> None:
        """Ask of the arena ``name`` from now on."""
        self._name, self._leaf_bytes = name.encode(), leaf_bytes

    def ask(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Ask for the checksums of bytes [start, stop), for each of ``bounds``. Raises `ArenaError` where nobody
        answers."""
        asked = b"".join(_ASKED.pack(self._name, start, stop, self._leaf_bytes) for start, stop in bounds)
        with self._living():
            while asked:
                with contextlib.suppress(BlockingIOError):
                    asked = asked[os.write(self._to, asked) :]
                if asked:
                    _wait(self._to, select.POLLOUT)
        self._asked += [DIGEST_BYTES * max(1, -(-(stop - start) // self._leaf_bytes)) for start, stop in bounds]

    def take(self) -> bytes:
        """Return the checksums that were asked for first and not taken yet. Raises `ArenaError` where nobody
        answers."""
        with self._living():
            size = self._asked[0]
            while len(self._come) < size:
                _wait(self._from, select.POLLIN)
                come = os.read(self._from, 2**16)
                if not come:
                    raise EOFError("it has ended")
                self._come += come
        self._asked.popleft()
        found = bytes(self._come[:size])
        del self._come[:size]
        return found

    @contextlib.contextmanager
    def _living(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            raise ArenaError(f"the agent, which takes the checksums of an arena, does not answer ({error})") from error

    def close(self) -> None:
        """Close the pipes. Only where no other thread uses them: in a forked process."""
        self._close()


def _closed(*pipes: int) -> None:
    for one in pipes:
        os.close(one)


def _wait(pipe: int, what: int) -> None:
    """Wait until the pipe may be read or written. ``TimeoutError``, but not for the time that this process was
    stopped."""
    waits = select.poll()
    waits.register(pipe, what)
    if not (waits.poll(1000 * _PATIENCE_S) or waits.poll(1000 * _ONCE_MORE_S)):
        raise TimeoutError(f"nothing came in {_PATIENCE_S:.0f} s")


def answer(asked: int, answers: int, folder: str) -> None:
    """Answer on the pipe ``answers`` what the pipe ``asked`` asks of arenas in ``folder``, until that pipe ends.

    An arena that cannot be mapped ends it, and closes the pipe: whoever asked takes the checksums then.
    """
    found: queue.SimpleQueue[Future[bytes] | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(_THREADS) as pool, open(asked, "rb") as questions:
        teller = threading.Thread(target=_tell, args=(found, answers), daemon=True)
        teller.start()
        name, data = b"", memoryview(b"")
        with contextlib.suppress(OSError):
            while len(question := questions.read(_ASKED.size)) == _ASKED.size:
                arena, start, stop, leaf_bytes = _ASKED.unpack(question)
                if arena != name:
                    name, data = arena, _mapped(os.path.join(folder, arena.rstrip(b"\0").decode()))
                found.put(pool.submit(leaf_digests, data[start:stop], leaf_bytes))
        found.put(None)
        teller.join()
    os.close(answers)


def _tell(found: queue.SimpleQueue[Future[bytes] | None], answers: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the trainer has died
        while (one := found.get()) is not None:
            told = one.result()
            while told:
                told = told[os.write(answers, told) :]


def _mapped(path: str) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
