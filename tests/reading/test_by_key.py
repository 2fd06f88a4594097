"""Rows are found in another version by their key, also where either version deletes stored rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt.errors import DataFileChanged
from lakeckpt.lake.formats.dispatch import open_table
from lakeckpt.lake.table.deletes import Deletes
from lakeckpt.lake.table.table import Table
from lakeckpt.reading.by_key import find_by_key
from lakeckpt.reading.windows.decode import RowGroupDecoder


def table_of(folder: Path, keys: list[int], deleted: list[int]) -> Table:
    folder.mkdir()
    pq.write_table(pa.table({"key": keys}), folder / "a.parquet", row_group_size=3)
    opened = open_table(folder)
    return opened.at(replace(opened.index, deletes=Deletes.of({0: np.array(deleted)})))


def test_rows_are_found_where_both_versions_delete_rows_before_them(tmp_path: Path) -> None:
    old = table_of(tmp_path / "old", [90, 1, 2, 3, 91, 4, 5], [0, 4])
    new = table_of(tmp_path / "new", [5, 92, 4, 3, 93, 2, 1], [1, 4])
    rows, compared = find_by_key(old, new, Deletes.of({0: np.array([1, 3, 6])}), key=["key"])  # the keys 1, 3 and 5
    assert rows.rows(0).tolist() == [0, 3, 6] and compared == 5


def test_the_files_of_both_versions_are_closed_if_one_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = table_of(tmp_path / "old", [1, 2], []), table_of(tmp_path / "new", [7, 8], [])
    closed: list[str] = []
    monkeypatch.setattr(RowGroupDecoder, "close", lambda self: closed.append(self.table.uri))
    (tmp_path / "new" / "a.parquet").unlink()
    with pytest.raises(DataFileChanged):
        find_by_key(old, new, Deletes.of({}), key=["key"])
    assert closed == [old.uri, new.uri]
