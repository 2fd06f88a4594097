"""A row selection comes back as it was written, is known by the rows that stay, and refused where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakeckpt.errors import WireDamaged, WireError
from lakeckpt.reading.filters import selection as module
from lakeckpt.reading.filters.row_filter import row_filter
from lakeckpt.reading.filters.selection import EVERY, NONE, RowSelection, digested
from lakeckpt.wire.envelope import dumps, loads
from tests.golden.selection.make import PATH, selection


def test_the_golden_document_reads_as_the_value_it_was_written_from() -> None:
    found = RowSelection.loads(PATH.read_bytes())
    assert found == selection() and found.text == selection().text
    assert found.group_rows.tolist() == selection().group_rows.tolist()
    assert found.digest == "aa279fd0c12eb1b8a4ddbb3b01df62a8"
    assert selection().dumps() == PATH.read_bytes()


@given(rows=st.lists(st.integers(0, 2**40)), text=st.text(max_size=20))
def test_what_is_written_is_read_again(rows: list[int], text: str) -> None:
    counts = np.array(rows, np.int64)
    one = replace(selection(), group_rows=counts, group_digests=counts.astype(np.uint64), text=text)
    again = RowSelection.loads(one.dumps())
    assert again == one and again.text == text and again.num_rows == sum(rows)
    assert again.group_digests.tolist() == rows and again.pyarrow == one.pyarrow
    assert not again.group_rows.flags.writeable and not again.group_digests.flags.writeable


def test_other_rows_are_another_selection_and_another_spelling_is_not() -> None:
    counts = replace(selection(), group_rows=np.array([0, 4, 12, 2**31]))
    rows = replace(selection(), group_digests=np.array([NONE, EVERY, 7, 2**63], np.uint64))
    spelled = replace(selection(), text="", expression="0" * 32, pyarrow="17.0.0")
    assert len({selection().digest, counts.digest, rows.digest}) == 3
    assert spelled == selection() and spelled.digest == selection().digest


def test_a_selection_is_used_by_the_expression_and_the_pyarrow_that_counted_it() -> None:
    schema = pa.schema([("a", pa.int64())])
    keep, other = (row_filter(pc.field("a") > n, schema) for n in (3, 4))
    one = replace(selection(), expression=keep.digest, pyarrow=pa.__version__)
    assert one.was_counted_by(keep) and one.was_counted_by(row_filter([("a", ">", 3)], schema))
    assert not one.was_counted_by(other)
    assert not replace(one, pyarrow="17.0.0").was_counted_by(keep)


@given(mask=st.lists(st.booleans(), max_size=70), other=st.lists(st.booleans(), max_size=70))
def test_the_digest_of_a_row_group_tells_which_rows_stay(mask: list[bool], other: list[bool]) -> None:
    kept, found = digested(pa.chunked_array([mask[:9], mask[9:]], pa.bool_()))
    assert kept == sum(mask)
    assert (found == NONE) == (not any(mask)) and (found == EVERY) == (bool(mask) and all(mask))
    if len(mask) == len(other):
        assert (found == digested(pa.chunked_array([other], pa.bool_()))[1]) == (mask == other)


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
        lambda v: v.update(group_rows=np.array([[1]])),
        lambda v: v.update(group_rows=np.array([1, 2, 3, 4])),
        lambda v: v.update(group_digests=np.array([0, 1], np.uint64)),
        lambda v: v.update(group_digests=np.array([1, 1, 1, 1], np.uint64)),
        lambda v: v.update(group_digests=np.array([0, 0, 1, 1], np.uint64)),
        lambda v: v.update(digest="00"),
        lambda v: v.pop("text"),
        lambda v: v.clear(),
    ],
)
def test_malformed_selections_are_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    value = loads(selection().dumps(), kind=module.KIND, supported=module.VERSION)
    change(value)
    with pytest.raises(WireDamaged):
        RowSelection.loads(dumps(value, kind=module.KIND, version=module.VERSION))


def test_every_flipped_byte_is_noticed() -> None:
    data = selection().dumps()
    for place in range(len(data)):
        with pytest.raises(WireError):
            RowSelection.loads(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
