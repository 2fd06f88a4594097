"""What a measured process inherits from the one that only imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ASKED = """
import gc, io, sys
from benchmarks.readers import starter
sys.argv, sys.stdin = ["starter", "row-group"], io.StringIO("")
starter.main()
print(gc.get_freeze_count())
"""


def test_what_imports_left_is_no_reader_s_to_collect() -> None:
    # In a process of its own: what is set aside here is what other tests left, and would never be collected.
    command = [sys.executable, "-c", ASKED]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr
    ready, count = ran.stdout.split()
    assert ready == "ready" and int(count) > 10_000
