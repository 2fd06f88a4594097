"""How does a measured process start without importing everything anew?  Forked from one that has only imported.

``python -m benchmarks.readers.starter READER`` imports what the reader needs and says ``ready``. Each line on its
standard input is then a list of orders (task, case, out, log, environment, folder); it forks a process for each,
answers their numbers, and when all have ended, ``ended``. It never makes a reader itself: a forked process is as a
fresh one is after its imports, as torch's own loader starts its workers. Packages that do not stand a fork are imported
after it.

What the imports left is collected, and set aside (``gc.freeze``, as Python's own manual advises before a fork). Else
the first full collection, which falls to whichever reader happens to make the object that is one too many, looks at all
of torch's and copies their pages: 0.15 to 0.19 s, in a measurement of one second.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.readers.case import Case
from benchmarks.readers.process import run
from benchmarks.readers.registry import ENTRIES

__all__ = ["main"]


def main() -> None:
    entry = ENTRIES[sys.argv[1]]
    kind = entry.load()
    for module in () if entry.no_fork else kind.modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        pids = [_fork(order) for order in json.loads(line)]
        print(json.dumps(pids), flush=True)
        for pid in pids:
            os.waitpid(pid, 0)
        print("ended", flush=True)


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        _child(order)
    return pid


def _child(order: dict[str, Any]) -> NoReturn:
    """Be a process of its own: its session, folder, environment and log; then do the task, and end.

    It ends at once, unless the reader leaves something that only an orderly end removes: taking an interpreter down
    that has imported torch takes a second, which is no part of what is measured.
    """
    os.setsid()
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    case = Case.from_json(order["case"])
    run(order["task"], case, Path(order["out"]))
    if ENTRIES[case.reader].cleans_up:
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
