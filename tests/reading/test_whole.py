"""Whole documents in sequences: the bins of a plain model, and golden sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.reading.packed.documents import Documents
from lakeckpt.reading.packed.packing import COLUMNS, Packing
from lakeckpt.reading.packed.whole import best_fit, packed


def plain_bins(lengths: list[int], size: int) -> list[int]:
    """Best fit decreasing by a look at every bin; of equal ones, the bin that came to its space last."""
    spaces: list[tuple[int, int]] = []  # the space of each bin, and when it got it
    found = [0] * len(lengths)
    order = sorted(range(len(lengths)), key=lambda one: -lengths[one])
    for time, one in enumerate(order):
        fits = [(space, -since, number) for number, (space, since) in enumerate(spaces) if space >= lengths[one]]
        if not fits:
            spaces.append((size, time))
        number = min(fits)[2] if fits else len(spaces) - 1
        spaces[number] = spaces[number][0] - lengths[one], time
        found[one] = number
    return found


@given(st.integers(1, 60).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size), max_size=60))))
def test_bins_are_those_of_a_plain_model(given: tuple[int, list[int]]) -> None:
    size, lengths = given
    found = best_fit(np.array(lengths, np.int64), size)
    assert found.tolist() == plain_bins(lengths, size)
    fill = np.bincount(found, lengths)
    assert not len(lengths) or (fill.max() <= size and set(found.tolist()) == set(range(len(fill))))
    assert sum(fill <= size / 2) <= 1, "two bins that are half empty would be one"


def documents(lengths: list[int], first: int = 1) -> Documents:
    ends = np.cumsum([0, *lengths])
    return Documents(tokens=np.arange(first, first + ends[-1], dtype=np.int32), ends=ends, rows=np.arange(len(lengths)))


def columns(lengths: list[list[int]], key: tuple[int, int] | None, **options: Any) -> dict[str, list[list[int]]]:
    firsts = np.cumsum([1, *map(sum, lengths)])
    parts = [documents(mine, int(first)) for mine, first in zip(lengths, firsts, strict=False)]
    packing = Packing(column="tokens", length=8, whole=True, columns=COLUMNS[:5], **options)
    found = packed(parts, packing, key)
    return {name: column[0 : len(found)].tolist() for name, column in found.columns(packing.columns).items()}  # type: ignore[index]


GOLDEN = {
    None: [
        [1, 2, 3, 20, 21, 22, 23, 24],
        [4, 5, 6, 7, 8, 9, 10, 11],
        [12, 13, 14, 15, 16, 17, 18, 19],
        [25, 26, 27, 28, 0, 0, 0, 0],
    ],
    (7, 9): [
        [18, 19, 12, 13, 14, 15, 16, 17],
        [20, 21, 22, 23, 24, 1, 2, 3],
        [25, 26, 27, 28, 0, 0, 0, 0],
        [4, 5, 6, 7, 8, 9, 10, 11],
    ],
}


@pytest.mark.parametrize("key", [None, (7, 9)])
def test_sequences_of_documents_are_these_for_ever(key: Any) -> None:
    assert columns([[3, 14], [2], [5, 4]], key)["tokens"] == GOLDEN[key]


def test_the_columns_of_a_sequence_follow_from_its_documents() -> None:
    found = columns([[3, 11]], None)
    assert found["tokens"] == [[1, 2, 3, 12, 13, 14, 0, 0], [4, 5, 6, 7, 8, 9, 10, 11]]
    assert found["position_ids"] == [[0, 1, 2, 0, 1, 2, 0, 1], list(range(8))]
    assert found["document_ids"] == [[0, 0, 0, 1, 1, 1, 2, 2], [0] * 8]
    assert found["loss_mask"] == [[True] * 6 + [False] * 2, [True] * 8]
    assert found["labels"] == [[2, 3, -100, 13, 14, -100, -100, -100], [5, 6, 7, 8, 9, 10, 11, 12]]


def test_long_documents_may_be_dropped_and_there_may_be_none() -> None:
    assert columns([[3, 11]], None, drops_long=True)["tokens"] == [[1, 2, 3, 0, 0, 0, 0, 0]]
    assert columns([[11]], (1, 2), drops_long=True)["tokens"] == columns([[]], None)["labels"] == []
