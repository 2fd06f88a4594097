"""Does reading in process keep to the memory that its formula says, epoch after epoch?  ``python -m benchmarks.memory``

Each table of `benchmarks.reading` is read for ten epochs in a process of its own, unshuffled and shuffled with the
default window. After imports and a first batch's worth of set-up, what the process has resident is noted; then, for
every epoch, the most that it had resident above that. Beside it stands what `docs/design/0011-engine.md` says for one
lane: four windows of decoded bytes, and for decoding the largest column twice in two windows and the stored bytes of
the row groups that are decoded at once. The bar is 1.5 times the formula, and no growth.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.children import told_by
from benchmarks.measure import show
from benchmarks.reading import KINDS, Kind, written
from lakeckpt import LakeDataset, LakeLoader, open_table
from lakeckpt.reading.windows.cache import windows_held_of
from lakeckpt.reading.windows.threads import usual_threads

MIB = 1 << 20


def _resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def child(folder: str, batch_size: int, shuffle: bool, epochs: int) -> dict[str, Any]:
    """Read ``epochs`` epochs; what was resident before, and the peak of each, in bytes."""
    with tempfile.TemporaryDirectory() as warm:  # imports, pools and threads
        pq.write_table(pa.table({"x": [0]}), Path(warm, "a.parquet"))
        list(LakeLoader(LakeDataset(open_table(warm), batch_size=1, shuffle=shuffle)))
    loader = LakeLoader(LakeDataset(open_table(folder), batch_size=batch_size, shuffle=shuffle))
    before = _resident("VmRSS")
    peaks, arrow = [], []
    for _ in range(epochs):
        _forget_peak()
        for batch in loader:
            del batch
        peaks.append(_resident("VmHWM") - before)
        arrow.append(pa.default_memory_pool().max_memory())
    return {"before": before, "peaks": peaks, "arrow": arrow[-1]}


def formula(folder: Path, shuffle: bool) -> int:
    """The bytes of `docs/design/0011-engine.md` for one lane."""
    paths = sorted(folder.glob("*.parquet"))
    metadata = pq.read_metadata(paths[0]).row_group(0)
    group = pq.ParquetFile(paths[0]).read_row_group(0)
    decoded = group.get_total_buffer_size()
    stored = sum(metadata.column(place).total_compressed_size for place in range(metadata.num_columns))
    in_window = LakeDataset(open_table(folder), batch_size=1, shuffle=shuffle).identity.spec.window
    largest = max(_decoding_bytes(column) for column in group.columns) * in_window
    return (windows_held_of(1) + 1) * decoded * in_window + 4 * largest + usual_threads() * stored


def _decoding_bytes(column: pa.ChunkedArray) -> int:
    """A column's bytes, and of a list's elements those of their two levels, of 16 bits each."""
    levels = sum(4 * len(chunk.values) for chunk in column.chunks) if pa.types.is_list(column.type) else 0
    return int(column.get_total_buffer_size()) + levels


def measured(kind: Kind, folder: Path, shuffle: bool, epochs: int) -> dict[str, Any]:
    """What `child` says, in a process of its own; ChildFailed says why that died."""
    arguments = [str(folder), str(kind.batch_size), str(int(shuffle)), str(epochs)]
    found: dict[str, Any] = json.loads(told_by(["-m", "benchmarks.memory", "--child", *arguments]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=[kind.name for kind in KINDS])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.25, help="of the rows of `benchmarks.reading`")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    args = parser.parse_args()
    if args.child:
        folder, batch_size, shuffle, epochs = args.child
        print(json.dumps(child(folder, int(batch_size), shuffle == "1", int(epochs))))
        return
    shown, every = [], []
    for kind in KINDS:
        if args.only not in (None, kind.name):
            continue
        with tempfile.TemporaryDirectory() as name:
            written(kind, Path(name), args.share)
            for shuffle in (False, True):
                found = measured(kind, Path(name), shuffle, args.epochs)
                said = formula(Path(name), shuffle)
                every.append({"kind": kind.name, "shuffle": shuffle, "formula": said, **found})
                peaks = found["peaks"]
                shown.append(
                    (
                        f"{kind.name}, {'shuffled' if shuffle else 'in order'}",
                        f"{said / MIB:,.0f}",
                        f"{peaks[0] / MIB:,.0f}",
                        f"{max(peaks) / MIB:,.0f}",
                        f"{peaks[-1] / MIB:,.0f}",
                        f"{max(peaks) / said:.2f}",
                        f"{found['arrow'] / said:.2f}",
                    )
                )
    columns = ("MiB above the start", "formula", "epoch 1", "most", "last", "most/formula", "Arrow's pool/formula")
    show(f"Memory of {args.epochs} epochs", columns, shown)
    if args.json:
        args.json.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
