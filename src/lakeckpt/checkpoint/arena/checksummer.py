"""Who takes the checksums of what a device brings?  A process of its own, since the trainer has one interpreter's lock.

A checksum lets go of that lock and takes it again, a thousand times for each gigabyte, and every time the thread that
trains may have to wait for it, which has it to itself while it queues kernels. So a process that maps the arena, and
has a lock of its own, takes them; it is told which bytes, and answers in that order.

The process is started by `Checksummer` and ended by `close`; where the trainer has died, it ends with its standard
input. It reads the arena, and never writes to it. Imports without torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lakeckpt.checkpoint.digests import DIGEST_BYTES, leaf_digests
from lakeckpt.errors import ArenaError

__all__ = ["Checksummer", "main"]

_ASKED = struct.Struct("<QQ")
"""[start, stop): bytes of the arena's file."""
_THREADS = 3
_PATIENCE_S = 60.0
_ONCE_MORE_S = 2.0

_live: weakref.WeakSet[Checksummer] = weakref.WeakSet()


def _let_go() -> None:
    """In a process that was forked: the checksummer is to end with its trainer, whoever else lives on."""
    for one in list(_live):
        one.close()
        one._process.returncode = 0  # it is no child of ours


os.register_at_fork(after_in_child=_let_go)


class Checksummer:
    """Takes the checksums of leaves of ``leaf_bytes`` of the arena at ``path``. Called by one thread.

    ``OSError`` where the process cannot be started.
    """

    def __init__(self, path: str, *, leaf_bytes: int, python: str = sys.executable) -> None:
        # It imports what this process imports, wherever either of them is by now.
        places = dict.fromkeys(os.path.abspath(one) for one in sys.path if isinstance(one, str))
        command = [python, "-P", "-m", __name__, path, str(leaf_bytes)]
        self._leaf_bytes = leaf_bytes
        self._asked: deque[int] = deque()
        """How many bytes each answer will have that was not taken yet."""
        self._come = bytearray()
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # signals of a terminal are for its trainer
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)
        self._end = weakref.finalize(self, _end, self._process, os.getpid())
        _live.add(self)

    def ask(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Ask for the checksums of bytes [start, stop), for each of ``bounds``. `ArenaError` where it has ended."""
        asked = b"".join(_ASKED.pack(start, stop) for start, stop in bounds)
        with self._living():
            while asked:
                with contextlib.suppress(BlockingIOError):
                    asked = asked[os.write(self._to.fileno(), asked) :]
                if asked:
                    _wait(self._to.fileno(), select.POLLOUT)
        self._asked += [DIGEST_BYTES * max(1, -(-(stop - start) // self._leaf_bytes)) for start, stop in bounds]

    def take(self) -> bytes:
        """The checksums that were asked for first, of what was not taken yet. `ArenaError` where it has ended."""
        with self._living():
            size = self._asked[0]
            while len(self._come) < size:
                _wait(self._from.fileno(), select.POLLIN)
                come = os.read(self._from.fileno(), 2**16)
                if not come:
                    raise EOFError(f"its exit status is {self._process.poll()}")
                self._come += come
        self._asked.popleft()
        found = bytes(self._come[:size])
        del self._come[:size]
        return found

    @contextlib.contextmanager
    def _living(self) -> Iterator[None]:
        try:
            if self._to.closed:
                raise EOFError("it was closed")
            yield
        except (OSError, EOFError) as error:
            raise ArenaError(
                f"process {self._process.pid}, which takes the checksums of an arena, does not answer ({error})"
            ) from error

    def close(self) -> None:
        """Have it end, whatever it is at: it only reads."""
        self._end()


def _wait(pipe: int, what: int) -> None:
    """Until the pipe may be read or written. ``TimeoutError``, but not for the time that this process was stopped."""
    waits = select.poll()
    waits.register(pipe, what)
    if not (waits.poll(1000 * _PATIENCE_S) or waits.poll(1000 * _ONCE_MORE_S)):
        raise TimeoutError(f"nothing came in {_PATIENCE_S:.0f} s")


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


def main(path: str, leaf_bytes: int) -> None:
    """The process: answer what standard input asks, until it ends."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # its trainer may go on for a while, and ends it
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    data = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    os.close(descriptor)
    answers: queue.SimpleQueue[Future[bytes] | None] = queue.SimpleQueue()

    def answer() -> None:
        with contextlib.suppress(BrokenPipeError):  # the trainer has died
            while (found := answers.get()) is not None:
                told = found.result()
                while told:
                    told = told[os.write(sys.stdout.fileno(), told) :]

    teller = threading.Thread(target=answer)
    with ThreadPoolExecutor(_THREADS) as pool:
        teller.start()
        while len(asked := sys.stdin.buffer.read(_ASKED.size)) == _ASKED.size:
            start, stop = _ASKED.unpack(asked)
            answers.put(pool.submit(leaf_digests, data[start:stop], leaf_bytes))
    answers.put(None)
    teller.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
