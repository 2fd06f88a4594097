"""How fast are packed sequences read, and how soon after a restart?  ``python -m benchmarks.packing [--json FILE]``

One epoch in process of documents of 300 tokens on average (int32), in tokens a second, packed into sequences of 2,048
tokens: shuffled, with all columns, with labels, and with tokens and cu_seqlens alone, beside the same documents
unpacked; and in order, beside pyarrow, which decodes the same row groups, concatenates their values and cuts them. Both
also from columns of the tokens' bytes. All cases take turns in one run. Each reads its table twice in a row, and the
second reading counts: the first one also gets memory that the case before it gave back to the system, which training
does once. The goals: packed reading at 0.85 of unpacked reading or more with all columns, at 0.9 with tokens and
cu_seqlens; in order at 0.9 of pyarrow; bytes at twice the speed of lists.

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
import torch

from benchmarks.measure import Measured, report, show
from lakeckpt import LakeDataset, LakeLoader, open_table, pack
from lakeckpt.lake.table.table import Table

LENGTH, ROWS, FILES, ROW_GROUP = 2048, 200_000, 4, 8192


def write(folder: Path, rows: int) -> int:
    """Write the documents, as lists and as bytes; return how many tokens they have."""
    random, tokens = np.random.default_rng(0), 0
    for number in range(FILES):
        lengths = np.clip(random.gamma(4.0, 75.0, rows // FILES).astype(np.int32), 15, 900)
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        values = pa.array(random.integers(0, 50_000, offsets[-1], np.int32))
        lists = pa.ListArray.from_arrays(pa.array(offsets), values)
        octets = pa.Array.from_buffers(
            pa.binary(), len(lengths), [None, pa.py_buffer(offsets * np.int32(4)), values.buffers()[1]]
        )
        for form, column in (("lists", lists), ("bytes", octets)):
            (folder / form).mkdir(exist_ok=True)
            table = pa.table({"tokens": column, "num_tokens": lengths})
            pq.write_table(table, folder / form / f"{number}.parquet", row_group_size=ROW_GROUP)
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
    """Decode all row groups by pyarrow alone, concatenate their values, and cut them into batches of sequences."""
    left, seen = np.empty(0, np.int32), 0
    for file in sorted(folder.glob("*.parquet")):
        opened = pq.ParquetFile(file, memory_map=True)
        for group in range(opened.num_row_groups):
            chunks = opened.read_row_group(group, columns=["tokens"]).column("tokens").chunks
            left = np.concatenate([left, *(_values(chunk) for chunk in chunks)])
            whole = len(left) // (8 * LENGTH)
            seen += len([torch.from_numpy(one) for one in left[: whole * 8 * LENGTH].reshape(whole, 8, LENGTH)])
            left = left[whole * 8 * LENGTH :]
    assert seen


def _values(chunk: pa.Array) -> Any:
    if pa.types.is_list(chunk.type):
        return chunk.flatten().to_numpy()
    return np.frombuffer(chunk.buffers()[2], np.int32)


def state_at(dataset: LakeDataset, share: float) -> Mapping[str, Any]:
    """Return the state after this share of an epoch's steps."""
    loader = LakeLoader(dataset)
    state = loader.state_dict()
    return {**state, "step": int(share * len(loader))}


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokens = write(folder, ROWS)
        lists, octets = open_table(folder / "lists"), open_table(folder / "bytes")

        def documents(batch_size: int, table: Table = lists, *, shuffle: bool = True) -> LakeDataset:
            return LakeDataset(table, batch_size=batch_size, columns=["tokens"], shuffle=shuffle, seed=1)

        def packed(table: Table = lists, *, shuffle: bool = True, **given: Any) -> LakeDataset:
            dtype: Any = "int32" if table is octets else None
            return pack(documents(8, table, shuffle=shuffle), length=LENGTH, dtype=dtype, **given)

        few = {"columns": ["tokens", "cu_seqlens"]}
        measured = in_turns(
            {
                "unpacked, as many tokens a batch": lambda: read(documents(8 * LENGTH // 300)),
                "packed": lambda: read(packed()),
                "packed, with labels": lambda: read(packed(labels=True)),
                "packed, tokens and cu_seqlens": lambda: read(packed(**few)),
                "packed from bytes": lambda: read(packed(octets)),
                "packed from bytes, tokens and cu_seqlens": lambda: read(packed(octets, **few)),
            },
            repetitions=5,
            warm=1,
        )
        in_order = in_turns(
            {
                "pyarrow, concatenated and cut": lambda: decode(folder / "lists"),
                "packed": lambda: read(packed(shuffle=False)),
                "packed, tokens and cu_seqlens": lambda: read(packed(shuffle=False, **few)),
                "packed, tokens alone": lambda: read(packed(shuffle=False, columns=["tokens"])),
                "pyarrow, from bytes": lambda: decode(folder / "bytes"),
                "packed from bytes": lambda: read(packed(octets, shuffle=False)),
                "packed from bytes, tokens and cu_seqlens": lambda: read(packed(octets, shuffle=False, **few)),
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
    unpacked, limit, fresh = measured[0], in_order[0], begun[0]
    show(
        "first batch of a packed dataset",
        ("case", "ms", "of a fresh start", "by processor time"),
        [(one.name, f"{one.median_s * 1e3:,.0f}", *ratios(one, fresh)) for one in begun],
    )
    show(
        f"packed reading in order: {tokens:,} tokens",
        ("case", "million tokens/s", "of pyarrow", "by processor time"),
        [(one.name, f"{tokens / one.median_s / 1e6:,.1f}", *ratios(limit, one)) for one in in_order],
    )
    report(
        f"packed reading: {tokens:,} tokens, sequences of {LENGTH:,}",
        ("case", "million tokens/s", "of unpacked", "by processor time"),
        [(one.name, f"{tokens / one.median_s / 1e6:,.1f}", *ratios(unpacked, one)) for one in measured],
        [*measured, *in_order, *begun],
    )


def ratios(one: Measured, other: Measured) -> tuple[str, str]:
    """Return how much longer ``one`` took than ``other``, by the clock and of processor time."""
    return f"{one.median_s / other.median_s:.2f}", f"{one.processor_s / other.processor_s:.2f}"


if __name__ == "__main__":
    main()
