"""Keys with ``//`` in an object store: each names one object, never the one that a single slash would name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from lakeckpt import open_table
from lakeckpt.errors import ConfigError, StorageError
from lakeckpt.lake.formats.iceberg.io import plain_location
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.table.listing import Source, common_root, find_files, paths_below
from tests.lake.conftest import S3

EMPTY = r"has an empty folder name \('//'\)"


@pytest.fixture
def sizes(s3: S3) -> S3:
    """Objects that are told apart by their sizes."""
    for size, key in enumerate(("x/y/a.parquet", "x//y/a.parquet", "w//y/b.parquet", "/y/a.parquet", "y/a.parquet"), 1):
        s3.client.put_object(Bucket=s3.bucket, Key=key, Body=b"1" * size)
    return s3


def found(s3: S3, *names: str) -> list[tuple[str, int]]:
    urls: Source = [f"s3://{s3.bucket}{name}" for name in names]
    files = find_files(urls[0] if len(urls) == 1 else urls, storage_options=s3.options, threads=1).files
    return [(info.path, info.size_bytes) for info in files]


@pytest.mark.parametrize(
    "names",
    [
        ("/x//y/a.parquet", "/x/y/a.parquet"),
        ("/x/y/a.parquet", "/x//y/a.parquet"),
        ("/x//y/a.parquet", "/x/z/b.parquet"),
        ("/x//y/a.parquet", "/x//z/b.parquet"),
        ("//y/a.parquet", "/y/a.parquet"),
        ("/x/y//a.parquet", "/x/y//b.parquet"),
        ("/x/y//*.parquet",),
        ("/x//*/a.parquet",),
    ],
)
def test_files_that_no_storage_can_name_are_refused_not_taken_for_others(sizes: S3, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=EMPTY):
        found(sizes, *names)


@pytest.mark.parametrize("name", ["/x//y", "/x//y/a.parquet", "//y"])
def test_a_place_with_an_empty_name_in_its_path_is_refused(sizes: S3, name: str) -> None:
    with pytest.raises(ConfigError, match=r"empty folder name .* filesystem="):
        found(sizes, name)
    assert found(sizes, "/x/y/a.parquet") == [("a.parquet", 1)] and found(sizes, "/y") == [("a.parquet", 5)]


def test_a_folder_that_holds_such_an_object_says_which_and_what_to_do(sizes: S3) -> None:
    with pytest.raises(StorageError, match=r"x//y/a\.parquet.*Move that object, or open a table through filesystem="):
        found(sizes, "/x")


def test_rows_of_such_a_folder_are_read_through_a_filesystem(s3: S3, tmp_path: Path) -> None:
    for key, ids in (("t//y/a.parquet", [1, 2]), ("t/y/a.parquet", [3])):
        pq.write_table(pa.table({"id": ids}), tmp_path / "a.parquet")
        s3.client.put_object(Bucket=s3.bucket, Key=key, Body=(tmp_path / "a.parquet").read_bytes())
    assert open_table(f"s3://{s3.bucket}/t//y", filesystem=s3fs.S3FileSystem(**s3.options)).num_rows == 2


def test_one_object_by_two_spellings_of_its_url_is_listed_twice(sizes: S3) -> None:
    urls = [f"{scheme}://{sizes.bucket}/x/y/a.parquet" for scheme in ("s3", "S3")]
    with pytest.raises(ConfigError, match="listed twice"):
        find_files(urls, storage_options=sizes.options, threads=1)


def test_paths_lie_below_their_common_root_by_one_separator() -> None:
    for urls, wanted in (
        (["s3://b/t//data/x", "s3://b/t//data/p=1/y"], ["x", "p=1/y"]),
        (["s3://b/x"], ["x"]),
        (["/x", "/y/z"], ["x", "y/z"]),
    ):
        assert paths_below(common_root(urls), urls) == wanted
    for urls in (["s3://b//x"], ["s3://b/t//x", "s3://b/t/data//y"], ["s3://b/t//p=1/x"]):
        with pytest.raises(ConfigError, match=EMPTY):
            paths_below(common_root(urls), urls)


def test_in_a_local_folder_slashes_are_one(tmp_path: Path) -> None:
    LocalStorage(tmp_path).put("t/a.parquet", [b"1"])
    found = find_files([f"{tmp_path}//t//a.parquet"], storage_options=None, threads=1)
    assert [info.path for info in found.files] == ["a.parquet"]
    assert plain_location(f"file:{tmp_path}//t//a") == plain_location(f"{tmp_path}//t/a") == f"{tmp_path}/t/a"
    assert plain_location("s3a://lake/t//a") == "s3://lake/t//a"
