"""Is the decoder kept busy by a store that answers after 20 ms?  ``python -m benchmarks.ranges [--json FILE]``

The row groups of tables are read one after the other, as a reader of an epoch asks for them, and decoded: from a
local folder; from nginx in front of the same folder (``s3_server``), expected ahead and not; with other clients in
the place of ours, under the same plan of ranges; and by pyarrow's own scanner (``pre_buffer``, its default read-ahead)
over its S3 file system and over s3fs. Then whole loaders, to tensors. All in one run, interleaved. Beside the seconds:
the share of them in which our decoder was decoding rather than waiting for bytes, and how fast it is beside reading the
same locally. ``--scale 1 --repetitions 3`` is what the design note was written by; the defaults take two to three
minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import obstore.store
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
import s3fs
from rich.console import Console
from rich.table import Table as Shown

from benchmarks.s3_server import NginxS3
from lakeckpt import LakeDataset, LakeLoader
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.storage.base import Storage, split_uri
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.windows.decode import RowGroupDecoder

LATENCY_S = 0.020


@dataclass(frozen=True, slots=True, kw_only=True)
class Lake:
    """A table to read, and ``wanted`` of its columns (None: all)."""

    name: str
    files: int
    groups: int
    rows: int
    columns: int
    wanted: tuple[str, ...] | None = None

    def write(self, folder: Path) -> None:
        generator = np.random.default_rng(0)
        folder.mkdir(parents=True)
        rows = self.groups * self.rows
        for number in range(self.files):
            columns: dict[str, Any] = {}
            for place in range(self.columns):
                if place % 3 == 0:
                    columns[f"c{place}"] = generator.integers(0, 1 << 20, rows)
                else:
                    columns[f"c{place}"] = generator.random(rows, dtype=np.float32)
            path = folder / f"part-{number:04d}.parquet"
            pq.write_table(pa.table(columns), path, row_group_size=self.rows, write_page_checksum=True)


LAKES = (
    Lake(name="41 columns, all", files=6, groups=4, rows=50_000, columns=41),
    Lake(name="400 columns, 8 of them", files=12, groups=4, rows=10_000, columns=400,
         wanted=tuple(f"c{place}" for place in range(0, 400, 50))),
    Lake(name="41 columns, small files", files=200, groups=1, rows=2_000, columns=41),
)  # fmt: skip


class Other:
    """Our plan of ranges with another client: reads of the bucket ``b``, as `Storage.read` has them."""

    def __init__(self, read: Callable[[str, int, int], bytes], inner: Storage) -> None:
        self._read, self._inner = read, inner

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        assert stop is not None
        return self._read(path, start, stop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(slots=True)
class Decoding:
    """How long a decoder was decoding."""

    seconds: float = 0.0


def decoded(table: Table, columns: Iterable[str] | None, *, expected: bool, busy: Decoding) -> int:
    """Decode every row group, in the table's order; the number of rows."""
    decoder = RowGroupDecoder(table, None if columns is None else list(columns))
    fetch, waited = decoder._prefetcher.fetch, 0.0

    def watched(group: int) -> Any:
        nonlocal waited
        begin = time.perf_counter()
        try:
            return fetch(group)
        finally:
            waited += time.perf_counter() - begin

    decoder._prefetcher.fetch = watched  # type: ignore[method-assign]
    begin, rows = time.perf_counter(), 0
    groups = range(len(table.index.group_rows))
    if expected:
        decoder.expect(groups)
    for group in groups:
        rows += decoder.decode(group, 0, int(table.index.group_rows[group])).num_rows
    busy.seconds = time.perf_counter() - begin - waited
    decoder.close()
    return rows


def loaded(table: Table, columns: Iterable[str] | None, *, shuffle: bool) -> int:
    """All rows by a loader without workers, as tensors."""
    wanted = None if columns is None else list(columns)
    loader = LakeLoader(LakeDataset(table, batch_size=4096, columns=wanted, shuffle=shuffle))
    return sum(batch.receipt.rows for batch in loader)


def scanned(filesystem: Any, place: str, columns: Iterable[str] | None) -> int:
    """All rows by pyarrow's scanner, in order."""
    options = ds.ParquetFragmentScanOptions(pre_buffer=True)
    dataset = ds.dataset(
        place, filesystem=filesystem, format=ds.ParquetFileFormat(default_fragment_scan_options=options)
    )
    wanted = None if columns is None else list(columns)
    return sum(batch.num_rows for batch in dataset.to_batches(columns=wanted, batch_size=1 << 17))


