"""Memory is used again once nothing looks at it any more, and never sooner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.core.hashing import Means, permutation
from lakeckpt.core.order import EpochLayout, OrderSpec
from lakeckpt.reading.columns.recycled import Recycled
from lakeckpt.reading.windows.positions import PositionReader
from lakeckpt.reading.windows.window import WindowDecoder
from tests.data.reading import flat, ids, loader_of, some, table_of
from tests.lakes import LakeSpec

INT64 = np.dtype(np.int64)


def place(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again_when_its_last_view_is_let_go_of() -> None:
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
    assert sum(block.size for block in memory._pool._waiting.values()) == 2048 * 8
    memory.limit_bytes = 0
    memory.new((64,), INT64)
    assert not memory._pool._waiting


def test_what_is_in_use_when_all_is_forgotten_does_not_wait_afterwards() -> None:
    memory = Recycled(1 << 20)
    array = memory.new((1000,), INT64)
    array[...] = 7
    memory.forget()
    assert (array == 7).all()
    del array
    memory.new((64,), INT64)
    assert not memory._pool._waiting


@given(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), st.sampled_from([0, 1, 2, 300, 40_000]))
def test_permutations_do_not_depend_on_what_memory_held(key: tuple[int, int], count: int) -> None:
    found = permutation(key, count, Means(new=lambda words: np.full(words, 2**64 - 1, np.uint64)))
    assert found.tolist() == permutation(key, count).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """960 rows in 24 row groups."""
    return LakeSpec(files=((40,) * 6,) * 4).write(tmp_path_factory.mktemp("recycled"))


def test_a_later_window_lies_where_an_earlier_one_lay_that_nobody_holds(folder: Path) -> None:
    table, spec = table_of(folder), OrderSpec(seed=1, shuffle=True, window=4)
    layout = EpochLayout.build(table.index.group_rows, spec, 0, 1)
    reader = PositionReader(table, ["id"], spec, max_windows=1, threads=1)
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


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether memory was given back, each time that windows were let go of."""
    found: list[bool] = []
    inner = WindowDecoder.close

    def close(self: WindowDecoder, *, gives_back: bool) -> None:
        found.append(gives_back)
        inner(self, gives_back=gives_back)

    monkeypatch.setattr(WindowDecoder, "close", close)
    return found


def test_memory_stays_from_one_short_epoch_to_the_next(folder: Path, given_back: list[bool]) -> None:
    loader = loader_of(folder, batch_size=32)
    for _ in range(2):
        assert sorted(flat(loader)) == list(range(960))
    assert given_back and not any(given_back)


def test_memory_is_given_back_where_an_epoch_is_broken_off(folder: Path, given_back: list[bool]) -> None:
    loader = loader_of(folder, batch_size=32)
    some(loader, 2)
    assert given_back == [True]
    some(loader, 2)
    assert given_back == [True, False, True]  # nothing was read in between
