"""What does it cost to open a table of 10,000 files, cold and again?  ``python -m benchmarks.opening [--json FILE]``

The store is nginx in front of a folder, read as S3 is (``s3_server``), and answers every request after 20 ms, a page
of 1,000 objects of a listing as well. Limits: cold under 15 s; from the index that the first opening saved under 1 s.
Beside them, in the same run: the index of a table that grew by 100 files, and pyarrow's own dataset discovery of the
same files over the same store (schema of one file, no row counts), and the ten requests of the listing alone, which no
opening can do without.
"""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
import urllib3

from benchmarks.measure import measure, report
from benchmarks.s3_server import NginxS3
from lakeckpt import open_table

FILES, GROWN = 10_000, 100
LATENCY_S = 0.020
_TOKEN = re.compile(rb"<NextContinuationToken>(.*?)</NextContinuationToken>")


def write(folder: Path, files: range) -> None:
    for number in files:
        name = folder / f"part-{number:05d}.parquet"
        pq.write_table(pa.table({"x": range(number, number + 8), "y": [0.5] * 8}), name)


def pages(url: str) -> None:
    """Ask for the pages of the table's listing, and look at nothing in them but where the next one begins."""
    token = ""
    with urllib3.PoolManager() as client:
        while True:
            told = {"list-type": "2", "prefix": "table/", **({"continuation-token": token} if token else {})}
            found = _TOKEN.search(client.request("GET", f"{url}/b", fields=told).data)
            if found is None:
                return
            token = found.group(1).decode()


def main() -> None:
    with NginxS3(latency_s=LATENCY_S) as server:
        bucket, options = server.folder / "b", server.options()
        for name, files in (("table", FILES), ("growing", FILES)):
            (bucket / name).mkdir(parents=True)
            write(bucket / name, range(files))
        table, growing, cache, grown = (f"s3://b/{name}" for name in ("table", "growing", "cache", "grown"))
        open_table(table, footer_cache=cache, storage_options=options)
        open_table(growing, footer_cache=grown, storage_options=options)
        (kept,) = (bucket / "grown" / "footers").iterdir()
        before = kept.read_bytes()
        write(bucket / "growing", range(FILES, FILES + GROWN))

        def after_growth() -> None:
            open_table(growing, footer_cache=grown, storage_options=options)
            kept.write_bytes(before)

        filesystem = pa.fs.S3FileSystem(
            access_key="k",
            secret_key="any",
            endpoint_override=server.url.removeprefix("http://"),
            scheme="http",
            region="us-east-1",
        )
        cases = {
            "lakeckpt: cold, every footer": lambda: open_table(table, storage_options=options),
            "lakeckpt: from the saved index": lambda: open_table(table, footer_cache=cache, storage_options=options),
            f"lakeckpt: from the saved index, {GROWN} files more": after_growth,
            "pyarrow.dataset: discovery, no footers": lambda: ds.dataset("b/table", filesystem=filesystem),
            "limit: the listing's requests alone": lambda: pages(server.url),
        }
        measured = measure(cases, repetitions=3)
    rows = [
        (
            one.name,
            f"{one.median_s:.2f} s",
            f"{min(one.seconds):.2f} … {max(one.seconds):.2f} s",
            f"{one.processor_s:.2f} s",
            f"{one.peak_bytes / 1e6:.0f} MB",
        )
        for one in measured
    ]
    report(
        f"{FILES:,} files, {LATENCY_S * 1e3:.0f} ms a request",
        ("opening", "median", "spread", "processor", "memory"),
        rows,
        measured,
    )


if __name__ == "__main__":
    main()
