"""What does copying on one core take from a rank that computes on another?  ``python -m benchmarks.neighbours``

They share what feeds them: the last cache and the memory. A process multiplies matrices on one core, as a rank with
large layers does, while slices of 1 MiB are copied on another, each with its checksum: not at all, as fast as can be,
and gently (`lakeckpt.checkpoint.arena.filling`), as captures move in bubbles that have room. Beside it, what no copy
can do without: slices are only read, for their checksums. What counts is what the computation loses for each gigabyte.
Repetitions take turns; medians, and the lowest and highest.
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
from typing import TypeAlias

import numpy as np
import torch

from benchmarks.measure import show
from benchmarks.places import MEMORY, place_for_a_run
from lakeckpt.checkpoint.arena.filling import Filling, Run
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaLayout
from lakeckpt.checkpoint.format.digests import leaf_digests

SLICE_BYTES = 2**20
SLICES = 192
Measured: TypeAlias = dict[str, list[tuple[float, float, float]]]


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


def slices(filling: Filling) -> list[Run]:
    """What is copied, one for each slice of a generation."""
    source = np.ones(SLICES * SLICE_BYTES, np.uint8)
    to = np.frombuffer(filling.data, np.uint8)
    to[:] = 0
    places = range(0, SLICES * SLICE_BYTES, SLICE_BYTES)
    return [Run(at=at, to=to[at : at + SLICE_BYTES], source=source[at : at + SLICE_BYTES]) for at in places]


def copy_fast(filling: Filling, number: int, run: Run) -> None:
    """As captures do where bubbles are short."""
    np.copyto(run.to, run.source)
    filling.filled(number)


def copy_gently(filling: Filling, number: int, run: Run) -> None:
    """As captures do where bubbles have room."""
    filling.bring(number, [run])
    filling.filled(number)


def read(filling: Filling, number: int, run: Run) -> None:
    """The checksums alone, of the source."""
    leaf_digests(run.source.data, SLICE_BYTES)


WAYS = {"copied fast": copy_fast, "copied gently": copy_gently, "only read": read}


def measure(filling: Filling, rank: Connection, asked: argparse.Namespace) -> Measured:
    """For each way, of each repetition: GB a second, the share that the computation took longer, and how many seconds
    longer for each GB."""
    every = slices(filling)
    found: Measured = {way: [] for way in WAYS}
    for repetition in range(-1, asked.repetitions):
        for way, measured in found.items():
            rank.send(asked.iterations)
            alone_s = rank.recv()
            rank.send(asked.iterations)
            begin, number = time.perf_counter(), 0
            while not rank.poll():
                WAYS[way](filling, number % SLICES, every[number % SLICES])
                number += 1
            copied, copying_s = number * SLICE_BYTES / 1e9, time.perf_counter() - begin
            beside_s = rank.recv()
            if repetition >= 0:  # the first one warms up
                measured.append((copied / copying_s, beside_s / alone_s - 1, (beside_s - alone_s) / copied))
    return found


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
    other.close()
    os.sched_setaffinity(0, {cores[1]})
    identity = ArenaIdentity(run=b"neighbours".ljust(16), rank=0, world=1)
    layout = ArenaLayout(
        identity=identity,
        plan=bytes(16),
        data_bytes=SLICES * SLICE_BYTES,
        slice_bytes=SLICE_BYTES,
        documents_bytes=1,
        generations=3,
    )
    with place_for_a_run("neighbours", under=MEMORY) as folder, ArenaFolder(folder).create(layout) as arena:
        filling = arena.begin()
        assert filling is not None
        found = measure(filling, mine, asked)
        filling.abandon()
    mine.send(None)
    rank.join()
    rows = []
    for way, measured in found.items():
        rates, shares, costs = (sorted(one) for one in zip(*measured, strict=True))
        spread = f"{costs[0] * 1e3:.1f} … {costs[-1] * 1e3:.1f}"
        middles = (statistics.median(rates), statistics.median(shares), statistics.median(costs) * 1e3)
        rows.append([way, f"{middles[0]:.1f} GB/s", f"{middles[1]:+.1%}", f"{middles[2]:.1f} ms", spread])
    title = f"matrices of {asked.width} by {4 * asked.width}, {asked.rows} rows, beside another core that copies"
    show(title, ["slices", "at", "the computation takes", "more for each GB", "lowest … highest"], rows)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(
            json.dumps({"asked": {"rows": asked.rows, "width": asked.width}, "ways": found}, indent=1)
        )


if __name__ == "__main__":
    main()
