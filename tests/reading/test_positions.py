from __future__ import annotations

import itertools
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lakeckpt.core.intervals import Intervals
from lakeckpt.core.lanes import EpochDeal, Left
from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.errors import ConfigError, DataFileDamaged
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.columns import forms as arrays
from lakeckpt.reading.columns.convert import convert
from lakeckpt.reading.columns.ragged import to_pylist
from lakeckpt.reading.windows.cache import WindowCache, windows_held_of
from lakeckpt.reading.windows.decode import RowGroupDecoder
from lakeckpt.reading.windows.lanes import Served, windows_of
from lakeckpt.reading.windows.positions import PositionReader
from lakeckpt.reading.windows.room import Room
from tests.reading.cases import columns, write_ids

LAYOUTS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4)
ORDERED = OrderSpec(seed=0, shuffle=False, window=1)


@st.composite
def specs(draw: st.DrawFn) -> OrderSpec:
    shuffle = draw(st.booleans())
    return OrderSpec(seed=draw(st.integers(0, 3)), shuffle=shuffle, window=draw(st.integers(1, 4)) if shuffle else 1)


def ids_at(table: Table, layout: EpochLayout, start: int, stop: int) -> list[int]:
    """The model: the ids at these positions, by the core's own `locate`."""
    begins = np.concatenate([[0], np.cumsum(table.index.group_rows)])
    groups, rows = layout.locate(np.arange(start, stop))
    return (begins[groups] + rows).tolist()


def rows_of(ids: list[int]) -> dict[str, list[Any]]:
    return {"id": ids, "text": [f"row {i}" for i in ids], "pair": [[i, -i] for i in ids]}


def lane_steps(layout: EpochLayout, batch: int) -> list[tuple[EpochLayout, int, int]]:
    """Micro-batches of an epoch as one process of one rank reads them: lane after lane, in turn."""
    bounds = layout.lane_bounds.tolist()
    steps = []
    for offset in range(0, max(np.diff(bounds)), batch):
        for begin, end in itertools.pairwise(bounds):
            if begin + offset < end:
                steps.append((layout, begin + offset, min(end, begin + offset + batch)))
    return steps


def follow(reader: PositionReader, layout: EpochLayout) -> None:
    """Have ``reader`` read ahead all lanes of ``layout``."""
    bounds = itertools.pairwise(layout.lane_bounds.tolist())
    reader.windows.follow([iter([(layout, one) for one in layout.windows(*lane)]) for lane in bounds])
    reader.windows.fill()


