"""Files with bytes that are not as they were written, read case after case; run as a process of its own.

``python -m tests.reading.fuzz_files KIND SEED COUNT`` prints the number of each case before it, so that a crash or a
hang is known by its number, and at the end a line of JSON: how the cases ended, and the peak of memory in MiB.

==========  ==========================================================================================================
kind        what is done to a file
==========  ==========================================================================================================
pages       bytes inside of pages, which have checksums, after the table was opened: the right rows, or damage
pinned      bytes anywhere after the table was opened, the file cut: rows of the right number, or an error of ours
fresh       bytes anywhere, more often in the footer, before the table is opened: an error of ours, or whatever it says
==========  ==========================================================================================================
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import DataFileDamaged, LakeckptError
from lakeckpt.lake.table import Table, open_table
from lakeckpt.lake.thrift import read_struct
from lakeckpt.reading.decode import RowGroupDecoder

MOST = 64 * 2**20
ROWS = 120


def samples() -> list[dict[str, Any]]:
    """Ways to write a file, all with checksums."""
    return [
        {"compression": "none", "use_dictionary": False},
        {"compression": "snappy", "use_dictionary": True},
        {"compression": "zstd", "data_page_version": "2.0", "use_dictionary": True},
        {"compression": "gzip", "data_page_size": 64, "use_dictionary": False, "write_page_index": True},
        {
            "compression": "none",
            "use_dictionary": False,
            "data_page_version": "2.0",
            "column_encoding": {"n": "DELTA_BINARY_PACKED", "text": "DELTA_BYTE_ARRAY", "f": "BYTE_STREAM_SPLIT"},
        },
    ]


def rows_of(dice: random.Random) -> pa.Table:
    some = np.random.default_rng(dice.getrandbits(32))
    return pa.table(
        {
            "n": pa.array(some.integers(-(2**40), 2**40, ROWS)),
            "f": some.normal(size=ROWS).astype(np.float32),
            "text": [None if i % 9 == 0 else "t" * int(some.integers(0, 30)) + str(i) for i in range(ROWS)],
            "list": [list(range(int(some.integers(0, 5)))) for _ in range(ROWS)],
            "struct": [{"a": i, "b": [str(i)] * (i % 3)} for i in range(ROWS)],
        }
    )


def page_bodies(path: Path) -> list[tuple[int, int]]:
    """Where the bytes lie that checksums cover."""
    content, found = memoryview(path.read_bytes()), []
    metadata = pq.read_metadata(path)
    for group in range(metadata.num_row_groups):
        for leaf in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(leaf)
            at = chunk.dictionary_page_offset or chunk.data_page_offset
            stop = at + chunk.total_compressed_size
            while at < stop:
                header, body = read_struct(content, at, wanted={3: None})
                at = body + header[3]
                found += [(body, at)] if at > body else []
    return found


def spoil(content: bytearray, dice: random.Random, places: list[tuple[int, int]]) -> bytearray:
    """Change a few bytes at ``places``."""
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        start, stop = dice.choice(places)
        at = dice.randrange(start, stop)
        kind = dice.randrange(4)
        length = min(stop - at, dice.choice((1, 1, 4, 40)))
        if kind == 0:
            content[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            content[at : at + length] = dice.randbytes(length)
        elif kind == 2:
            content[at : at + length] = bytes([dice.choice((0, 0x7F, 0x80, 0xFF))]) * length
        else:
            other = dice.randrange(len(content) - length)
            content[at : at + length] = content[other : other + length]
    return content


def footer_of(content: bytes) -> tuple[int, int]:
    (length,) = struct.unpack("<I", content[-8:-4])
    return len(content) - 8 - length, len(content)


def read_all(table: Table) -> pa.Table:
    decoder = RowGroupDecoder(table, max_row_group_bytes=MOST, use_threads=False)
    groups = [decoder.decode(group, 0, rows) for group, rows in enumerate(table.index.group_rows.tolist())]
    return pa.concat_tables([decoder.schema.empty_table(), *groups])


def one(kind: str, seed: int, path: Path) -> str:
    """Run one case; how it ended. What must not be raises AssertionError."""
    dice = random.Random(f"{kind}-{seed}")
    rows = rows_of(dice)
    pq.write_table(rows, path, row_group_size=50, write_page_checksum=True, **dice.choice(samples()))
    content = bytearray(path.read_bytes())
    table = None if kind == "fresh" else open_table([path])
    if kind == "pages":
        content = spoil(content, dice, page_bodies(path))
    elif dice.random() < 0.1:
        content = content[: dice.randrange(len(content))]
    elif kind == "fresh" and dice.random() < 0.7:
        content = spoil(content, dice, [footer_of(content)])
    else:
        content = spoil(content, dice, [(0, len(content))])
    path.write_bytes(content)
    try:
        found = read_all(open_table([path]) if table is None else table)
    except DataFileDamaged as error:
        return "damaged" if error.file else "damaged, nobody knows where"
    except LakeckptError as error:
        return error.kind
    if kind != "fresh":
        assert found.num_rows == ROWS and found.schema.equals(rows.schema)
    if found.equals(rows):
        return "right"
    assert kind != "pages", "wrong rows, though pages have checksums"
    return "other rows"


def main(kind: str, first: int, count: int) -> None:
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            print(seed, flush=True)
            ends[one(kind, seed, Path(folder, "x.parquet"))] += 1
    print(json.dumps({"ends": ends, "peak_mib": peak_mib()}))


def peak_mib() -> int:
    """The most memory that this process had since it began (``ru_maxrss`` would count its parent's before that)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
