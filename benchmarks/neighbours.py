"""What does copying on one core take from a rank that computes on another?  ``python -m benchmarks.neighbours``

They share what feeds them: the last cache and the memory. A process multiplies matrices on one core, as a rank with
large layers does, while slices of 1 MiB are copied on another, each with its checksum: not at all, as fast as can be,
and gently, in small steps (`lakeckpt.checkpoint.capturing.moves`), as captures move in bubbles that have room. What
counts is what the computation loses for each gigabyte that was copied. Repetitions take turns; medians, and the lowest
and highest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.measure import show
from lakeckpt.checkpoint.capturing.moves import Moves
from lakeckpt.checkpoint.digests import leaf_digests

SLICE_BYTES = 2**20
SLICES = 192


def compute(connection: Connection, core: int, rows: int, width: int) -> None:
    """Answer each number of iterations with the seconds that they took."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    value = torch.randn(rows, width)
    layers = [torch.randn(*shape) for _ in range(2) for shape in ((width, 4 * width), (4 * width, width))]
    while (iterations := connection.recv()) is not None:
        begin = time.perf_counter()
        for _ in range(iterations):
            found = value
            for layer in layers:
                found = torch.relu(found @ layer)
        connection.send(time.perf_counter() - begin)


def slices() -> tuple[list[Moves], list[memoryview]]:
    """Copies of slices, and where each goes."""
    source, to = (torch.ones(SLICES * SLICE_BYTES, dtype=torch.uint8) for _ in range(2))
    every, views = [], []
    for begin in range(0, SLICES * SLICE_BYTES, SLICE_BYTES):
        moves = Moves()
        moves.add(to[begin : begin + SLICE_BYTES], source[begin : begin + SLICE_BYTES], None)
        every.append(moves)
        views.append(memoryview(to.numpy())[begin : begin + SLICE_BYTES])
    return every, views


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=96)
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--iterations", type=int, default=12)
    arguments.add_argument("--repetitions", type=int, default=15)
    arguments.add_argument("--json", type=Path, help="write what was measured to this file")
    asked = arguments.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one computes, the other copies")
    mine, other = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    rank = context.Process(target=compute, args=(other, cores[0], asked.rows, asked.width), daemon=True)
    rank.start()
    os.sched_setaffinity(0, {cores[1]})
    every, views = slices()
    found: dict[str, list[tuple[float, float, float]]] = {"fast": [], "gently": []}
    for repetition in range(-1, asked.repetitions):
        for way, measured in found.items():
            mine.send(asked.iterations)
            alone_s = mine.recv()
            mine.send(asked.iterations)
            begin, number = time.perf_counter(), 0
            while not mine.poll():
                every[number % SLICES].make(gently=way == "gently")
                leaf_digests(views[number % SLICES], SLICE_BYTES)
                number += 1
            copied, copying_s = number * SLICE_BYTES / 1e9, time.perf_counter() - begin
            beside_s = mine.recv()
            if repetition >= 0:  # the first one warms up
                measured.append((copied / copying_s, beside_s / alone_s - 1, (beside_s - alone_s) / copied))
    mine.send(None)
    rank.join()
    rows = []
    for way, measured in found.items():
        rates, shares, costs = (sorted(one) for one in zip(*measured, strict=True))
        spread = f"{costs[0] * 1e3:.1f} … {costs[-1] * 1e3:.1f}"
        middles = (statistics.median(rates), statistics.median(shares), statistics.median(costs) * 1e3)
        rows.append([way, f"{middles[0]:.1f} GB/s", f"{middles[1]:+.1%}", f"{middles[2]:.1f} ms", spread])
    title = f"matrices of {asked.width} by {4 * asked.width}, {asked.rows} rows, beside copies on another core"
    show(title, ["copied", "at", "the computation takes", "more for each GB", "lowest … highest"], rows)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(
            json.dumps({"asked": {"rows": asked.rows, "width": asked.width}, "ways": found}, indent=1)
        )


if __name__ == "__main__":
    main()