@given(LAYOUTS, specs(), st.integers(1, 5), st.integers(1, 3), st.data())
@settings(deadline=None)
def test_any_spans_in_any_order_are_the_rows_that_the_model_says_and_nobody_elses_memory(
    files: list[list[int]], spec: OrderSpec, lanes: int, max_windows: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = write_ids(Path(folder), files)
        limit = data.draw(st.none() | st.integers(1, 4000))
        reader = PositionReader(RowGroupDecoder(table), spec, max_windows=max_windows, threads=2, room=Room(limit))
        layouts = [EpochLayout.build(table.index.group_rows, spec, epoch, lanes) for epoch in range(2)]
        delivered: list[tuple[dict[str, Any], dict[str, list[Any]]]] = []
        if data.draw(st.booleans()):
            follow(reader, layouts[0])
        for _ in range(data.draw(st.integers(1, 6))):
            pieces = []
            for _ in range(data.draw(st.integers(0, 3))):
                layout = data.draw(st.sampled_from(layouts))
                start = data.draw(st.integers(0, layout.rows))
                pieces.append((layout, start, data.draw(st.integers(start, layout.rows))))
            columns = reader.read(pieces)
            expected = rows_of([i for piece in pieces for i in ids_at(table, *piece)])
            assert {name: column.tolist() for name, column in columns.items()} == expected
            if data.draw(st.booleans()):
                columns["id"][...] = -1
                columns["pair"][...] = -1
                columns["text"].values[...] = ord("?")
            else:
                delivered.append((columns, expected))
            assert reader.windows.held <= windows_held_of(max_windows)
        for columns, expected in delivered:
            assert {name: column.tolist() for name, column in columns.items()} == expected


@given(LAYOUTS, specs(), st.integers(1, 5), st.integers(1, 7), st.booleans())
@settings(deadline=None)
def test_windows_are_decoded_once_while_lanes_advance_and_let_go_when_served(
    files: list[list[int]], spec: OrderSpec, lanes: int, batch: int, ahead: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = write_ids(Path(folder), files)
        reader = PositionReader(RowGroupDecoder(table, ["id"]), spec, max_windows=lanes)
        layout = EpochLayout.build(table.index.group_rows, spec, 0, lanes)
        seen: list[int] = []
        with patch.object(WindowCache, "_begin", autospec=True, side_effect=WindowCache._begin) as begun:
            if ahead:
                follow(reader, layout)
            for step in lane_steps(layout, batch):
                seen += reader.read([step])["id"].tolist()
                assert reader.windows.held <= windows_held_of(lanes)
        assert sorted(seen) == list(range(table.num_rows))
        bounds = layout.lane_bounds.tolist()
        windows = sum(len(layout.windows(a, b)) for a, b in itertools.pairwise(bounds))
        assert begun.call_count == windows
        assert reader.windows.held == 0


class Spying(RowGroupDecoder):
    """Remembers what was decoded, by all of its kind that share ``decoded``."""

    def __init__(self, table: Table, decoded: list[tuple[int, int, int]]) -> None:
        super().__init__(table, ["id"])
        self.decoded = decoded

    def decode(self, group: int, start: int, stop: int) -> pa.Table:
        self.decoded.append((group, start, stop))
        return super().decode(group, start, stop)


def spied(
    table: Table, spec: OrderSpec, max_windows: int, **options: Any
) -> tuple[PositionReader, list[tuple[int, int, int]]]:
    decoded: list[tuple[int, int, int]] = []
    reader = PositionReader(Spying(table, decoded), spec, max_windows=max_windows, **options)
    return reader, decoded


def test_a_window_entered_in_its_middle_is_decoded_once_and_alone(tmp_path: Path) -> None:
    spec = OrderSpec(seed=5, shuffle=True, window=2)
    table = write_ids(tmp_path, [[4, 4], [4, 4]])
    layout = EpochLayout.build(table.index.group_rows, spec, 0, 1)
    reader, decoded = spied(table, spec, 1)
    for start in range(11, 16):
        assert reader.read([(layout, start, start + 1)])["id"].tolist() == ids_at(table, layout, start, start + 1)
    second = layout.window_at(11).fragments
    assert sorted(decoded) == sorted((f.group, f.start, f.stop) for f in second)


@pytest.mark.parametrize(("lanes", "most"), [(1, 3), (2, 4), (3, 6)])
def test_as_many_windows_are_read_ahead_as_are_open_and_two_at_least(tmp_path: Path, lanes: int, most: int) -> None:
    table = write_ids(tmp_path, [[3] * 12])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, lanes)
    reader, decoded = spied(table, ORDERED, lanes)
    follow(reader, layout)
    held = []
    for step in lane_steps(layout, 1):
        held.append(reader.windows.held)
        reader.read([step])
    assert max(held) == most
    assert len(decoded) == 12


def test_windows_that_a_lane_needs_next_are_decoded_before_they_are_taken_in_that_order(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[3, 3, 3, 3]])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader, decoded = spied(table, ORDERED, 1, threads=1)
    follow(reader, layout)
    assert reader.windows.held == 3
    assert reader.read([(layout, 0, 3)])["id"].tolist() == [0, 1, 2]
    assert reader.windows.held == 3
    assert [reader.read([(layout, a, a + 3)])["id"].tolist() for a in (3, 6, 9)] == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert reader.windows.held == 0
    assert [group for group, _, _ in decoded] == [0, 1, 2, 3]


