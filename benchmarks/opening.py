"""What does it cost to open a table of 10,000 files, cold and again?  ``python -m benchmarks.opening [--json FILE]``

The store answers every request after 20 ms (a filesystem of fsspec's over a local folder, which sleeps first; a listing
takes 20 ms for every 1,000 objects, as S3 gives them). Limits: cold under 15 s; from the index that the first opening
saved under 1 s. Beside them, in the same run: the index of a table that grew by 100 files, and pyarrow's own dataset
discovery of the same files over the same store (schema of one file, no row counts).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from benchmarks.measure import measure, report
from lakeckpt import open_table

FILES, GROWN = 10_000, 100
LATENCY_S = 0.020


class SlowFileSystem(LocalFileSystem):  # type: ignore[misc]
    """A local folder behind a link with a round trip of 20 ms."""

    protocol = "slow"
    cachable = False

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        time.sleep(LATENCY_S)
        return super().cat_file(path, *args, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        time.sleep(LATENCY_S)
        return super().info(path, **kwargs)

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        found = LocalFileSystem().find(path, *args, **kwargs)  # its own look at every file is no request
        time.sleep(LATENCY_S * (1 + len(found) // 1000))
        return found


def write(folder: Path, files: range) -> None:
    for number in files:
        name = folder / f"part-{number:05d}.parquet"
        pq.write_table(pa.table({"x": range(number, number + 8), "y": [0.5] * 8}), name)


def main() -> None:
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    root = Path(tempfile.mkdtemp(prefix="lakeckpt-opening-"))
    try:
        for name, files in (("table", FILES), ("growing", FILES + GROWN), ("cache", 0), ("grown", 0)):
            (root / name).mkdir()
            write(root / name, range(FILES if name == "growing" else files))
        table, growing = f"slow://{root}/table", f"slow://{root}/growing"
        cache, grown = f"slow://{root}/cache", f"slow://{root}/grown"
        open_table(table, footer_cache=cache)
        open_table(growing, footer_cache=grown)
        saved = [path.name for path in (root / "grown" / "footers").iterdir()]
        write(root / "growing", range(FILES, FILES + GROWN))

        def after_growth() -> None:
            open_table(growing, footer_cache=grown)
            for path in (root / "grown" / "footers").iterdir():
                if path.name not in saved:
                    path.unlink()

        slow = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(SlowFileSystem()))
        cases = {
            "lakeckpt: cold, every footer": lambda: open_table(table),
            "lakeckpt: from the saved index": lambda: open_table(table, footer_cache=cache),
            f"lakeckpt: from the saved index, {GROWN} files more": after_growth,
            "pyarrow.dataset: discovery, no footers": lambda: ds.dataset(f"{root}/table", filesystem=slow),
        }
        measured = measure(cases, repetitions=3)
    finally:
        shutil.rmtree(root)
    rows = [
        (
            one.name,
            f"{one.median_s:.2f} s",
            f"{min(one.seconds):.2f} … {max(one.seconds):.2f} s",
            f"{one.peak_bytes / 1e6:.0f} MB",
        )
        for one in measured
    ]
    report(
        f"{FILES:,} files, {LATENCY_S * 1e3:.0f} ms a request",
        ("opening", "median", "spread", "memory"),
        rows,
        measured,
    )


if __name__ == "__main__":
    main()
