"""The parts of a file that pyarrow reads from."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import PATIENCE_S

SLOW_TO_LET_GO = """
import atexit, threading, time, weakref
atexit.register(lambda: print("there" if lent() is not None else "gone"))  # called after what is registered later
import pyarrow as pa
from lakeckpt.reading.held_file import HeldFile
{more}
kept = [HeldFile(8, [(0, pa.py_buffer(b"12345678"))]).read_buffer(8)]
lent = weakref.ref(kept[0])

def let_go():
    begun.set()
    time.sleep(0.5)
    kept.clear()

begun = threading.Event()
threading.Thread(target=let_go, daemon=True).start()
begun.wait()
"""


def said_at_the_end(more: str) -> str:
    script = SLOW_TO_LET_GO.format(more=more)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.strip()


def test_the_interpreter_ends_when_pyarrows_threads_have_let_go() -> None:
    assert said_at_the_end("") == "gone"


def test_what_is_in_use_is_found_among_much_that_was() -> None:
    many = "other = HeldFile(8, [(0, pa.py_buffer(b'12345678'))])\n"
    read = "for _ in range({}): other.seek(0), other.read_buffer(1)\n"
    later = many + read.format(1000) + f"atexit.register(lambda: exec({read.format(1000)!r}))"
    assert said_at_the_end(later) == "gone"
