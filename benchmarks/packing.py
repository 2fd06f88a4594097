"""How fast are packed sequences read, and how soon after a restart?  ``python -m benchmarks.packing [--json FILE]``

One epoch in process of documents of 300 tokens on average (int32), shuffled, in tokens a second: packed into sequences
of 2,048 tokens with and without labels, beside the same documents unpacked, and beside pyarrow, which only decodes the
same row groups. All cases take turns in one run. Each reads its table twice in a row, and the second reading counts:
the first one also gets memory that the case before it gave back to the system, which training does once. The goal:
packed reading at 0.8 of unpacked reading or more.

Then the first batch of a packed dataset whose table is open: at the start of an epoch, and resumed from a state at 90 %
of it, in turns. The goal: at most 1.2 of a fresh start.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import Measured, report, show
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


def in_turns(cases: Mapping[str, Callable[[], object]], repetitions: int, warm: int) -> list[Measured]:
    """Time all cases in turns, ``warm`` calls before each, which do not count. The turns begin with another case each
    time."""
    names = list(cases)
    walls: dict[str, list[float]] = {name: [] for name in names}
    used: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        for place in range(len(names)):
            name = names[(place + repetition) % len(names)]
            for _ in range(warm):
                cases[name]()
            begin, before = time.perf_counter(), time.process_time()
            cases[name]()
            walls[name].append(time.perf_counter() - begin)
            used[name].append(time.process_time() - before)
    return [
        Measured(name=name, seconds=tuple(walls[name]), peak_bytes=0, processor_seconds=tuple(used[name]))
        for name in names
    ]


def read(dataset: LakeDataset) -> None:
    """Read an epoch."""
    seen = 0
    for batch in LakeLoader(dataset):
        column: Any = batch["tokens"]
        seen += len(column)
    assert seen


def first_batch(dataset: LakeDataset, state: Mapping[str, Any] | None) -> None:
    """Read the first batch, or the first one after ``state``."""
    loader = LakeLoader(dataset)
    if state is not None:
        loader.load_state_dict(state)
    assert len(next(iter(loader))["tokens"])


def decode(folder: Path) -> None:
    """Decode all row groups by pyarrow alone."""
    for file in sorted(folder.glob("*.parquet")):
        opened = pq.ParquetFile(file, memory_map=True)
        for group in range(opened.num_row_groups):
            opened.read_row_group(group, columns=["tokens"])


def state_at(dataset: LakeDataset, share: float) -> Mapping[str, Any]:
    """Return the state after this share of an epoch's steps."""
    loader = LakeLoader(dataset)
    state = loader.state_dict()
    return {**state, "step": int(share * len(loader))}


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokens = write(folder, ROWS)
        table = open_table(folder)

        def documents(batch_size: int) -> LakeDataset:
            return LakeDataset(table, batch_size=batch_size, columns=["tokens"], shuffle=True, seed=1)

        def packed(*, labels: bool = True) -> LakeDataset:
            return pack(documents(8), length=LENGTH, labels=labels)

        measured = in_turns(
            {
                "packed": lambda: read(packed(labels=False)),
                "packed, with labels": lambda: read(packed()),
                "unpacked, as many tokens a batch": lambda: read(documents(8 * LENGTH // 300)),
                "pyarrow decodes the row groups": lambda: decode(folder),
            },
            repetitions=5,
            warm=1,
        )
        late = state_at(packed(), 0.9)
        begun = in_turns(
            {"at 0 %": lambda: first_batch(packed(), None), "at 90 %": lambda: first_batch(packed(), late)},
            repetitions=15,
            warm=0,
        )
    unpacked, fresh = measured[2], begun[0]
    show(
        "first batch of a packed dataset",
        ("case", "ms", "of a fresh start", "by processor time"),
        [(one.name, f"{one.median_s * 1e3:,.0f}", *ratios(one, fresh)) for one in begun],
    )
    report(
        f"packed reading: {tokens:,} tokens, sequences of {LENGTH:,}",
        ("case", "million tokens/s", "of unpacked", "by processor time"),
        [(one.name, f"{tokens / one.median_s / 1e6:,.1f}", *ratios(unpacked, one)) for one in measured],
        [*measured, *begun],
    )


def ratios(one: Measured, other: Measured) -> tuple[str, str]:
    """Return how much longer ``one`` took than ``other``, by the clock and of processor time."""
    return f"{one.median_s / other.median_s:.2f}", f"{one.processor_s / other.processor_s:.2f}"


if __name__ == "__main__":
    main()
