"""Footers are read from the tail alone, once, in parallel; what is no readable Parquet file is refused by name."""

from __future__ import annotations

import hashlib
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt.errors import DataFileDamaged, SchemaError, StorageError
from lakeckpt.lake.parquet import footer
from lakeckpt.lake.parquet.footer import read_footer, summarize, summarize_all
from lakeckpt.lake.storage.base import ObjectInfo
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.testing.faulty_storage import FaultyStorage, StoreFault
from tests.lake.tables import footer_of, write
from tests.patience import PATIENCE_S


class Reads:
    """A storage that notes the ranges read from it."""

    def __init__(self, root: Path) -> None:
        self._inner = LocalStorage(root)
        self.ranges: list[tuple[int, int | None]] = []

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        self.ranges.append((start, stop))
        return self._inner.read(path, start, stop)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class Bytes(LocalStorage):
    """A storage with one object."""

    def __init__(self, data: bytes) -> None:
        super().__init__("/nowhere")
        self.data = data

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        return self.data[start:stop]


def size(path: Path) -> int:
    return path.stat().st_size


def test_a_footer_is_read_by_one_ranged_read_of_the_tail(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"a": range(200_000)}, row_group_size=50_000, compression="none")
    storage = Reads(tmp_path)
    found = read_footer(storage, "x.parquet", size(path))
    assert storage.ranges == [(size(path) - 65536, size(path))]
    assert found.metadata.num_rows == 200_000
    assert found.metadata.row_group(3).num_rows == 50_000
    assert found.digest == hashlib.blake2b(footer_of(path.read_bytes()), digest_size=16).digest()


def test_a_footer_larger_than_the_tail_takes_a_second_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {f"column {n:05d}" * 5: [1, 2] for n in range(500)}, row_group_size=1)
    storage = Reads(tmp_path)
    assert read_footer(storage, "x.parquet", size(path)).metadata.num_columns == 500
    assert len(storage.ranges) == 2
    length = len(footer_of(path.read_bytes()))
    assert length > 65536
    assert storage.ranges[1] == (size(path) - length - 8, size(path))


@pytest.mark.parametrize("rows", [0, 1])
def test_files_of_no_rows_and_of_one_row_are_summarized(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path / "x.parquet", {"a": pa.array(range(rows), pa.int32())})
    summary = summarize(LocalStorage(tmp_path), "x.parquet", size(path))
    assert summary.group_rows.sum() == rows
    assert summary.schema.field("a").type == pa.int32()


def test_row_groups_without_rows_are_kept(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64())])
    with pq.ParquetWriter(tmp_path / "x.parquet", schema) as writer:
        for rows in (3, 0, 2, 0):
            writer.write_table(pa.table({"a": pa.array(range(rows), pa.int64())}))
    summary = summarize(LocalStorage(tmp_path), "x.parquet", size(tmp_path / "x.parquet"))
    assert summary.group_rows.tolist() == [3, 0, 2, 0]
    assert summary.group_rows.dtype == summary.group_bytes.dtype == "int64"


