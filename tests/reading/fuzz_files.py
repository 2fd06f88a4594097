"""Files that were damaged after their table was opened, read case after case; run as a process of its own.

``python -m tests.reading.fuzz_files KIND SEED COUNT`` prints the number of each case before it, so that a crash or a
hang is known by its number, and at the end a line of JSON: how the cases ended.

==========  ==========================================================================================================
kind        what is done to a file
==========  ==========================================================================================================
pages       bytes inside of pages, which have checksums: the right rows, or `DataFileDamaged`
pinned      bytes anywhere, or the file is cut: rows of the right number, or an error of ours
==========  ==========================================================================================================
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeckpt.errors import DataFileDamaged, LakeckptError
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.windows.decode import RowGroupDecoder

MOST = 64 * 2**20
ROWS = 120


def samples() -> list[dict[str, Any]]:
    """Ways to write a file, all with checksums."""
    return [
        {"compression": "none", "use_dictionary": False},
        {"compression": "snappy", "use_dictionary": True},
        {"compression": "zstd", "data_page_version": "2.0", "use_dictionary": True},
        {"compression": "gzip", "use_dictionary": False, "write_page_index": True},
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
    """Return where the bytes lie that checksums cover. A column chunk has one data page, behind its dictionary."""
    content, metadata = path.read_bytes(), pq.read_metadata(path)
    found = []
    for group in range(metadata.num_row_groups):
        for leaf in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(leaf)
            begin = chunk.dictionary_page_offset or chunk.data_page_offset
            ends = sorted({chunk.data_page_offset, begin + chunk.total_compressed_size} - {begin})
            for start, stop in itertools.pairwise([begin, *ends]):
                size = stored_bytes(content[start : start + 32])
                found += [(stop - size, stop)] if size else []
    return found


def stored_bytes(header: bytes) -> int:
    """Return the third number of the header of a page: how many bytes follow the header."""
    match = re.match(rb"(?:\x15[\x80-\xff]*[\x00-\x7f]){2}\x15([\x80-\xff]*[\x00-\x7f])", header, re.DOTALL)
    assert match is not None
    return sum((byte & 127) << 7 * place for place, byte in enumerate(match[1])) >> 1


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
    table = open_table([path])
    if kind == "pages":
        content = spoil(content, dice, page_bodies(path))
    elif dice.random() < 0.1:
        content = content[: dice.randrange(len(content))]
    else:
        content = spoil(content, dice, [(0, len(content))])
    path.write_bytes(content)
    try:
        found = read_all(table)
    except DataFileDamaged as error:
        return "damaged" if error.file else "damaged, nobody knows where"
    except LakeckptError as error:
        return error.kind
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
    print(json.dumps({"ends": ends}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
