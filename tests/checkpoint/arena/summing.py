"""A process that takes checksums as an agent does, for tests of captures without an agent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path

from lakeckpt.checkpoint.arena.checksummer import Checksummer

_ANSWER = """
import sys
from lakeckpt.checkpoint.arena.checksummer import answer
answer(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


@contextmanager
def summing(folder: str | Path) -> Iterator[tuple[Checksummer, subprocess.Popen[bytes]]]:
    """A checksummer of the arenas in ``folder``, and the process that answers it."""
    asked, asks = Pipe(duplex=False)
    comes, answers = Pipe(duplex=False)
    command = [sys.executable, "-c", _ANSWER, str(asked.fileno()), str(answers.fileno()), str(folder)]
    with subprocess.Popen(command, pass_fds=[asked.fileno(), answers.fileno()]) as process:
        asked.close()
        answers.close()
        checksummer = Checksummer(asks, comes)
        try:
            yield checksummer, process
        finally:
            process.kill()