def cases(lake: Lake, server: NginxS3, folder: Path, place: str) -> dict[str, Callable[[Decoding], int]]:
    """What is compared on one table, by name."""
    options, endpoint = server.options(), server.url.removeprefix("http://")
    local, remote = open_table(folder), open_table(f"s3://{place}", storage_options=options)
    arrow = pa.fs.S3FileSystem(
        access_key="k", secret_key="any", endpoint_override=endpoint, scheme="http", region="us-east-1"
    )
    by_s3fs = s3fs.S3FileSystem(
        key="k", secret="any", client_kwargs={"endpoint_url": server.url, "region_name": "us-east-1"},
        skip_instance_cache=True,
    )  # fmt: skip
    store = obstore.store.S3Store(
        place.partition("/")[0], access_key_id="k", secret_access_key="any", endpoint=server.url, region="us-east-1",
        client_options={"allow_http": True},
    )  # fmt: skip
    below = split_uri(f"s3://{place}")[1].partition("/")[2]

    def by_arrow(path: str, start: int, stop: int) -> bytes:
        with arrow.open_input_file(f"{place}/{path}") as file:
            return bytes(file.read_at(stop - start, start))

    def by_obstore(path: str, start: int, stop: int) -> bytes:
        return bytes(obstore.get_range(store, f"{below}/{path}", start=start, end=stop))

    def ours(table: Table, expected: bool) -> Callable[[Decoding], int]:
        return lambda busy: decoded(table, lake.wanted, expected=expected, busy=busy)

    def other(read: Callable[[str, int, int], bytes]) -> Callable[[Decoding], int]:
        return ours(replace(remote, storage=Other(read, remote.storage)), True)  # type: ignore[arg-type]

    return {
        "lakeckpt, local": ours(local, False),
        "lakeckpt, expected": ours(remote, True),
        "lakeckpt, one row group after the other": ours(remote, False),
        "lakeckpt's ranges by obstore": other(by_obstore),
        "lakeckpt's ranges by pyarrow.fs": other(by_arrow),
        "lakeckpt's ranges by s3fs": other(
            lambda path, start, stop: bytes(by_s3fs.cat_file(f"{place}/{path}", start=start, end=stop))
        ),
        "LakeLoader, local": lambda busy: loaded(local, lake.wanted, shuffle=False),
        "LakeLoader": lambda busy: loaded(remote, lake.wanted, shuffle=False),
        "LakeLoader, shuffled, local": lambda busy: loaded(local, lake.wanted, shuffle=True),
        "LakeLoader, shuffled": lambda busy: loaded(remote, lake.wanted, shuffle=True),
        "pyarrow scanner, local": lambda busy: scanned(pa.fs.LocalFileSystem(), str(folder), lake.wanted),
        "pyarrow scanner, pyarrow.fs": lambda busy: scanned(arrow, place, lake.wanted),
        "pyarrow scanner, s3fs": lambda busy: scanned(by_s3fs, place, lake.wanted),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one case took: of each repetition the seconds, those spent decoding (0: not known), and of the processor."""

    table: str
    files: int
    case: str
    seconds: tuple[float, ...]
    decoding: tuple[float, ...]
    processor: tuple[float, ...]


def measured(lake: Lake, repetitions: int) -> list[Row]:
    """All cases on one table, interleaved; once more before, which opens connections and is not counted."""
    taken: dict[str, list[tuple[float, float, float]]] = {}
    with NginxS3(latency_s=LATENCY_S) as server:
        folder = server.folder / "b" / "table"
        lake.write(folder)
        compared = cases(lake, server, folder, "b/table")
        for repetition in range(repetitions + 1):
            for name, case in compared.items():
                busy, used, begin = Decoding(), _processor_s(), time.perf_counter()
                rows = case(busy)
                spent = time.perf_counter() - begin, busy.seconds, _processor_s() - used
                assert rows == lake.files * lake.groups * lake.rows, (name, rows)
                if repetition:
                    taken.setdefault(name, []).append(spent)
    found = []
    for name, times in taken.items():
        seconds, decoding, processor = zip(*times, strict=True)
        found.append(
            Row(table=lake.name, files=lake.files, case=name, seconds=seconds, decoding=decoding, processor=processor)
        )
    return found


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def shown(rows: list[Row]) -> Shown:
    table = Shown(title=f"{rows[0].table}, {rows[0].files} files, {LATENCY_S * 1e3:.0f} ms a request")
    for place, name in enumerate(("reading", "median", "spread", "decoding", "local / this", "processor")):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    local = statistics.median(rows[0].seconds)
    for row in rows:
        median = statistics.median(row.seconds)
        busy = statistics.median(a / b for a, b in zip(row.decoding, row.seconds, strict=True))
        table.add_row(
            row.case,
            f"{median:.2f} s",
            f"{min(row.seconds):.2f} … {max(row.seconds):.2f} s",
            f"{busy:.0%}" if busy else "-",
            f"{local / median:.2f}",
            f"{statistics.median(row.processor):.2f} s",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranges")
    parser.add_argument("--scale", type=float, default=0.5, help="of the number of files (default 0.5)")
    parser.add_argument("--repetitions", type=int, default=2, help="default 2")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    arguments = parser.parse_args()
    path, found = arguments.json, []
    for lake in LAKES:
        files = max(1, round(lake.files * arguments.scale))
        found.append(measured(replace(lake, files=files), arguments.repetitions))
        Console(width=max(Console().width, 110)).print(shown(found[-1]))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        told = {"latency_s": LATENCY_S, "python": sys.version, "pyarrow": pa.__version__}
        path.write_text(json.dumps({"on": told, "cases": [asdict(row) for rows in found for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
