"""What does a mixture cost beside one table?  ``python -m benchmarks.mixtures [COMMIT] [--rounds N] [--json FILE]``

Documents of 300 tokens on average and sequences of 2,048 tokens are read shuffled and in process: from one table, from
a mixture of its eight files (weights from 0.03 on), and from one of 64 links to them (weights from 0.0001 on). Then
mixtures of eight whose micro-batches are of one source each, and of rows of ten numbers. Each case runs in a process of
its own, in turns. With a ``COMMIT``, its source takes turns with that of the working tree.

The table shows the processor time of a micro-batch, all threads together, and how fast the case is as a part of one
table; the peak memory and the same as a multiple of one table's; and threads and open files. The goals: a mixture of
eight at 0.7 of one table or more, with one source to a micro-batch at 0.9; 64 sources at most twice the processor time
and the memory of one table, 12 threads and 128 files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.beside import ROOT, source_of
from benchmarks.measure import show
from benchmarks.readers.streams.sources import weights

CASES = [
    *((kind, sources) for kind in ("documents", "sequences") for sources in (1, 8, 64)),
    *((kind, sources) for kind in ("batches", "rows") for sources in (1, 8)),
]
FILES, DOCUMENTS, ROWS, GROUP = 8, 25_000, 100_000, 2048
BATCH = {"documents": 54, "batches": 54, "sequences": 8, "rows": 256}


def write(folder: Path) -> None:
    """Write the tables, and the folders of their mixtures."""
    random = np.random.default_rng(0)
    for number in range(FILES):
        lengths = np.clip(random.gamma(4.0, 75.0, DOCUMENTS).astype(np.int32), 15, 900)
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        values = pa.array(random.integers(0, 50_000, offsets[-1], np.int32))
        tokens = pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), values)})
        columns = pa.table({f"x{place}": random.random(ROWS, np.float32) for place in range(10)})
        for name, table, group in (("tokens", tokens, GROUP), ("rows", columns, 4 * GROUP)):
            (folder / name / "1").mkdir(parents=True, exist_ok=True)
            pq.write_table(table, folder / name / "1" / f"{number}.parquet", row_group_size=group)
    for name in ("tokens", "rows"):
        for sources in (8, 64):
            for source in range(sources):
                place = folder / name / str(sources) / f"{source}"
                place.mkdir(parents=True)
                os.link(folder / name / "1" / f"{source % FILES}.parquet", place / "0.parquet")


def child(folder: str, kind: str, sources: int, batches: int) -> dict[str, Any]:
    """Read ``batches`` of a case, and return what they took."""
    import lakeckpt

    def dataset(place: Path) -> Any:
        found = lakeckpt.LakeDataset(place, batch_size=BATCH[kind], shuffle=True, seed=1, endless=True)
        return lakeckpt.pack(found, length=2048) if kind == "sequences" else found

    place = Path(folder, "rows" if kind == "rows" else "tokens", str(sources))
    mixed: Any = dataset(place)
    if sources > 1:
        given = {str(n): (dataset(place / str(n)), weight) for n, weight in enumerate(weights(sources))}
        mixed = lakeckpt.mix(given, seed=1, granularity="batch" if kind == "batches" else "row")
    begin = time.perf_counter()
    iterator = iter(lakeckpt.LakeLoader(mixed))
    next(iterator)
    first_s = time.perf_counter() - begin
    for _ in range(200):
        next(iterator)
    used, loop = time.process_time(), time.thread_time()
    for _ in range(batches):
        next(iterator)
    used, loop = time.process_time() - used, time.thread_time() - loop
    with open("/proc/self/status", encoding="ascii") as status:
        peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
    return {
        "processor_s": used / batches,
        "loop_s": loop / batches,
        "first_s": first_s,
        "peak_bytes": peak,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def run(source: Path, folder: Path, kind: str, sources: int, batches: int) -> dict[str, Any]:
    """Run a case in a process over ``source``."""
    code = "import json, sys; from benchmarks.mixtures import child; print(json.dumps(child(*json.loads(sys.argv[1]))))"
    command = [sys.executable, "-W", "ignore", "-c", code, json.dumps([str(folder), kind, sources, batches])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=folder)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Run the cases and show a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4000)
    parser.add_argument("--only", nargs="*", default=[], help="kinds of cases")
    parser.add_argument("--json", type=Path, help="where figures are written")
    asked = parser.parse_args()
    cases = [one for one in CASES if not asked.only or one[0] in asked.only]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder)
        sides = {"now": ROOT / "src"}
        if asked.commit is not None:
            sides = {asked.commit[:12]: source_of(asked.commit, folder / "before"), **sides}
        found: dict[str, list[dict[str, Any]]] = {}
        for _ in range(asked.rounds):
            for kind, sources in cases:
                for side, source in sides.items():
                    key = f"{kind} {sources} {side}"
                    found.setdefault(key, []).append(run(source, folder, kind, sources, asked.batches))
    show(
        "mixtures beside one table",
        ["case", "us a batch", "in the loop", "speed", "MB", "times", "first, s", "threads", "files"],
        [_row(f"{kind} {sources}", side, found) for kind, sources in cases for side in sides],
    )
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _row(case: str, side: str, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    runs, single = found[f"{case} {side}"], found[f"{case.split()[0]} 1 {side}"]

    def middle(name: str) -> float:
        return statistics.median(one[name] for one in runs)

    def beside(name: str) -> float:
        return statistics.median(one[name] / other[name] for one, other in zip(runs, single, strict=True))

    return [
        f"{case}, {side}",
        f"{middle('processor_s') * 1e6:,.0f}",
        f"{middle('loop_s') * 1e6:,.0f}",
        f"{1 / beside('processor_s'):.2f}",
        f"{middle('peak_bytes') / 1e6:,.0f}",
        f"{beside('peak_bytes'):.2f}",
        f"{middle('first_s'):.2f}",
        f"{middle('threads'):.0f}",
        f"{middle('files'):.0f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