def damage(data: bytes, kind: str) -> bytes:
    length = len(footer_of(data))
    return {
        "empty": b"",
        "short": b"PAR1PAR1",
        "text": b"a,b\n1,2\n" * 10,
        "text of a few bytes": b"a,b\n1,2\n",
        "truncated": data[:-5],
        "truncated in the middle": data[: len(data) // 2],
        "encrypted": data[:-4] + b"PARE",
        "zero footer": data[:-8] + struct.pack("<I", 0) + b"PAR1",
        "long footer": data[:-8] + struct.pack("<I", len(data)) + b"PAR1",
        "huge footer": data[:-8] + struct.pack("<I", 2**32 - 1) + b"PAR1",
        "garbage footer": data[: -8 - length] + b"\xff" * length + data[-8:],
    }[kind]


KINDS = {
    "empty": "is empty",
    "short": "only 8 bytes",
    "text": r"is no Parquet file: it has 80 bytes and begins with b'a,b\\n1,2\\n'",
    "text of a few bytes": r"is no Parquet file: it has 8 bytes and begins with",
    "truncated": "does not end as Parquet does",
    "truncated in the middle": "does not end as Parquet does",
    "encrypted": "encrypted",
    "zero footer": "cannot be parsed",
    "long footer": "claims a footer of",
    "huge footer": "claims a footer of",
    "garbage footer": "cannot be parsed",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named_with_what_was_found_and_what_to_do(tmp_path: Path, kind: str) -> None:
    good = write(tmp_path / "good.parquet", {"a": range(10_000)}, compression="none").read_bytes()
    path = tmp_path / "ü bad.parquet"
    path.write_bytes(damage(good, kind))
    with pytest.raises(DataFileDamaged, match=f"'ü bad.parquet' .*{KINDS[kind]}.*leave it out of the table") as caught:
        summarize(LocalStorage(tmp_path), "ü bad.parquet", size(path))
    assert caught.value.file == "ü bad.parquet"


def test_no_flipped_bit_of_a_footer_goes_unnoticed_or_ends_in_another_error(tmp_path: Path) -> None:
    data = write(tmp_path / "x.parquet", {"a": range(100), "b": ["x"] * 100}, row_group_size=25).read_bytes()
    good = summarize(LocalStorage(tmp_path), "x.parquet", len(data))
    start = len(data) - 8 - len(footer_of(data))
    refused: list[str] = []
    for at in range(start, len(data)):
        for bit in range(8):  # some of them would make pyarrow end the process, were more of the footer looked at
            flipped = data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
            try:
                assert summarize(Bytes(flipped), "x.parquet", len(data)).digest != good.digest
            except (DataFileDamaged, SchemaError) as error:
                refused.append(str(error))
    assert len(refused) > 1000
    assert [text for text in refused if "rows in its row groups, but claims" in text]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "b", "a"])
    path = write(tmp_path / "x.parquet", table)
    with pytest.raises(SchemaError, match=r"'x.parquet' has more than one column named 'a': rename"):
        summarize(LocalStorage(tmp_path), "x.parquet", size(path))


def test_summaries_come_in_the_order_of_the_files_and_progress_counts_them(tmp_path: Path) -> None:
    infos = []
    for n in range(20):
        path = write(tmp_path / f"{n}.parquet", {"a": range(n)})
        infos.append(ObjectInfo(path=path.name, size_bytes=size(path)))
    progress: list[tuple[int, int]] = []
    found = summarize_all(LocalStorage(tmp_path), infos, threads=4, progress=lambda *step: progress.append(step))
    assert [int(summary.group_rows.sum()) for summary in found] == list(range(20))
    assert progress == [(n, 20) for n in range(1, 21)]


def test_footers_are_read_at_the_same_time(tmp_path: Path) -> None:
    infos = []
    for n in range(4):
        path = write(tmp_path / f"{n}.parquet", {"a": range(n)})
        infos.append(ObjectInfo(path=path.name, size_bytes=size(path)))
    together = threading.Barrier(4, timeout=PATIENCE_S)  # nobody passes unless four reads are under way
    storage = FaultyStorage(LocalStorage(tmp_path), before=lambda method, path: together.wait() and None)
    assert len(summarize_all(storage, infos, threads=4, progress=None)) == 4


def test_the_first_failure_ends_the_reading_of_footers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *args: Any, **kwargs: Any) -> None:
            super().shutdown(*args, **kwargs)
            ending.set()

    monkeypatch.setattr(footer, "ThreadPoolExecutor", Pool)
    infos = []
    for n in range(50):
        path = write(tmp_path / f"{n:02d}.parquet", {"a": range(n)})
        infos.append(ObjectInfo(path=path.name, size_bytes=size(path)))

    def before(method: str, path: str) -> None:
        if len(storage.calls) == 1:
            ending.wait(timeout=PATIENCE_S)

    storage = FaultyStorage(LocalStorage(tmp_path), fail_at={("read", 1): StoreFault.ERROR}, before=before)
    with pytest.raises(StorageError, match="injected"):
        summarize_all(storage, infos, threads=1, progress=None)
    assert len(storage.calls) <= 2


def test_a_file_that_shrinks_or_goes_after_it_was_listed_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"a": range(10)})
    with pytest.raises(DataFileDamaged, match=r"with \d+ bytes, but ends before .*: open the table again"):
        read_footer(LocalStorage(tmp_path), "x.parquet", size(path) + 10)
    with pytest.raises(DataFileDamaged, match="not there any more: open the table again"):
        summarize(LocalStorage(tmp_path), "y.parquet", 1000)


def test_the_tail_is_large_enough_for_usual_footers() -> None:
    assert footer.TAIL_BYTES == 64 * 1024
