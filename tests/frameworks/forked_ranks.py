"""This module runs a script as ranks that are forked from one process, which has imported a framework for all of them.

``python forked_ranks.py FRAMEWORK RANKS SCRIPT`` is a launcher for `tests.frameworks.harness.Job.run`. It ends with the
status of the first rank that fails, and leaves the other ranks to the harness.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys


def main(framework: str, ranks: int, script: str) -> int:
    importlib.import_module(framework)
    for rank in range(ranks):
        if os.fork() == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            runpy.run_path(script, run_name="__main__")
            return 0
    for _ in range(ranks):
        _, status = os.wait()
        if status:
            return os.waitstatus_to_exitcode(status) or 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
