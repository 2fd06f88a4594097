"""Parts of columns, gathered or joined and cut, have the rows that plain Python finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.reading.columns import gather as module
from lakeckpt.reading.columns.gather import cut, gather, join_rows
from lakeckpt.reading.columns.ragged import Ragged, map_column

LENGTHS = st.sampled_from([0, 1, 2, 3, 4, 11, 12, 13, 40, 300])
"""Around those at which Arrow keeps contents in the view itself."""


def ragged(lengths: list[int], dtype: str, begin: int) -> Ragged[np.ndarray]:
    offsets = np.cumsum([0, *lengths])
    return Ragged(values=(np.arange(offsets[-1]) + begin).astype(dtype), offsets=offsets)


@st.composite
def parts(draw: st.DrawFn) -> list[Any]:
    kind, dtype = draw(st.sampled_from(["array", "ragged", "struct", "nested"])), draw(st.sampled_from(["u1", "<i4"]))
    found: list[Any] = []
    for number in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(LENGTHS, min_size=draw(st.integers(0, 1)), max_size=6))
        inner = ragged(lengths, dtype, 31 * number)
        if kind == "array":
            found.append(np.arange(len(lengths)) + 100 * number)
        elif kind == "ragged":
            found.append(inner)
        elif kind == "struct":
            found.append({"a": inner, "b": np.arange(len(lengths))})
        else:
            found.append(Ragged(values=inner, offsets=np.array([0, len(lengths)])))
    return found


def rows_of(column: Any) -> list[Any]:
    if isinstance(column, dict):
        return list(zip(*(rows_of(child) for child in column.values()), strict=True))
    return column.tolist()


def all_rows(found: list[Any]) -> list[Any]:
    return [row for part in found for row in rows_of(part)]


@pytest.mark.parametrize("short_run", [0, 64])
@given(found=parts(), data=st.data())
def test_gathered_rows_are_those_asked_for(short_run: int, found: list[Any], data: st.DataObject) -> None:
    rows = all_rows(found)
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)) if rows else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SHORT_RUN", short_run)
        gathered = gather(found, np.array(order, np.uint32))
    assert rows_of(gathered) == [rows[number] for number in order]


@given(found=parts(), data=st.data())
def test_cuts_of_joined_parts_are_their_rows(found: list[Any], data: st.DataObject) -> None:
    rows = all_rows(found)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    seen: list[Any] = []

    def make(array: Any) -> Any:
        seen.append(array)
        return array

    taken = cut({"x": join_rows(found)}, start, stop, make)["x"]
    assert rows_of(taken) == rows[start:stop]
    counted: list[Any] = []

    def count(array: Any) -> Any:
        counted.append(id(array))
        return array

    map_column(taken, count)
    assert sorted(counted) == sorted(id(array) for array in seen), "each array was made, once"


def test_a_cut_is_a_view() -> None:
    column = ragged([300, 300, 300], "<i4", 0)
    taken = cut({"x": column}, 1, 3, lambda array: array)["x"]
    assert np.shares_memory(taken.values, column.values)


def test_contents_that_32_bits_cannot_address_are_joined_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NARROW_BYTES", 1000)
    found = [ragged([300, 200], "<i4", 0), ragged([300], "<i4", 7)]
    assert gather(found, np.array([2, 0], np.uint32)).tolist() == [found[1][0].tolist(), found[0][0].tolist()]
