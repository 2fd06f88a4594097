"""Large files are written past the page cache where that can be done, and hold the same bytes where it cannot."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakeckpt.lake.storage import direct
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.storage.oscalls import OsCalls

BLOCK = 64 * 1024


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(direct, "_spare", direct._Spare())


class Calls(OsCalls):
    """Notes how each write went: its size, and whether past the cache; fails and shortens some, where told to."""

    def __init__(self, *, knows_direct: bool = True, refuses: bool = False, shortened: int = 0) -> None:
        self.knows_direct, self.refuses, self.shortened = knows_direct, refuses, shortened
        self.direct = False
        self.writes: list[tuple[int, bool]] = []

    def set_direct(self, descriptor: int, direct: bool) -> bool:
        self.direct = direct and self.knows_direct
        return super().set_direct(descriptor, self.direct)

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.direct and self.refuses:
            raise OSError(errno.EINVAL, "unaligned")
        if self.shortened and self.direct:
            data, self.shortened = data[: self.shortened], 0
        self.writes.append((len(data), self.direct))
        return super().write(descriptor, data)


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
    LocalStorage(tmp_path, calls=calls).put("a", data)
    assert calls.writes == [(BLOCK, True)] * 3 + [(100, False)]
    assert (tmp_path / "a").read_bytes() == b"".join(data)


def test_small_objects_are_written_as_they_come(tmp_path: Path) -> None:
    calls = Calls()
    LocalStorage(tmp_path, calls=calls).put("a", [b"one", b"two"])
    assert calls.writes == [(3, False), (3, False)]


@pytest.mark.parametrize("calls", [Calls(knows_direct=False), Calls(refuses=True)])
def test_where_there_are_no_direct_writes_all_goes_through_the_cache(tmp_path: Path, calls: Calls) -> None:
    data = chunks(3 * BLOCK + 100, each=1000)
    LocalStorage(tmp_path, calls=calls).put("a", data)
    assert calls.writes == [(BLOCK, False)] * 3 + [(100, False)]
    assert (tmp_path / "a").read_bytes() == b"".join(data)


@pytest.mark.parametrize("shortened", [4096, 1000])
def test_a_write_that_is_cut_short_is_gone_on_with(tmp_path: Path, shortened: int) -> None:
    data = chunks(3 * BLOCK + 100, each=1000)
    LocalStorage(tmp_path, calls=Calls(shortened=shortened)).put("a", data)
    assert (tmp_path / "a").read_bytes() == b"".join(data)


def test_a_chunk_may_be_changed_as_soon_as_the_next_one_is_asked_for(tmp_path: Path) -> None:
    def reused() -> Iterator[memoryview]:
        buffer = bytearray(1000)
        for number in range(200):
            buffer[:] = bytes([number]) * 1000
            yield memoryview(buffer)

    LocalStorage(tmp_path).put("a", reused())
    assert (tmp_path / "a").read_bytes() == b"".join(bytes([number]) * 1000 for number in range(200))


def test_a_failure_of_the_disk_goes_through_and_gives_the_block_back(tmp_path: Path) -> None:
    class Full(Calls):
        def write(self, descriptor: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        LocalStorage(tmp_path, calls=Full()).put("a", chunks(2 * BLOCK, each=BLOCK))
    assert os.listdir(tmp_path) == [] and len(direct._spare._blocks) == 1


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
    LocalStorage(tmp_path, calls=calls).put("a", [head, large, rest])
    assert calls.writes == [(4096, True), (5 * BLOCK, True), (100, False)]
    assert (tmp_path / "a").read_bytes() == b"".join([head, large, rest])


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("before", [0, 100, 4096, BLOCK - 1, BLOCK + 4096])
@pytest.mark.parametrize("off", [0, 64, 3996, 4095])
def test_a_file_holds_its_bytes_wherever_they_lie_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, off: int, refuses: bool
) -> None:
    monkeypatch.setattr(direct, "STRAIGHT_BYTES", 2 * BLOCK)
    calls = Calls(refuses=refuses, shortened=0 if refuses else 1000)
    data = [os.urandom(before), paged(2 * BLOCK + 77, off=off), paged(3 * BLOCK, off=off), os.urandom(5000)]
    assert LocalStorage(tmp_path, calls=calls).put("a", data) == sum(map(len, data))
    assert (tmp_path / "a").read_bytes() == b"".join(data)
