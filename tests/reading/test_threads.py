"""Threads that read ahead go on after a failure, and do not keep an interpreter that ends from ending."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from lakeckpt.reading.windows.threads import Threads
from tests.patience import PATIENCE_S

MAIN = """
from concurrent.futures import ThreadPoolExecutor
from lakeckpt.lake.parquet.ranges import THREADS, in_background
from lakeckpt.reading.shared import Shared
from lakeckpt.reading.windows.threads import Threads

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
    ran = subprocess.run([sys.executable, "-c", main], capture_output=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


def test_threads_go_on_after_work_that_failed() -> None:
    threads = Threads(1)
    for failing in [threads.submit(lambda: int("no number")) for _ in range(3)]:
        with pytest.raises(ValueError, match="no number"):
            failing.result(60)
    assert threads.submit(lambda: 1).result(PATIENCE_S) == 1
    threads.close()


def test_closing_waits_for_no_lock_of_a_pool() -> None:
    # The collector may close them in the very thread that a pool has begun to start, and holds its lock for.
    threads = Threads(5)  # a number that no other test has
    assert threads.submit(lambda: 1).result(PATIENCE_S) == 1
    pool = threads._used().whole
    with pool._shutdown_lock:
        closing = threading.Thread(target=threads.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
    workers = list(pool._threads)
    assert workers
    del pool
    for worker in workers:  # a pool that nobody has ends its threads
        worker.join(PATIENCE_S)
        assert not worker.is_alive()


def test_readers_share_threads_and_one_that_is_closed_stops_no_other() -> None:
    first, second = Threads(2), Threads(2)
    names = {one.submit(lambda: threading.current_thread().name).result(PATIENCE_S) for one in [first, second] * 20}
    assert len(names) <= 2 and all(name.startswith("lakeckpt-window") for name in names)
    first.close()
    assert second.submit(lambda: 7).result(PATIENCE_S) == 7
    assert first.submit(lambda: 8).result(PATIENCE_S) == 8
