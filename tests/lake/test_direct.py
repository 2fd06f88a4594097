"""Large files are written past the page cache where that can be done, and hold the same bytes where it cannot."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lakeckpt.lake.storage import direct
from lakeckpt.lake.storage.local import LocalStorage
from tests.lake.traced import storage_over

BLOCK = 64 * 1024


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BLOCK_BYTES", BLOCK)


class Calls:
    """The module `os` for a storage: it notes the size of each write, and whether the write goes past the cache.

    ``refuses``: direct writes fail. ``shortened``: the first direct write takes only so many bytes.
    """

    def __init__(self, *, refuses: bool = False, shortened: int = 0) -> None:
        self.refuses, self.shortened = refuses, shortened
        self.writes: list[tuple[int, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: memoryview) -> int:
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and self.refuses:
            raise OSError(errno.EINVAL, "unaligned")
        if self.shortened and is_direct:
            data, self.shortened = data[: self.shortened], 0
        self.writes.append((len(data), is_direct))
        return os.write(descriptor, data)


def chunks(total: int, *, each: int) -> list[bytes]:
    data = os.urandom(total)
    return [data[at : at + each] for at in range(0, total, each)]


@pytest.mark.parametrize("each", [1000, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK])
@pytest.mark.parametrize("total", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4096, 5 * BLOCK + 77])
def test_a_file_holds_its_chunks_however_they_come(tmp_path: Path, total: int, each: int) -> None:
    storage, data = LocalStorage(tmp_path), chunks(total, each=each)
    assert storage.put("a", data) == total
    assert (tmp_path / "a").read_bytes() == b"".join(data)


def test_whole_blocks_go_past_the_cache_and_the_rest_through_it(tmp_path: Path) -> None:
    calls, data = Calls(), chunks(3 * BLOCK + 100, each=1000)
    storage_over(tmp_path, calls).put("a", data)
    assert calls.writes == [(BLOCK, True)] * 3 + [(100, False)]
    assert (tmp_path / "a").read_bytes() == b"".join(data)


def test_small_objects_are_written_at_once_and_through_the_cache(tmp_path: Path) -> None:
    calls = Calls()
    storage_over(tmp_path, calls).put("a", [b"one", b"two"])
    assert calls.writes == [(6, False)]


def test_where_direct_writes_are_refused_all_goes_through_the_cache(tmp_path: Path) -> None:
    calls, data = Calls(refuses=True), chunks(3 * BLOCK + 100, each=1000)
    storage_over(tmp_path, calls).put("a", data)
    assert calls.writes == [(BLOCK, False)] * 3 + [(100, False)]
    assert (tmp_path / "a").read_bytes() == b"".join(data)


def test_where_no_file_can_be_switched_to_direct_writes_all_goes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, command: int, *_: object) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "this file system has none")
        return 0

    calls, data = Calls(), chunks(3 * BLOCK + 100, each=1000)
    monkeypatch.setattr(direct, "fcntl", SimpleNamespace(fcntl=refuse, F_GETFL=fcntl.F_GETFL, F_SETFL=fcntl.F_SETFL))
    storage_over(tmp_path, calls).put("a", data)
    assert calls.writes == [(BLOCK, False)] * 3 + [(100, False)]


@pytest.mark.parametrize("shortened", [4096, 1000])
def test_a_write_that_is_cut_short_is_gone_on_with(tmp_path: Path, shortened: int) -> None:
    data = chunks(3 * BLOCK + 100, each=1000)
    storage_over(tmp_path, Calls(shortened=shortened)).put("a", data)
    assert (tmp_path / "a").read_bytes() == b"".join(data)


def test_a_failure_of_the_disk_goes_through(tmp_path: Path) -> None:
    class Full(Calls):
        def write(self, descriptor: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        storage_over(tmp_path, Full()).put("a", chunks(2 * BLOCK, each=BLOCK))
    assert os.listdir(tmp_path) == []


def paged(total: int, *, off: int = 0) -> memoryview:
    """Random bytes in memory that begins ``off`` bytes behind the start of a page."""
    block = mmap.mmap(-1, total + 2 * direct.PAGE_BYTES)
    block[off : off + total] = os.urandom(total)
    return memoryview(block)[off : off + total]


def test_pages_that_are_pages_of_the_file_are_written_from_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "STRAIGHT_BYTES", 2 * BLOCK)
    calls, head, large, rest = Calls(), os.urandom(4096), paged(5 * BLOCK), os.urandom(100)
    storage_over(tmp_path, calls).put("a", [head, large, rest])
    assert calls.writes == [(4096, True), (5 * BLOCK, True), (100, False)]
    assert (tmp_path / "a").read_bytes() == b"".join([head, large, rest])


def test_pages_that_are_no_pages_of_the_file_go_past_the_cache_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "STRAIGHT_BYTES", 2 * BLOCK)
    calls, large = Calls(), paged(5 * BLOCK)
    storage_over(tmp_path, calls).put("a", [b"x" * 100, large])
    assert calls.writes == [(BLOCK, True)] * 5 + [(100, False)]
    assert (tmp_path / "a").read_bytes() == b"x" * 100 + large


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("before", [0, 100, 4096, BLOCK - 1, BLOCK + 4096])
@pytest.mark.parametrize("off", [0, 64, 3996, 4095])
def test_a_file_holds_its_bytes_wherever_they_lie_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, off: int, refuses: bool
) -> None:
    monkeypatch.setattr(direct, "STRAIGHT_BYTES", 2 * BLOCK)
    calls = Calls(refuses=refuses, shortened=0 if refuses else 1000)
    data = [os.urandom(before), paged(2 * BLOCK + 77, off=off), paged(3 * BLOCK, off=off), os.urandom(5000)]
    assert storage_over(tmp_path, calls).put("a", data) == sum(map(len, data))
    assert (tmp_path / "a").read_bytes() == b"".join(data)