@pytest.mark.parametrize(("share", "begun"), [(1.0, [0, 1, 2]), (0.25, [0]), (0.5, [0, 1])])
def test_a_source_of_a_mixture_begins_a_window_when_the_mixture_comes_to_it_within_two_windows(
    tmp_path: Path, share: float, begun: list[int]
) -> None:
    table = write_ids(tmp_path, [[8] * 6])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader, _ = spied(table, ORDERED, 1, threads=1)
    reader.windows.follow([iter([(layout, one) for one in layout.windows(0, 48)])], share)
    reader.read([(layout, 0, 1)])
    reader.windows.fill()
    assert sorted(one.window.start // 8 for one in reader.windows._held()) == begun
    reader.read([(layout, 1, 4)])
    reader.windows.fill()
    assert reader.windows.held == max(2, len(begun)), "half of a window is left, two windows of a mixture of four"


def test_what_was_read_ahead_for_lanes_that_are_no_longer_followed_is_dropped(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[3] * 6])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader, _ = spied(table, ORDERED, 1)
    follow(reader, layout)
    reader.read([(layout, 0, 1)])
    assert reader.windows.held == 3
    reader.windows.follow([])
    assert reader.windows.held == 1
    assert reader.read([(layout, 1, 9)])["id"].tolist() == list(range(1, 9))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sets(st.integers(0, 53)),
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(0, 9),
)
@example([4, 1, 3], {1}, 0, 1, 0)
def test_windows_of_a_lane_are_those_that_hold_its_positions_in_their_order(
    sizes: list[int], gone: set[int], window: int, num_lanes: int, done: int
) -> None:
    """A lane of what is left of an epoch that was begun has many gaps. ``window`` 0: nothing is shuffled."""
    spec = OrderSpec(seed=1, shuffle=True, window=window) if window else ORDERED
    layout = EpochLayout.build(np.array(sizes), spec, 0, 2 if window else 1)
    positions = Intervals.of([(one, one + 1) for one in range(layout.rows) if one not in gone])
    left = Left(epoch=0, num_lanes=layout.num_lanes, rotation=0, positions=positions)
    deal = EpochDeal(first=0, num_lanes=num_lanes, batch_size=2, tail="short", left=left)
    for lane, size in enumerate(deal.limits.tolist()):
        begin = min(done, size)
        spans = deal.lane_spans(lane, begin, size)
        every = [at for span in spans for at in range(span.start, span.stop)]
        found = windows_of((partial(deal.lane_spans, lane), begin, size), lambda epoch: layout)
        assert [one.start for _, one in found] == list(dict.fromkeys(layout.window_at(at).start for at in every))


@pytest.mark.parametrize("lanes", [1, 3])
def test_what_goes_on_in_a_window_that_is_held_is_found_without_looking_for_the_window(
    tmp_path: Path, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_ids(tmp_path, [[30] * 3])
    layout = EpochLayout.build(table.index.group_rows, OrderSpec(seed=7, shuffle=True, window=1), 0, lanes)
    reader, _ = spied(table, layout.spec, lanes)
    looked = []
    found = EpochLayout.window_at
    monkeypatch.setattr(EpochLayout, "window_at", lambda self, at: looked.append(at) or found(self, at))
    steps = lane_steps(layout, 2)
    ids = np.concatenate([reader.read([step])["id"] for step in steps])
    assert sorted(looked) == [0, 30, 60]
    other = PositionReader(RowGroupDecoder(table), layout.spec, max_windows=lanes)
    assert ids.tolist() == np.concatenate([other.read([step])["id"] for step in steps[::-1]][::-1]).tolist()


def test_what_goes_on_where_another_epoch_stopped_is_of_its_own_epoch(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[8]])
    spec = OrderSpec(seed=7, shuffle=True, window=1)
    layouts = [EpochLayout.build(table.index.group_rows, spec, epoch, 1) for epoch in range(2)]
    reader, _ = spied(table, spec, 1)
    steps = [(layouts[0], 0, 4), (layouts[1], 4, 8), (layouts[0], 4, 8)]
    opened = [reader.open([step]) for step in steps]
    found = [reader.take(one)["id"].tolist() for one in opened]
    assert found == [ids_at(table, *step) for step in steps]
    assert found[1] != found[2]


