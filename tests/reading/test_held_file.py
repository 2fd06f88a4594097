"""The parts of a file that pyarrow reads from."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

SLOW_TO_LET_GO = """
import atexit, os, threading, time
atexit.register(lambda: print("there" if lent() is not None else "gone"))  # called after what is registered later
import pyarrow as pa
from lakeckpt.lake.parquet import held_file
content = pa.py_buffer(b"12345678")
other = held_file.HeldFile(8, [(0, content)])

def read_much():
    for _ in range(1000):
        other.seek(0)
        other.read_buffer(1)

{before}
kept = [held_file.HeldFile(8, {held}]
lent = held_file._lent[-1]

def let_go():
    begun.set()
    time.sleep(0.4)
    kept.clear()

begun = threading.Event()
threading.Thread(target=let_go, daemon=True).start()
begun.wait()
{after}
"""
PART, WHOLE = "[(0, content)]).read_buffer(8)", "[], whole=content).opened()"


def said_at_the_end(held: str, *, before: str = "", after: str = "") -> list[str]:
    script = SLOW_TO_LET_GO.format(held=held, before=before, after=after)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.split()


@pytest.mark.parametrize("held", [PART, WHOLE])
def test_the_interpreter_ends_when_pyarrows_threads_have_let_go(held: str) -> None:
    assert said_at_the_end(held) == ["gone"]


def test_what_is_in_use_is_found_among_much_that_was() -> None:
    assert said_at_the_end(PART, before="read_much(); atexit.register(read_much)") == ["gone"]


def test_a_fork_does_not_wait_for_what_was_given_to_threads_of_its_parent() -> None:
    forks = """
if os.fork() == 0:
    raise SystemExit(0 if len(held_file._lent) == 0 else print("it waits"))
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
    assert said_at_the_end(PART, after=forks) == ["there", "gone"]
