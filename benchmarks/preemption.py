"""How fast does torchrun start a job again when a rank has died?  ``python -m benchmarks.preemption [--times N]``

Two ranks train under torchrun, one kills itself by SIGKILL, and torchrun sends SIGTERM to the other one and starts
both again. Counted is the time from the kill to the start of the first new process, with ``save_on=("SIGTERM",)`` and
without it; both take turns. Medians and the spread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.checkpoint.preemption import elastic
from tests.checkpoint.preemption.jobs import lines
from tests.frameworks.harness import write_table


def restart_s(mode: str) -> float:
    """Seconds from the kill to the start of the next attempt."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "table", rows=80, files=2)
        elastic.run(folder, mode)
        killed_s = next(float(one["killed_s"]) for one in lines(folder, 0) if "killed_s" in one)
        return min(float(one["begun_s"]) for one in lines(folder, 1) if "begun_s" in one) - killed_s


def main() -> None:
    """Measure both, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    times = parser.parse_args().times
    found: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(times):
        for mode, seconds in found.items():
            seconds.append(restart_s(mode))
    for mode, seconds in found.items():
        print(f"save_on {mode}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