def test_a_limit_of_memory_holds_back_what_is_not_needed_yet(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[100] * 8])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 4)
    spans = [(layout, start, start + 100) for start in range(0, 800, 100)]
    for limit, ahead, most in ((1, 1, 1), (3000, 3, 3), (100 * 8 * 100, 8, 7)):  # the last one holds nothing back
        reader, decoded = spied(table, ORDERED, 4, room=Room(limit))
        follow(reader, layout)
        assert reader.windows.held <= ahead
        rows = [reader.read([spans[0]])["id"].tolist()]
        assert reader.windows.held == most
        rows += [reader.read([span])["id"].tolist() for span in spans[1:]]
        assert rows == [list(range(start, start + 100)) for start in range(0, 800, 100)]
        assert len(decoded) == 8


@pytest.mark.parametrize("limit", [1, 1000, None])
def test_no_lane_makes_room_for_another_whatever_the_limit_of_memory(tmp_path: Path, limit: int | None) -> None:
    table = write_ids(tmp_path, [[20] * 12])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 4)
    reader, decoded = spied(table, ORDERED, 4, room=Room(limit))
    ids = [reader.read([step])["id"] for step in lane_steps(layout, 4)]
    assert sorted(np.concatenate(ids).tolist()) == list(range(240))
    assert len(decoded) == 12 and reader.windows.held == 0


def test_the_window_unused_for_longest_makes_room(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[3, 3, 3, 3]])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader, decoded = spied(table, ORDERED, 1)
    for start in (0, 3, 6, 1, 9, 2, 4):  # windows 0, 1, 2, 0, 3 (drops 1), 0 (served: let go), 1 (again)
        reader.read([(layout, start, start + 1)])
    assert [group for group, _, _ in decoded] == [0, 1, 2, 3, 1]


def test_two_lanes_of_a_recut_advance_in_one_window_that_is_decoded_once(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[12]])
    for spec in (ORDERED, OrderSpec(seed=1, shuffle=True, window=1)):
        layout = EpochLayout.build(table.index.group_rows, spec, 0, 1)
        reader, decoded = spied(table, spec, 1)
        for start in (6, 0, 8, 2, 10, 4):
            rows = reader.read([(layout, start, start + 2)])["id"].tolist()
            assert rows == ids_at(table, layout, start, start + 2)
        assert decoded == [(0, 0, 12)]


@pytest.mark.parametrize("stop", [5, 11])
def test_rows_already_delivered_are_decoded_again(tmp_path: Path, stop: int) -> None:
    table = write_ids(tmp_path, [[12]])
    for spec in (ORDERED, OrderSpec(seed=1, shuffle=True, window=1)):
        layout = EpochLayout.build(table.index.group_rows, spec, 0, 1)
        reader, decoded = spied(table, spec, 1)
        first = reader.read([(layout, 2, 6)])["id"]
        first[...] = -1
        again = reader.read([(layout, 0, stop)])["id"].tolist()
        assert again == ids_at(table, layout, 0, stop)
        assert len(decoded) == 2


def test_clear_forgets_windows_and_reading_goes_on(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[6]])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader, decoded = spied(table, ORDERED, 4)
    reader.read([(layout, 0, 3)])["id"][...] = -1
    reader.clear()
    assert reader.windows.held == 0
    assert reader.read([(layout, 0, 6)])["id"].tolist() == list(range(6))
    assert len(decoded) == 2


def test_what_was_opened_before_a_clear_is_decoded_anew(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[6] * 5])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader, _ = spied(table, ORDERED, 1)
    reader.read([(layout, 0, 2)])["id"][...] = -1
    follow(reader, layout)
    opened = [reader.open([(layout, start, start + 2)]) for start in range(2, 30, 2)]
    reader.clear()
    assert [reader.take(one)["id"].tolist() for one in opened] == [[i, i + 1] for i in range(2, 30, 2)]
    assert reader.windows.held == 1, "the first one: somebody has its first rows"


