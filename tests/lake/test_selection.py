"""A row selection comes back as it was written, is known by filter and counts, and refused where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.errors import WireDamaged, WireError
from lakeckpt.lake import selection as module
from lakeckpt.lake.selection import RowSelection, filter_of
from lakeckpt.wire.codec import dumps, loads
from tests.golden.selection.make import PATH, selection


def test_the_golden_document_reads_as_the_value_it_was_written_from() -> None:
    found = RowSelection.loads(PATH.read_bytes())
    assert found == selection() and found.text == selection().text
    assert found.group_rows.tolist() == selection().group_rows.tolist()
    assert found.digest == "d02c2b606852466ea9cac5938e066d71ef0455124b89a1a2"
    assert selection().dumps() == PATH.read_bytes()


@given(rows=st.lists(st.integers(0, 2**40)), text=st.text(max_size=20))
def test_what_is_written_is_read_again(rows: list[int], text: str) -> None:
    one = replace(selection(), group_rows=np.array(rows, np.int64), text=text)
    again = RowSelection.loads(one.dumps())
    assert again == one and again.text == text and again.num_rows == sum(rows)
    assert filter_of(again.digest) == one.filter
    assert not again.group_rows.flags.writeable


def test_other_counts_and_other_filters_are_other_selections() -> None:
    counts = replace(selection(), group_rows=np.array([1, 4, 12, 2**31]))
    other = replace(selection(), filter="0" * 32)
    assert len({selection().digest, counts.digest, other.digest}) == 3
    assert filter_of(counts.digest) == filter_of(selection().digest) != filter_of(other.digest)


def test_a_selection_of_another_table_is_refused() -> None:
    one = selection()
    one.check(table=one.table, existing=np.array([9, 5, 12, 2**31]))
    with pytest.raises(ValueError, match="table"):
        one.check(table="00", existing=np.array([9, 5, 12, 2**31]))
    for existing in ([9, 5, 12], [9, 4, 12, 2**31]):
        with pytest.raises(ValueError, match="more rows"):
            one.check(table=one.table, existing=np.array(existing))


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(group_rows=np.array([-1])),
        lambda v: v.update(group_rows=np.array([1.5])),
        lambda v: v.update(group_rows=[1]),
        lambda v: v.update(group_rows=np.array([[1]])),
        lambda v: v.update(group_rows=np.array([1, 2, 3, 4])),
        lambda v: v.update(filter="x" * 32),
        lambda v: v.update(filter=3),
        lambda v: v.update(filter="00"),
        lambda v: v.update(table=None),
        lambda v: v.update(digest="00"),
        lambda v: v.pop("text"),
        lambda v: v.clear(),
    ],
)
def test_crafted_selections_are_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    value = loads(selection().dumps(), kind=module.KIND, supported=module.VERSION).value
    change(value)
    with pytest.raises(WireDamaged):
        RowSelection.loads(dumps(value, kind=module.KIND, version=module.VERSION))


def test_every_flipped_byte_is_noticed() -> None:
    data = selection().dumps()
    for place in range(len(data)):
        with pytest.raises(WireError):
            RowSelection.loads(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
