"""What is recorded of damage, behind the golden documents of this folder: digests of chunks, a commit with a skip list.

``python -m tests.golden.damage.make`` writes those that are missing. A document that is there is never written again:
it stands for what a released version left in users' runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lakeckpt.checkpoint.keep import Keep
from lakeckpt.checkpoint.manifest import Manifest, PartRef, ReaderRecord, entry_to_bytes
from lakeckpt.core.intervals import Intervals
from lakeckpt.core.skips import SkipList, SkippedGroup
from lakeckpt.lake.chunk_digests import ChunkDigests, chunk_digest

FOLDER = Path(__file__).parent
TABLE = "3dda028a9ccb2b40ad41948578ae8716"


def digests() -> ChunkDigests:
    """Of two files: two row groups of two leaves, of which one was not recorded, and one of one leaf."""
    numbers = [0, chunk_digest(memoryview(b"")), chunk_digest(memoryview(b"abc")), 2**32, 2**33 - 1]
    return ChunkDigests(
        table=TABLE,
        groups=np.array([2, 1], np.int64),
        leaves=np.array([2, 1], np.int64),
        digests=np.array(numbers, np.uint64),
    )


def commit() -> Manifest:
    """Of a reader that skipped two row groups, one of them where rows were selected."""
    entry = SkippedGroup(
        table=TABLE,
        epoch=1,
        num_lanes=4,
        rotation=0,
        group=17,
        file="day=1/ä.parquet",
        row_group=2,
        reason="column 'x' of row group 2 of the data file 'day=1/ä.parquet' cannot be decoded",
        positions=Intervals.of([(0, 128), (300, 2**40)]),
    )
    other = SkippedGroup(
        table=f"{TABLE}/{'d0' * 24}",
        epoch=0,
        num_lanes=1,
        rotation=0,
        group=0,
        file="a",
        row_group=0,
        reason="",
        positions=Intervals.of([(5, 6)]),
    )
    return Manifest(
        run="r",
        slot=1,
        attempt=0,
        parent=None,
        step=3,
        number=0,
        world_size=1,
        cut=bytes(16),
        parts=(PartRef(rank=0, path="parts/0/x.lkc", size_bytes=9, digest=bytes(range(16))),),
        readers={"reader": ReaderRecord(state={"step": 3}, index=TABLE, skips=SkipList([entry, other]))},
        seed=7,
        library="0.1.0",
        created_s=1.5,
        write_id="w",
        keep=Keep(last=2),
    )


DOCUMENTS = {
    "chunk-digests-1.0.lkc": lambda: digests().dumps(),
    "log.lkc": lambda: entry_to_bytes(commit()),
}


if __name__ == "__main__":
    for name, made in DOCUMENTS.items():
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(made())
            print(f"wrote {FOLDER / name}")
