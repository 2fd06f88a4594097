"""What does the watch cost?  ``python -m benchmarks.beats [--json FILE]``

Measured are the stores of a rank into its page, the poll of a watcher over the pages of a node's ranks, and a look at
a process with its stacks. The best of several turns counts: the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from benchmarks.measure import show
from lakeckpt.watch.beat import Beat, read_page
from lakeckpt.watch.facts import look_at_process
from lakeckpt.watch.stacks import stacks_of
from lakeckpt.watch.watcher import POLL_S


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="of a node (default: 4)")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        beats = [Beat(f"{folder}/{rank}.beat", rank=rank, world=options.ranks) for rank in range(options.ranks)]
        beat, receipt = beats[0], SimpleNamespace(epoch=0, step=1, rank=0, world_size=1, rows=4)
        found = {
            "a phase": _best(lambda: beat.phase("data"), 100_000),
            "a micro-batch": _best(lambda: beat.delivered(0, receipt), 100_000),
            "the end of a step": _best(lambda: beat.stepped(7, 0.0), 100_000),
            "a poll of the pages": _best(lambda: [read_page(one.path) for one in beats], 300),
        }
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
            time.sleep(1)
            found["a look at a process"] = _best(lambda: look_at_process(process.pid), 100)
            found["its stacks by py-spy"] = _best(lambda: stacks_of(process.pid, f"{folder}/0.beat", 0), 3)
            process.kill()
    share = found["a poll of the pages"] / POLL_S
    show(f"{options.ranks} ranks", ("what", "seconds"), [(name, f"{1e6 * one:,.2f} us") for name, one in found.items()])
    step_s = sum(found[name] for name in ("a phase", "a micro-batch", "the end of a step")) + 2 * found["a phase"]
    load = os.getloadavg()[0]
    print(f"a step of a rank: {1e6 * step_s:.1f} us; the watcher: {100 * share:.3f} % of a core; load {load:.1f}")
    if options.json is not None:
        options.json.write_text(
            json.dumps({**found, "a step": step_s, "share of a core": share, "load": load}, indent=1) + "\n"
        )
    return 0


def _best(work: Callable[[], object], times: int) -> float:
    """Return the seconds of one call, of the best of five turns."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            work()
        best = min(best, (time.perf_counter() - began) / times)
    return best


if __name__ == "__main__":
    sys.exit(main())