def test_windows_that_are_not_read_to_their_end_are_not_kept_beyond_what_may_be_held(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[3] * 12])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader, _ = spied(table, ORDERED, 1)
    for start in reversed(range(0, 36, 3)):
        assert reader.read([(layout, start, start + 1)])["id"].tolist() == [start]
        assert reader.windows.held <= windows_held_of(1)


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_what_could_not_be_decoded_is_tried_again_also_for_other_rows_of_its_window(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    class FailsOnce(RowGroupDecoder):
        failed = False

        def decode(self, group: int, start: int, stop: int) -> pa.Table:
            if not self.failed:
                self.failed = True
                raise kind("once")
            return super().decode(group, start, stop)

    table = write_ids(tmp_path, [[6]])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader = PositionReader(FailsOnce(table, ["id"]), ORDERED, max_windows=1)
    with pytest.raises(kind, match="once"):
        reader.read([(layout, 0, 3)])
    assert reader.read([(layout, 3, 6)])["id"].tolist() == [3, 4, 5]


def test_what_a_reader_that_is_let_go_of_had_not_begun_to_decode_is_not_decoded(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[6]])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader, decoded = spied(table, ORDERED, 1, threads=1)
    begun, held = threading.Event(), threading.Event()
    found: list[threading.Thread] = []

    def hold() -> None:
        found.append(threading.current_thread())
        begun.set()
        held.wait(60)

    reader.windows._threads.submit(hold)
    assert begun.wait(60)
    reader.open([(layout, 0, 6)])
    del reader
    held.set()
    found[0].join(60)
    assert not found[0].is_alive() and decoded == []


def test_the_collector_may_let_go_of_a_reader_in_a_thread_that_has_its_locks(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[6]])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader, decoded = spied(table, ORDERED, 4)
    reader.read([(layout, 0, 3)])
    windows = reader.windows
    with windows.rows._prefetcher._state.lock, windows._decoder._memory._lock:
        reader.clear()  # as an iterator's finalizer does; it would wait for ever
    assert reader.read([(layout, 0, 6)])["id"].tolist() == list(range(6))
    assert len(decoded) == 2


@pytest.mark.parametrize("spec", [ORDERED, OrderSpec(seed=1, shuffle=True, window=2)])
def test_rows_are_slices_of_what_was_decoded(tmp_path: Path, spec: OrderSpec) -> None:
    table = write_ids(tmp_path, [[6]])
    layout = EpochLayout.build(table.index.group_rows, spec, 0, 1)
    reader = PositionReader(RowGroupDecoder(table, ["id"]), spec, max_windows=1)
    left, right = (reader.read([(layout, a, a + 3)])["id"] for a in (0, 3))
    assert right.ctypes.data - left.ctypes.data == 3 * 8


def test_an_endless_stream_crosses_from_one_epoch_into_the_next(tmp_path: Path) -> None:
    spec = OrderSpec(seed=2, shuffle=True, window=2)
    table = write_ids(tmp_path, [[3, 0, 2], [4]])
    first, second = (EpochLayout.build(table.index.group_rows, spec, epoch, 1) for epoch in (0, 1))
    reader = PositionReader(RowGroupDecoder(table, ["id"]), spec, max_windows=2)
    rows = reader.read([(first, 7, 9), (second, 0, 4)])["id"].tolist()
    assert rows == ids_at(table, first, 7, 9) + ids_at(table, second, 0, 4)


def test_no_pieces_or_empty_ones_are_no_rows_of_the_right_schema(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[2]])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader = PositionReader(RowGroupDecoder(table, ["pair", "id"]), ORDERED, max_windows=1)
    for pieces in ([], [(layout, 1, 1)]):
        assert reader.read(pieces)["pair"].shape == (0, 2)
    assert reader.windows.held == 0


def test_text_too_large_for_32_bit_offsets_is_gathered_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "MAX_NARROW_BYTES", 100)
    spec = OrderSpec(seed=1, shuffle=True, window=3)
    table = write_ids(tmp_path, [[10, 10], [10]])
    layout = EpochLayout.build(table.index.group_rows, spec, 0, 1)
    reader = PositionReader(RowGroupDecoder(table, ["text"]), spec, max_windows=1, nulls=None)
    batch = reader.read([(layout, 0, 30)])
    assert batch.schema == reader.schema
    assert batch.column("text").num_chunks > 1
    assert convert(batch)["text"].tolist() == rows_of(ids_at(table, layout, 0, 30))["text"]


