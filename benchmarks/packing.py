"""How fast are packed sequences read?  ``python -m benchmarks.packing [--json FILE]``

One epoch in process of documents of 300 tokens on average (int32), shuffled, in tokens a second: packed into sequences
of 2,048 tokens with and without labels, beside the same documents unpacked, and beside pyarrow, which only decodes the
same row groups. All cases take turns in one run. The goal: packed reading at 0.8 of unpacked reading or more.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import measure, report
from lakeckpt import LakeDataset, LakeLoader, open_table, pack

LENGTH, ROWS, FILES, ROW_GROUP = 2048, 200_000, 4, 8192


def write(folder: Path, rows: int) -> int:
    """Write the documents; return how many tokens they have."""
    random, tokens = np.random.default_rng(0), 0
    for number in range(FILES):
        lengths = np.clip(random.gamma(4.0, 75.0, rows // FILES).astype(np.int32), 15, 900)
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        values = pa.array(random.integers(0, 50_000, offsets[-1], np.int32))
        table = pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), values)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=ROW_GROUP)
        tokens += len(values)
    return tokens


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokens = write(folder, ROWS)
        table = open_table(folder)

        def documents(batch_size: int) -> LakeDataset:
            return LakeDataset(table, batch_size=batch_size, columns=["tokens"], shuffle=True, seed=1)

        def read(dataset: LakeDataset, name: str) -> None:
            seen = 0
            for batch in LakeLoader(dataset):
                column: Any = batch[name]
                seen += len(column)
            assert seen

        def decode() -> None:
            for file in sorted(folder.glob("*.parquet")):
                opened = pq.ParquetFile(file, memory_map=True)
                for group in range(opened.num_row_groups):
                    opened.read_row_group(group, columns=["tokens"])

        cases = {
            "packed": lambda: read(pack(documents(8), length=LENGTH), "tokens"),
            "packed, with labels": lambda: read(pack(documents(8), length=LENGTH, labels=True), "tokens"),
            "unpacked, as many tokens a batch": lambda: read(documents(8 * LENGTH // 300), "tokens"),
            "pyarrow decodes the row groups": decode,
        }
        measured = measure(cases, repetitions=5)
    unpacked = measured[2].median_s
    report(
        f"packed reading: {tokens:,} tokens, sequences of {LENGTH:,}",
        ("case", "million tokens/s", "of unpacked", "by processor time"),
        [
            (
                one.name,
                f"{tokens / one.median_s / 1e6:,.1f}",
                f"{unpacked / one.median_s:.2f}",
                f"{measured[2].processor_s / one.processor_s:.2f}",
            )
            for one in measured
        ],
        measured,
    )


if __name__ == "__main__":
    main()
