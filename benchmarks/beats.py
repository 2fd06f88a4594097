"""What does the page of a rank cost a step?  ``python -m benchmarks.beats [--steps N]``

The beats of one step (the loop waits, gets a micro-batch, finishes the step, goes on) are written to a page in memory,
in a loop that does nothing else, and the median of 15 repetitions is shown in microseconds of processor time. Beside
it: the part of a step of 100 ms, and the time that a reader of the page takes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

from benchmarks.measure import show
from lakeckpt.core.receipts import Receipt, Span
from lakeckpt.watch.beat import Beat, read_page

_STEP_S = 0.1
_TIMES = 15


def microseconds(work: Callable[[int], object], count: int) -> float:
    """Return the median processor time of one call, in microseconds."""
    found = []
    for _ in range(_TIMES):
        begin = time.process_time()
        for step in range(count):
            work(step)
        found.append(1e6 * (time.process_time() - begin) / count)
    return statistics.median(found)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="of each repetition (default: 20000)")
    steps = parser.parse_args().steps
    spans = (Span(epoch=0, start=0, stop=8),)
    receipt = Receipt(epoch=0, micro_batch=0, lane=0, step=0, rank=0, world_size=1, spans=spans, step_rows=8)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        beat = Beat(f"{folder}/page.beat", rank=0, world=1)
        beat.begins(0, {"reader": (0, 0)})
        reader = beat.of_reader(0)

        def step(number: int) -> None:
            reader.waits()
            reader.delivered(receipt)
            beat.stepped(number, 0.0)
            beat.phase("between")

        writes = microseconds(step, steps)
        reads = microseconds(lambda _: read_page(beat.path), max(1, steps // 20))
    rows = [
        ("the beats of a step", f"{writes:.2f} us", f"{100 * writes / 1e6 / _STEP_S:.4f} % of a step of 100 ms"),
        ("reading a page", f"{reads:.1f} us", ""),
    ]
    show("The page of a rank", ("what", "processor time", ""), rows)


if __name__ == "__main__":
    main()
