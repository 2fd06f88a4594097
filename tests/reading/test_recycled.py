"""Memory is used again once nothing looks at it any more, and never sooner."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.reading.columns.recycled import Recycled, recycled_memory
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.positions import PositionReader
from lakeckpt.reading.windows.room import Room
from tests.data.reading import ids, loader_of, table_of
from tests.lakes import LakeSpec

INT64 = np.dtype(np.int64)


def place(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again_when_its_last_view_has_died() -> None:
    memory = Recycled(1 << 20)
    array = memory.new((1000,), INT64)
    first = place(array)
    view = array[10:20]
    del array
    other = memory.new((1000,), INT64)
    assert place(other) != first  # it is still looked at
    del view
    assert place(memory.new((999,), INT64)) == first


def test_memory_that_is_much_too_large_waits_for_a_column_that_fits() -> None:
    memory = Recycled(1 << 20)
    large = place(memory.new((1000,), INT64))
    assert place(memory.new((500,), INT64)) != large
    assert place(memory.new((1000,), INT64)) == large


def test_of_what_waits_the_oldest_goes_beyond_the_limit() -> None:
    memory = Recycled(3000 * 8)
    arrays = [memory.new((1024,), INT64) for _ in range(4)]
    while arrays:
        arrays.pop(0)
    assert memory.new((64,), INT64) is not None
    assert sum(block.size for block in memory._waiting) == 2048 * 8
    memory.limit_bytes = 0
    memory.new((64,), INT64)
    assert not memory._waiting


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """960 rows in 24 row groups."""
    return LakeSpec(files=((40,) * 6,) * 4).write(tmp_path_factory.mktemp("recycled"))


def test_a_later_window_lies_where_an_earlier_one_lay_that_nobody_holds(folder: Path) -> None:
    table, spec = table_of(folder), OrderSpec(seed=1, shuffle=True, window=4)
    layout = EpochLayout.build(table.index.group_rows, spec, 0, 1)
    reader = PositionReader(RowGroupDecoder(table, ["id"]), spec, max_windows=1, threads=1)
    found = [place(reader.read([(layout, start, start + 160)])["id"]) for start in range(0, 960, 160)]
    assert len(set(found)) < 6


def test_batches_that_are_kept_stay_what_they_were_while_others_are_read(folder: Path) -> None:
    expected = ids(loader_of(folder, batch_size=32))
    loader = loader_of(folder, batch_size=32)
    for epoch in range(2):
        kept = []
        for number, batch in enumerate(loader):
            if number % 3:
                kept.append((batch["id"], batch["id"].tolist()))
            else:
                batch["id"].fill_(-1)  # it is the loop's
        assert all(tensor.tolist() == values for tensor, values in kept)
        if not epoch:
            assert [values for _, values in kept] == [values for n, values in enumerate(expected) if n % 3]


@pytest.mark.parametrize(("limit", "waits"), [(None, 1280), (10_000, 1280), (2000, 720), (1, 0)])
def test_memory_waits_only_where_it_fits_beside_the_windows(
    limit: int | None, waits: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Recycled()
    monkeypatch.setattr("lakeckpt.reading.windows.window.recycled_memory", lambda: memory)
    table, spec = table_of(folder), OrderSpec(seed=1, shuffle=True, window=4)
    layout = EpochLayout.build(table.index.group_rows, spec, 0, 1)
    decoder = RowGroupDecoder(table, ["id"])
    reader = PositionReader(decoder, spec, max_windows=2, threads=1, room=Room(limit))
    reader.read([(layout, 0, 80)])  # half of a window, which stays
    reader.read([(layout, 160, 170)])
    assert memory.limit_bytes == waits


def test_after_an_epoch_the_memory_of_one_window_waits_and_what_comes_back_is_released() -> None:
    memory = Recycled(1024 * 8)
    arrays = [memory.new((1024,), INT64) for _ in range(4)]
    kept = arrays.pop()
    arrays.clear()
    memory.rest()
    assert sum(block.size for block in memory._waiting) == 1024 * 8
    del kept
    assert memory.returned.empty()
    first = memory.new((1024,), INT64)
    del first
    assert not memory.returned.empty()


def test_readers_of_a_process_share_the_memory_that_waits_as_long_as_one_of_them_is_there(folder: Path) -> None:
    table, spec = table_of(folder), OrderSpec(seed=1, shuffle=True, window=4)
    layout = EpochLayout.build(table.index.group_rows, spec, 0, 1)
    readers = [PositionReader(RowGroupDecoder(table, ["id"]), spec, max_windows=1, threads=1) for _ in range(2)]
    shared = recycled_memory()
    for reader in readers:
        reader.read([(layout, 0, 160)])
    assert shared.largest_bytes == 1280
    for reader in readers:
        reader.clear()
    assert sum(block.size for block in shared._waiting) <= 1280
    gone = weakref.ref(shared)
    del shared, readers, reader
    gc.collect()
    assert gone() is None
