"""Footers that were used last are kept, within a limit, and by no forked process."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt.lake.parquet.kept_footers import KeptFooters, kept_footers


def footer(name: str) -> pq.FileMetaData:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: [1]}), sink)
    return pq.read_metadata(pa.BufferReader(sink.getvalue()))


def never() -> Any:
    raise AssertionError("the footer is kept")


def test_the_footers_used_last_are_kept_within_the_limit() -> None:
    some = {name: footer(name) for name in "abcd"}
    kept = KeptFooters(3 * 8 * some["a"].serialized_size)
    for name in "abc":
        assert kept.get(name, lambda name=name: some[name]) is some[name]  # type: ignore[misc]
    assert kept.get("a", never) is some["a"]
    assert kept.get("d", lambda: some["d"]) is some["d"]
    for name in "acd":
        assert kept.get(name, never) is some[name]
    with pytest.raises(AssertionError):
        kept.get("b", never)
    kept.forget()
    with pytest.raises(AssertionError):
        kept.get("a", never)


def test_a_footer_above_the_limit_is_kept_alone_and_a_read_that_fails_is_tried_again() -> None:
    kept = KeptFooters(1)
    with pytest.raises(AssertionError):
        kept.get("a", never)
    assert [kept.get(name, lambda name=name: footer(name)).num_columns for name in "ab"] == [1, 1]  # type: ignore[misc]
    assert kept.get("b", never).num_columns == 1


def test_threads_that_read_one_footer_count_it_once() -> None:
    one, other = footer("a"), footer("b")
    kept = KeptFooters(2 * 8 * one.serialized_size)
    both = threading.Barrier(2)

    def read() -> pq.FileMetaData:
        both.wait()
        return footer("a")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: kept.get("a", read), range(2)))
    kept.get("b", lambda: other)
    assert kept.get("a", never).num_columns == 1 and kept.get("b", never) is other


def test_a_forked_process_begins_with_no_footer_even_if_a_thread_held_the_lock() -> None:
    found = footer("a")
    kept_footers.get("a", lambda: found)
    with kept_footers._lock:
        child = os.fork()
        if child == 0:
            read: list[int] = []
            kept_footers.get("a", lambda: (read.append(1), found)[1])
            os._exit(len(read))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert kept_footers.get("a", never) is found
