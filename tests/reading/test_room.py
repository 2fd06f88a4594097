"""Readers that share a room hold together what fits into it."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pyarrow as pa

from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.parquet.prefetch import AheadBytes
from lakeckpt.reading.packed.packing import Packing
from lakeckpt.reading.packed.token_counts import count_tokens
from lakeckpt.reading.packed.window import SequenceDecoder
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.positions import PositionReader
from lakeckpt.reading.windows.room import Room
from lakeckpt.reading.windows.threads import Threads
from tests.patience import PATIENCE_S
from tests.reading.cases import write_ids
from tests.reading.test_fetching import ids, stored
from tests.reading.test_packed import write
from tests.reading.test_positions import follow

ORDERED = OrderSpec(seed=0, shuffle=False, window=1)
WINDOW_BYTES = 100 * 8


def test_windows_of_several_readers_fit_into_the_room_together(tmp_path: Path) -> None:
    room, readers = Room(5 * WINDOW_BYTES + WINDOW_BYTES // 2), []  # a window has some bytes of its own
    for number in range(3):
        table = write_ids(tmp_path / str(number), [[100] * 6])
        layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
        reader = PositionReader(RowGroupDecoder(table, ["id"]), ORDERED, max_windows=1, threads=1, room=room)
        follow(reader, layout)
        readers.append((reader, layout))
    held = 0
    for at in range(0, 600, 50):
        for reader, layout in readers:
            assert reader.read([(layout, at, at + 50)])["id"].tolist() == list(range(at, at + 50))
            held = max(held, sum(one.windows.held for one, _ in readers))
    assert held == 5  # three open ones, and two that were read ahead
    assert [one.windows.held for one, _ in readers] == [0, 0, 0]


def test_readers_that_are_cleared_or_gone_take_no_room_of_others(tmp_path: Path) -> None:
    room = Room(2 * WINDOW_BYTES)
    table = write_ids(tmp_path, [[100] * 4])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)

    def made() -> PositionReader:
        return PositionReader(RowGroupDecoder(table, ["id"]), ORDERED, max_windows=1, threads=1, room=room)

    cleared, gone, other = made(), made(), made()
    for reader in (cleared, gone):
        follow(reader, layout)
        reader.read([(layout, 0, 50)])
    assert room.left_bytes() <= 0
    cleared.clear()
    gone.clear()
    del gone, reader
    gc.collect()
    assert room.left_bytes() == 2 * WINDOW_BYTES
    follow(other, layout)
    assert other.read([(layout, 0, 400)])["id"].tolist() == list(range(400))


def test_row_groups_that_two_packed_windows_share_count_and_are_kept_only_where_they_fit(tmp_path: Path) -> None:
    write(tmp_path, [[100] * 8, [100] * 8], pa.list_(pa.int32()), 8)
    table, packing = open_table(str(tmp_path)), Packing(column="tokens", length=300)
    counted = count_tokens(table, packing)
    layout = EpochLayout.build(counted.group_rows, ORDERED, 0, 1, unit=300)
    rows = RowGroupDecoder(table, ["tokens"])
    for room_bytes, kept in ((10**6, True), (100, False)):
        decoder = SequenceDecoder(rows, packing, counted, table.index.group_rows, 4, Threads(1))
        decoder.room_bytes = room_bytes
        decoder.decode(layout.window_at(0))
        assert (decoder.kept_bytes() >= 800 * 4) is kept and (decoder.kept_bytes() > 0) is kept
        decoder.release()
        assert decoder.kept_bytes() == 0


def test_decoders_share_the_bytes_that_they_fetch_ahead(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[5000], [5000]])
    came = threading.Semaphore(0)
    ahead = AheadBytes(50_000)
    decoders = [
        RowGroupDecoder(stored(table, lambda path, start: came.release()), ["id"], ahead_bytes=ahead) for _ in range(2)
    ]
    decoders[0].expect([0])
    for _ in range(2):  # the footer and the row group
        assert came.acquire(timeout=PATIENCE_S)
    size = ahead.held
    assert 0 < size <= 50_000
    ahead.limit = size
    decoders[1].expect([0])
    assert ids(decoders[1].decode(0, 0, 1)) == [0]
    assert ahead.held == size
    assert ids(decoders[0].decode(0, 0, 1)) == [0]
    assert ahead.held == 0
    decoders[1].expect([1])
    decoders[1].close()
    gc.collect()
    assert ahead.held == 0
