"""What do metrics cost a loop that reads?  ``python -m benchmarks.metrics [--rounds N] [--json FILE]``

A table of 41 columns of numbers is read in micro-batches of 4,096 rows, in process, an epoch at a time. Three kinds of
epochs take turns in changing order: nothing is counted; everything is counted; a thread also reads all metrics, ten
times a second (a scraper does so every 15 s). The first table has the processor time of a micro-batch of each kind, and
the median of its ratios to the epoch of the same round in which nothing is counted, with quartiles: these show what is
left of other work on the machine.

The second table has what the ratios cannot resolve, measured alone: the processor time that the counters of one
micro-batch take, in a loop that does nothing else, and that of one reading of all metrics. Both are also shown as parts
of the processor time of reading, where metrics are read every 15 s. The limit is 1 % for both together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from benchmarks.measure import show
from benchmarks.places import place_for_a_run
from benchmarks.reading import KINDS, written
from lakeckpt import LakeDataset, LakeLoader
from lakeckpt.counters import ReaderCounters, StoreCounters
from lakeckpt.metrics import readings

MOST = 0.01
"""The part of the processor time of a micro-batch that metrics may take."""
_SHARE = 1 / 4
_EVERY_S = 0.1
_SCRAPE_S = 15.0
_ALONE = 100_000
T = TypeVar("T")


class _Nothing(ReaderCounters):
    """Counts nothing."""

    def pull(self, found: Iterator[T]) -> T | None:
        return next(found, None)

    def delivered(self, rows: int) -> None:
        pass


@contextmanager
def uncounted(loader: LakeLoader) -> Iterator[None]:
    """Count nothing of what ``loader`` delivers and of what is read of stores."""
    with (
        mock.patch.object(loader._counting, "begin", return_value=_Nothing()),
        mock.patch.object(StoreCounters, "read"),
    ):
        yield


@contextmanager
def scraped() -> Iterator[None]:
    """Read all metrics in a thread, ten times a second."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(_EVERY_S):
            readings()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


BARE = "nothing is counted"
WAYS: dict[str, Callable[[LakeLoader], AbstractContextManager[None]]] = {
    BARE: uncounted,
    "counted": lambda _: nullcontext(),
    "counted, and read ten times a second": lambda _: scraped(),
}


def epoch(loader: LakeLoader) -> float:
    """Read an epoch; the processor time of a micro-batch in seconds."""
    begin_s, batches = time.process_time(), 0
    for _ in loader:
        batches += 1
    return (time.process_time() - begin_s) / batches


def alone(work: Callable[[], Any], times: int) -> float:
    """The processor time of ``work`` in seconds, the median of five loops."""
    found = []
    for _ in range(5):
        begin_s = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - begin_s) / times)
    return statistics.median(found)


def counters_alone(loader: LakeLoader) -> float:
    """What the counters of one micro-batch take, beside a loop that takes it without."""
    receipt, counters, nothing = loader.last_receipt, ReaderCounters(), _Nothing()
    assert receipt is not None
    endless: Iterator[Any] = iter(lambda: receipt, None)

    def counted() -> None:
        counters.pull(endless)
        counters.delivered(receipt.rows)

    def bare() -> None:
        nothing.pull(endless)

    return alone(counted, _ALONE) - alone(bare, _ALONE)


def main() -> int:
    """Measure and show; 1 where the counters take more than they may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where figures are written")
    asked = parser.parse_args()
    kind = next(one for one in KINDS if one.name == "tabular")
    with place_for_a_run("metrics") as folder:
        written(kind, folder, _SHARE)
        loader = LakeLoader(LakeDataset(folder, batch_size=kind.batch_size))
        found: dict[str, Any] = {name: [] for name in WAYS}
        for number in range(asked.rounds + 1):
            for place in range(len(WAYS)):
                name = list(WAYS)[(place + number) % len(WAYS)]
                with WAYS[name](loader):
                    found[name].append(epoch(loader))
        found = {name: every[1:] for name, every in found.items()}  # the first round warms up
        next(iter(loader))
        found["counters_s"], found["reading_s"] = counters_alone(loader), alone(readings, 200)
    _report(found)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    batch_s = statistics.median(found[BARE])
    return int(found["counters_s"] / batch_s + found["reading_s"] / _SCRAPE_S > MOST)


def _report(found: dict[str, Any]) -> None:
    batch_s = statistics.median(found[BARE])
    rows = []
    for name in WAYS:
        ratios = [one / bare for one, bare in zip(found[name], found[BARE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        time_us = f"{1e6 * statistics.median(found[name]):,.0f}"
        rows.append([name, time_us, f"{middle:.4f}", f"{low:.4f} to {high:.4f}"])
    show("Processor time of a micro-batch of 41 columns and 4,096 rows", ["", "µs", "ratio", "quartiles"], rows)
    batches = _SCRAPE_S / batch_s
    alone = [("counters of a micro-batch", "counters_s", 1), ("reading all metrics, every 15 s", "reading_s", batches)]
    show(
        "Measured alone",
        ["", "µs", "of the processor time of reading"],
        [
            [name, f"{1e6 * found[key]:,.2f}", f"{100 * found[key] / batch_s / times:.4f} %"]
            for name, key, times in alone
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
