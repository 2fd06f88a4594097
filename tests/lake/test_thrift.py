"""Structures that are skipped end where they end when they are read; what is cut or malformed is an error in both."""

from __future__ import annotations

import io
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt.lake.thrift import read_struct
from tests.lake.tables import footer_of


@pytest.fixture(scope="module")
def footer() -> bytes:
    out = io.BytesIO()
    columns = {"a": [1, None], "b": ["x", "y" * 200], "c": [[1.5], []], "d": [{"e": True}, None]}
    pq.write_table(pa.table(columns), out, row_group_size=1, write_page_index=True)
    return footer_of(out.getvalue())


def end_of(data: bytes, **wanted: dict[int, object]) -> int | None:
    try:
        return read_struct(memoryview(data), 0, **wanted)[1]
    except ValueError:
        return None


def test_a_whole_footer_is_skipped_to_its_end(footer: bytes) -> None:
    assert end_of(footer) == end_of(footer, wanted={}) == end_of(footer, wanted={4: {1: {3: {}}}}) == len(footer)


def test_a_cut_footer_is_an_error_whether_it_is_read_or_skipped(footer: bytes) -> None:
    for size in range(len(footer)):
        assert end_of(footer[:size]) is end_of(footer[:size], wanted={}) is None


def test_what_can_be_read_after_damage_is_skipped_alike(footer: bytes) -> None:
    draw = random.Random(5)
    read = 0
    for _ in range(1000):
        hurt = bytearray(footer)
        for _ in range(draw.choice([1, 1, 2, 8])):
            hurt[draw.randrange(len(hurt))] = draw.randrange(256)
        end = end_of(bytes(hurt))
        skipped = end_of(bytes(hurt), wanted={})
        assert end is None or skipped == end
        read += end is not None
    assert read > 100


def test_structures_in_structures_are_bounded() -> None:
    deep = b"\x1c" * 40 + b"\x00" * 41
    assert end_of(deep) is end_of(deep, wanted={}) is None
    lists = b"\x19" + b"\x19" * 40 + b"\x00" * 40
    assert end_of(lists, wanted={}) is None
