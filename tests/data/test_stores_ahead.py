"""A loader asks a store for row groups well before the loop needs them, as local files need not be."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lakeckpt import LakeDataset, LakeLoader, ReadOptions
from lakeckpt.lake.storage.base import Storage
from tests.reading.cases import write_ids

BOUND_S = 30.0
"""A test that waits for so long has failed."""
AT_ONCE, FILES = 12, 24


class Far:
    """A storage that answers the first reads only once ``together`` of them are under way."""

    def __init__(self, inner: Storage, together: int = AT_ONCE) -> None:
        self._inner, self._barrier = inner, threading.Barrier(together)
        self._left, self._lock = together, threading.Lock()
        self.asked: list[str] = []

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        with self._lock:
            self.asked.append(path)
            self._left -= 1
            waits = self._left >= 0
        if waits:
            self._barrier.wait(BOUND_S)
        return self._inner.read(path, start, stop, etag=etag)

    list = put = put_new = delete = None  # type: ignore[assignment]


@pytest.mark.parametrize("shuffle", [False, True])
def test_many_files_are_asked_for_before_the_first_batch(tmp_path: Path, shuffle: bool) -> None:
    table = write_ids(tmp_path, [[4]] * FILES)
    far = replace(table, storage=Far(table.storage))  # type: ignore[arg-type]
    loader = LakeLoader(
        LakeDataset(far, columns=["id"], batch_size=2, shuffle=shuffle, options=ReadOptions(num_lanes=1))
    )
    assert sorted(i for batch in loader for i in batch["id"].tolist()) == list(range(4 * FILES))


@pytest.mark.filterwarnings("ignore:1 windows of 1 row groups")
def test_a_memory_limit_bounds_what_is_fetched_ahead(tmp_path: Path) -> None:
    table = write_ids(tmp_path, [[4]] * FILES)
    far = Far(table.storage, together=1)
    stored = replace(table, storage=far)  # type: ignore[arg-type]
    loader = LakeLoader(
        LakeDataset(stored, columns=["id"], batch_size=2, options=ReadOptions(num_lanes=1, memory_limit_bytes=100))
    )
    for number, batch in enumerate(loader):
        row_groups = len(far.asked) - len(set(far.asked))  # each after a footer
        assert row_groups <= number // 2 + 4  # one footer is read to estimate the windows
        assert batch["id"].tolist() == [2 * number, 2 * number + 1]
    assert number == 2 * FILES - 1