@given(columns(), st.integers(1, 5), st.integers(1, 3), st.sampled_from([8, 2**31 - 1]), st.integers(1, 9))
@settings(deadline=None)
def test_shuffled_windows_hold_every_type_that_parquet_holds_also_where_offsets_must_widen(
    case: tuple[pa.Field, pa.ChunkedArray, list[Any]], size: int, window: int, narrow: int, batch: int
) -> None:
    field, column, _ = case
    spec = OrderSpec(seed=3, shuffle=True, window=window)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(arrays, "MAX_NARROW_BYTES", narrow):
        path = Path(folder, "x.parquet")
        try:
            pq.write_table(pa.Table.from_arrays([column], schema=pa.schema([field])), path, row_group_size=size)
            reference = to_pylist(convert(pq.read_table(path), nulls="mask"), "x")
        except pa.ArrowException:  # what Arrow itself cannot write or read back
            assume(False)
        table = open_table(path)
        layout = EpochLayout.build(table.index.group_rows, spec, 0, 1)
        arrow = PositionReader(RowGroupDecoder(table), spec, max_windows=1, nulls=None)
        reader = PositionReader(RowGroupDecoder(table), spec, max_windows=1, nulls="mask")
        for start in range(0, layout.rows, batch):
            stop = min(layout.rows, start + batch)
            found = arrow.read([(layout, start, stop)])
            assert found.schema == arrow.schema
            rows = [reference[i] for i in ids_at(table, layout, start, stop)]
            assert to_pylist(convert(found, nulls="mask"), "x") == rows
            assert to_pylist(reader.read([(layout, start, stop)]), "x") == rows


def test_a_damaged_row_group_is_named_and_other_windows_still_read(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[50], [50]])
    path = tmp_path / "0001.parquet"
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    reader = PositionReader(RowGroupDecoder(table, ["id"]), ORDERED, max_windows=1)
    with pytest.raises(DataFileDamaged) as e:
        reader.read([(layout, 40, 60)])
    assert (e.value.file, e.value.row_group) == ("0001.parquet", 0)
    assert reader.read([(layout, 40, 50)])["id"].tolist() == list(range(40, 50))


def test_positions_and_layouts_that_are_not_the_tables_are_refused(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[2]])
    layout = EpochLayout.build(table.index.group_rows, ORDERED, 0, 1)
    with pytest.raises(ConfigError, match="max_windows must be at least 1, got 0"):
        PositionReader(RowGroupDecoder(table), ORDERED, max_windows=0)
    with pytest.raises(ValueError, match=r"positions \[1, 3\) of epoch 0, which has 2 rows"):
        PositionReader(RowGroupDecoder(table), ORDERED, max_windows=1).read([(layout, 1, 3)])
    other = PositionReader(RowGroupDecoder(table), OrderSpec(seed=1, shuffle=True, window=1), max_windows=1)
    with pytest.raises(ValueError, match="was given to a reader of"):
        other.read([(layout, 0, 1)])


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=12))
def test_what_was_served_is_a_set(spans: list[tuple[int, int]]) -> None:
    served, model = Served(), set()
    for start, size in spans:
        rows = set(range(start, start + size))
        assert served.add(start, start + size) == model.isdisjoint(rows)
        model |= rows
        assert served.size == len(model)
        runs = list(zip(served.starts, served.stops, strict=True))
        assert set().union(*(range(a, b) for a, b in runs)) == model
        assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))


@pytest.mark.parametrize("rows_missing", [1, -1])
def test_a_row_group_of_another_number_of_rows_is_refused(tmp_path: Path, rows_missing: int) -> None:
    class Other(RowGroupDecoder):
        def decode(self, group: int, start: int, stop: int) -> pa.Table:
            decoded = super().decode(group, start, stop)
            return decoded.slice(1) if rows_missing > 0 else pa.concat_tables([decoded, decoded.slice(0, 1)])

    table = write_ids(tmp_path, [[5, 4]])
    spec = OrderSpec(seed=0, shuffle=True, window=2)
    reader = PositionReader(Other(table, ["id"]), spec, max_windows=1)
    layout = EpochLayout.build(table.index.group_rows, spec, 0, 1)
    with pytest.raises(DataFileDamaged, match=rf"row groups [01], [01] .* gave {9 - 2 * rows_missing} rows where 9"):
        reader.read([(layout, 0, 9)])
