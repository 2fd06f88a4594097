"""Footers that were read are kept, and only those of files that are new or changed are read again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lakeckpt import open_table
from lakeckpt.errors import StorageError
from lakeckpt.lake.formats import footer_cache
from lakeckpt.lake.formats.footer_cache import _is_known
from lakeckpt.lake.storage.base import ObjectInfo
from lakeckpt.lake.storage.local import LocalStorage
from tests.lake.tables import write


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the files whose footers were read."""
    paths: list[str] = []
    inner = footer_cache.summarize_all

    def summarize_all(storage: Any, files: Any, **options: Any) -> Any:
        paths.extend(info.path for info in files)
        return inner(storage, files, **options)

    monkeypatch.setattr(footer_cache, "summarize_all", summarize_all)
    return paths


def lake(folder: Path) -> Path:
    for name, values in (("a", [1, 2, 3]), ("b", []), ("c", [4, 5])):
        write(folder / f"{name}.parquet", {"x": values}, row_group_size=2)
    return folder


def test_a_table_that_is_opened_again_costs_a_listing(tmp_path: Path, read: list[str]) -> None:
    folder, cache = lake(tmp_path / "lake"), tmp_path / "run"
    first = open_table(folder, footer_cache=cache)
    assert read == ["a.parquet", "b.parquet", "c.parquet"]
    read.clear()
    again = open_table(folder, footer_cache=cache)
    assert read == []
    assert again.index.dumps() == first.index.dumps() == open_table(folder).index.dumps()


def test_of_a_table_that_grew_only_the_new_files_are_read(tmp_path: Path, read: list[str]) -> None:
    folder, cache = lake(tmp_path / "lake"), tmp_path / "run"
    open_table(folder, footer_cache=cache)
    read.clear()
    write(folder / "aa.parquet", {"x": [7], "y": ["new"]})
    grown = open_table(folder, footer_cache=cache)
    assert read == ["aa.parquet"]
    assert grown.index.dumps() == open_table(folder).index.dumps()
    read.clear()
    open_table(folder, footer_cache=cache)
    assert read == []


def test_a_file_of_another_size_or_time_is_read_again(tmp_path: Path, read: list[str]) -> None:
    folder, cache = lake(tmp_path / "lake"), tmp_path / "run"
    open_table(folder, footer_cache=cache)
    read.clear()
    write(folder / "a.parquet", {"x": [1, 2, 3, 4, 5, 6]})
    os.utime(folder / "c.parquet", ns=(5, 5))
    again = open_table(folder, footer_cache=cache)
    assert read == ["a.parquet", "c.parquet"]
    assert again.index.dumps() == open_table(folder).index.dumps()


def test_tables_of_one_run_keep_their_footers_apart(tmp_path: Path, read: list[str]) -> None:
    cache = tmp_path / "run"
    for name, values in (("train", [1, 2]), ("test", [3, 4])):
        write(tmp_path / name / "part-0.parquet", {"x": values})
        os.utime(tmp_path / name / "part-0.parquet", ns=(5, 5))  # as an archive that is unpacked leaves them
    sizes = {(tmp_path / name / "part-0.parquet").stat().st_size for name in ("train", "test")}
    assert len(sizes) == 1
    for _ in range(2):
        for name in ("train", "test"):
            table = open_table(tmp_path / name, footer_cache=cache)
            assert table.index.dumps() == open_table(tmp_path / name).index.dumps()
            table.footer(0)
    assert len(read) == 2 + 4  # with the cache once each, and without it always


def test_the_cache_is_no_more_than_a_cache(tmp_path: Path, read: list[str]) -> None:
    folder, cache = lake(tmp_path / "lake"), tmp_path / "run"
    open_table(folder, footer_cache=cache)
    for path in (cache / "footers").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    read.clear()
    open_table(folder, footer_cache=cache)
    assert len(read) == 3


def test_a_table_has_one_document_however_often_it_grows(tmp_path: Path, read: list[str]) -> None:
    folder, cache = lake(tmp_path / "lake"), tmp_path / "run"
    for number in range(3):
        write(folder / f"new-{number}.parquet", {"x": [number]})
        open_table(folder, footer_cache=cache)
    assert len(list((cache / "footers").iterdir())) == 1
    assert read == ["a.parquet", "b.parquet", "c.parquet", *(f"new-{number}.parquet" for number in range(3))]


def test_a_file_is_the_same_by_its_etag_where_the_store_has_one(tmp_path: Path) -> None:
    summary = footer_cache.summarize_all(
        LocalStorage(lake(tmp_path)), LocalStorage(tmp_path).list()[:1], threads=1, progress=None
    )
    known = ObjectInfo(path="a", size_bytes=9, etag="e", mtime_ns=1)
    saved = {"a": (known, summary[0])}
    assert _is_known(saved, known)
    assert _is_known(saved, ObjectInfo(path="a", size_bytes=9, etag="e", mtime_ns=2))
    for other in (
        ObjectInfo(path="a", size_bytes=9, etag="f", mtime_ns=1),
        ObjectInfo(path="a", size_bytes=9, etag=None, mtime_ns=1),
        ObjectInfo(path="a", size_bytes=8, etag="e", mtime_ns=1),
        ObjectInfo(path="b", size_bytes=9, etag="e", mtime_ns=1),
    ):
        assert not _is_known(saved, other)
    timeless = ObjectInfo(path="a", size_bytes=9)
    assert not _is_known({"a": (timeless, summary[0])}, timeless)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(*_: Any) -> int:
        raise StorageError("read-only")

    monkeypatch.setattr(LocalStorage, "put", put)
    with pytest.warns(RuntimeWarning, match="could not be kept: read-only"):
        table = open_table(lake(tmp_path / "lake"), footer_cache=tmp_path / "run")
    assert table.num_rows == 5
