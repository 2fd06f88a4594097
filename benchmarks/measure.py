"""What the benchmarks share: interleaved repetitions, memory by tracemalloc, a table and a JSON file."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of every repetition, by the clock and of the process's own processor time, and the peak of what Python
    and numpy allocated in one more."""

    name: str
    seconds: tuple[float, ...]
    peak_bytes: int
    processor_seconds: tuple[float, ...] = ()

    @property
    def processor_s(self) -> float:
        """The median of the processor time."""
        return statistics.median(self.processor_seconds)

    @property
    def median_s(self) -> float:
        """The median of the repetitions."""
        return statistics.median(self.seconds)


def measure(cases: Mapping[str, Callable[[], object]], repetitions: int) -> list[Measured]:
    """Time all cases interleaved, ``repetitions`` times each; then trace each one's peak memory, on its own."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    processor: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repetitions):
        for name, case in cases.items():
            begin, before = time.perf_counter(), time.process_time()
            case()
            seconds[name].append(time.perf_counter() - begin)
            processor[name].append(time.process_time() - before)
    peaks = {}
    for name, case in cases.items():
        tracemalloc.start()
        case()
        peaks[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return [
        Measured(
            name=name,
            seconds=tuple(seconds[name]),
            peak_bytes=peaks[name],
            processor_seconds=tuple(processor[name]),
        )
        for name in cases
    ]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=max(Console().width, 110)).print(table)


def report(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], measured: Sequence[Measured]) -> None:
    """Print the table, and write what was measured to the file named by ``--json``, if it is asked for."""
    show(title, columns, rows)
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    path = parser.parse_args().json
    if path is not None:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"title": title, "on": machine, "cases": [asdict(m) for m in measured]}, indent=1))
