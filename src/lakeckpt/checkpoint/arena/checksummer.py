"""Who takes the checksums of what a device brings?  A process of its own, since the trainer has one interpreter's lock.

A checksum lets go of that lock and takes it again, a thousand times for each gigabyte, and every time the thread that
trains may have to wait for it: what queues kernels all the time loses a fifth of its speed to that. So a process that
maps the arena, and has a lock of its own, takes them; it is told which bytes, and answers in that order.

The process is started by `Checksummer` and ends with its standard input: when `close` is called, or the trainer has
died. It reads the arena, and never writes to it. It imports without torch.
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
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lakeckpt.checkpoint.digests import DIGEST_BYTES, leaf_digests
from lakeckpt.errors import ArenaError

__all__ = ["Checksummer", "main"]

_ASKED = struct.Struct("<QQ")
"""[start, stop): bytes of the arena's file."""
_THREADS = 3
_PATIENCE_S = 60.0
_END_S = 5.0


class Checksummer:
    """Takes the checksums of leaves of ``leaf_bytes`` of the arena at ``path``. Called by one thread."""

    def __init__(self, path: str, *, leaf_bytes: int, python: str = sys.executable) -> None:
        # It imports what this process imports, wherever either of them is by now.
        places = os.pathsep.join(dict.fromkeys(os.path.abspath(one) for one in sys.path))
        command = [python, "-P", "-m", __name__, path, str(leaf_bytes)]
        self._leaf_bytes = leaf_bytes
        self._asked: deque[int] = deque()
        """How many bytes each answer will have that was not taken yet."""
        self._come = bytearray()
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": places}
        )

    def ask(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Ask for the checksums of bytes [start, stop), for each of ``bounds``. `ArenaError` where it has ended."""
        assert self._process.stdin is not None
        asked = b"".join(_ASKED.pack(start, stop) for start, stop in bounds)
        try:
            while asked:  # a pipe takes thousands at once
                asked = asked[os.write(self._process.stdin.fileno(), asked) :]
        except OSError as error:
            raise self._gone(error) from error
        self._asked += [DIGEST_BYTES * max(1, -(-(stop - start) // self._leaf_bytes)) for start, stop in bounds]

    def take(self) -> bytes:
        """The checksums that were asked for first, of what was not taken yet. `ArenaError` where it has ended."""
        assert self._process.stdout is not None
        size, pipe, until = self._asked[0], self._process.stdout.fileno(), time.monotonic() + _PATIENCE_S
        waits = select.poll()
        waits.register(pipe, select.POLLIN)
        while len(self._come) < size:
            try:
                if not waits.poll(max(0.0, 1000 * (until - time.monotonic()))):
                    raise TimeoutError(f"no answer came in {_PATIENCE_S:.0f} s")
                come = os.read(pipe, 2**16)
            except OSError as error:
                raise self._gone(error) from error
            if not come:
                raise self._gone(None)
            self._come += come
        self._asked.popleft()
        found = bytes(self._come[:size])
        del self._come[:size]
        return found

    def _gone(self, error: Exception | None) -> ArenaError:
        why = f"{error}" if error is not None else f"its exit status is {self._process.poll()}"
        return ArenaError(f"process {self._process.pid}, which takes the checksums of an arena, has ended ({why})")

    def close(self) -> None:
        """Have it end, whatever it is at."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(path: str, leaf_bytes: int) -> None:
    """The process: answer what standard input asks, until it ends."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # its trainer may go on for a while, and ends it
        signal.signal(ignored, signal.SIG_IGN)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    data = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    os.close(descriptor)
    answers: queue.SimpleQueue[Future[bytes] | None] = queue.SimpleQueue()

    def answer() -> None:
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
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1], int(sys.argv[2]))
