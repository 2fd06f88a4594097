"""Threads that read ahead do not keep an interpreter that ends from ending."""

from __future__ import annotations

import subprocess
import sys

import pytest

MAIN = """
from concurrent.futures import ThreadPoolExecutor
from lakeckpt.lake.ranges import THREADS, in_background
from lakeckpt.reading.threads import Threads

def until_the_interpreter_ends():
    other = ThreadPoolExecutor(1)
    while True:
        try:
            other.submit(int).result()
        except RuntimeError:
            return

threads = Threads(1)
begin = {begin}
for _ in range({count}):
    begin(until_the_interpreter_ends)
begin(lambda: print("this was begun", flush=True))
"""


@pytest.mark.parametrize(("begin", "count"), [("threads.submit", "2"), ("in_background", "THREADS")])
def test_what_was_not_begun_when_the_interpreter_ends_is_not_done(begin: str, count: str) -> None:
    main = MAIN.replace("{begin}", begin).replace("{count}", count)
    ran = subprocess.run([sys.executable, "-c", main], capture_output=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")
