"""A folder, a glob, a file or a list of files, in any store: the same files, in the same order, or a plain refusal."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lakeckpt.errors import ConfigError, StorageError, TableNotFound
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.lake.table import listing
from lakeckpt.lake.table.listing import Found, Source, find_files
from tests.lake.conftest import S3

Place = tuple[str, Callable[[Source], Found], Callable[[str], None]]


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """The URL of an empty place, how to find files, and how to put one below the place."""
    options: dict[str, Any] | None = None
    if request.param == "local":
        root = str(tmp_path / "lake ü")
    elif request.param == "memory":
        root = f"memory://lake-{uuid.uuid4().hex}/in"
    else:
        bucket: S3 = request.getfixturevalue("s3")
        root, options = f"s3://{bucket.bucket}/lake ü", bucket.options

    def put(path: str) -> None:
        if request.param == "memory":
            fsspec.filesystem("memory").pipe_file(f"{root}/{path}", b"content")
        else:
            open_storage(root, storage_options=options).put(path, [b"content"])

    return root, lambda source: find_files(source, storage_options=options, threads=4), put


def paths(found: Found) -> list[str]:
    return [info.path for info in found.files]


def test_a_folder_is_all_parquet_files_at_any_depth_in_bytewise_order(place: Place) -> None:
    root, find, put = place
    wanted = [
        "b.parquet",
        "a/z.parq",
        "a/b/c.snappy.PARQUET",
        "a-b.pq",
        "ü/日本 x.pqt",
        "Z.parquet",
        "a/_x=1/f.parquet",
    ]
    ignored = [
        "_SUCCESS",
        "_metadata",
        "_tmp/x.parquet",
        ".hidden.parquet",
        "a/.h/x.parquet",
        "x.crc",
        "parquet",
        "x.csv",
    ]
    for path in wanted + ignored:
        put(path)
    assert paths(find(root)) == sorted(wanted, key=lambda path: path.encode())
    assert paths(find(root + "/")) == paths(find(root))
    assert find(root).uri == root
    assert {info.size_bytes for info in find(root).files} == {7}


def test_a_folder_below_is_named_from_itself(place: Place) -> None:
    root, find, put = place
    put("year=2024/a.parquet")
    put("year=2024-old/b.parquet")
    assert paths(find(f"{root}/year=2024")) == ["a.parquet"]


def test_a_single_file_may_have_any_name(place: Place) -> None:
    root, find, put = place
    for name in ("part-0000", "part-00001", "x/_hidden.dat"):
        put(name)
    assert paths(find(f"{root}/part-0000")) == ["part-0000"]
    found = find(f"{root}/x/_hidden.dat")
    assert paths(found) == ["_hidden.dat"]
    assert found.uri == f"{root}/x"


def test_files_of_partitions_are_named_from_above_them_however_they_are_chosen(place: Place) -> None:
    root, find, put = place
    put("t/year=2024/month=1/a.parquet")
    put("t/year=2024/month=2/a.parquet")
    one, two = "year=2024/month=1/a.parquet", "year=2024/month=2/a.parquet"
    assert paths(find(f"{root}/t/{one}")) == [one]
    assert paths(find([f"{root}/t/{two}", f"{root}/t/{one}"])) == [one, two]
    assert paths(find(f"{root}/t/year=2024/month=?/*.parquet")) == [one, two]
    assert find(f"{root}/t/{one}").uri == f"{root}/t"


def test_a_list_is_sorted_and_rooted_where_all_its_files_meet(place: Place) -> None:
    root, find, put = place
    for name in ("t/b/x", "t/a/y", "t/a/x", "other/x"):
        put(name)
    found = find([f"{root}/t/b/x", f"{root}/t/a/y", f"{root}/t/a/x"])
    assert found.uri == f"{root}/t"
    assert paths(found) == ["a/x", "a/y", "b/x"]
    assert paths(find([f"{root}/t/b/x"])) == ["x"]


def test_a_long_list_is_found_too(place: Place) -> None:
    root, find, put = place
    names = [f"t/{n:03d}.parquet" for n in range(70)]
    for name in [*names, "t/other.parquet", "t/deeper/000.parquet"]:
        put(name)
    assert paths(find([f"{root}/{name}" for name in reversed(names)])) == [name[2:] for name in names]


def test_a_list_that_names_a_file_twice_or_none_is_refused(place: Place) -> None:
    root, find, put = place
    put("a.parquet")
    put("folder/b.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet' is listed twice: its rows would count twice"):
        find([f"{root}/a.parquet", f"{root}/folder/b.parquet", f"{root}/a.parquet"])
    with pytest.raises(ConfigError, match="empty list"):
        find([])
    for missing in (f"{root}/folder", f"{root}/nowhere.parquet", f"{root}/*.parquet"):
        with pytest.raises(TableNotFound, match=r"there is no file .*: a list names files"):
            find([f"{root}/a.parquet", missing])


GLOBS = {
    "*": ["[x].parquet", "a.parquet", "ab.parquet", "b.parquet", "data.csv"],
    "*.parquet": ["[x].parquet", "a.parquet", "ab.parquet", "b.parquet"],
    "?.parquet": ["a.parquet", "b.parquet"],
    "[ab].parquet": ["a.parquet", "b.parquet"],
    "[!b]*.parquet": ["[x].parquet", "a.parquet", "ab.parquet"],
    "[^a]*": ["a.parquet", "ab.parquet"],
    "[a-a]*": ["a.parquet", "ab.parquet"],
    "[[]x].parquet": ["[x].parquet"],
    "[!]a]*.parquet": ["[x].parquet", "b.parquet"],
    "[[]x[]].parquet": ["[x].parquet"],
    "[!]": [],
    "*/*.parquet": ["a.parquet"],
    "**/a.parquet": ["a.parquet", "d/a.parquet", "d/e/a.parquet"],
    "d/**/*.parquet": ["a.parquet", "e/a.parquet"],
    "d/**": ["a.parquet", "e/a.parquet"],
    "**/e/*": ["a.parquet"],
}


@pytest.mark.parametrize("pattern", GLOBS)
def test_globs_match_alike_in_every_store(place: Place, pattern: str) -> None:
    root, find, put = place
    for name in ("a.parquet", "b.parquet", "ab.parquet", "[x].parquet", "data.csv", ".hidden.parquet"):
        put(name)
    for name in ("d/a.parquet", "d/e/a.parquet", "d/.h/x.parquet"):
        put(name)
    if GLOBS[pattern]:
        assert paths(find(f"{root}/{pattern}")) == GLOBS[pattern]
    else:
        with pytest.raises(TableNotFound, match="no file matches the glob"):
            find(f"{root}/{pattern}")


def test_a_set_of_characters_that_is_none_matches_nothing(place: Place) -> None:
    root, find, put = place
    put("a.parquet")
    with pytest.raises(TableNotFound, match="no file matches the glob"):
        find(f"{root}/[z-a]*")


def test_a_glob_that_matches_nothing_is_refused(place: Place) -> None:
    root, find, put = place
    put("a.csv")
    with pytest.raises(TableNotFound, match=r"no file matches the glob '.*/\*\.parquet'"):
        find(f"{root}/*.parquet")


def test_where_nothing_is_the_refusal_says_what_was_looked_for(place: Place) -> None:
    root, find, put = place
    with pytest.raises(
        TableNotFound, match=r"nothing is there \(looked for files named \*\.parquet, .*Check the path"
    ) as caught:
        find(root)
    assert isinstance(caught.value, FileNotFoundError)
    put("a.csv")
    put("_tmp/x.parquet")
    with pytest.raises(TableNotFound, match=r"found 2 other files \('_tmp/x.parquet', 'a.csv'\).*glob or a list"):
        find(root)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "delta"),
        (".hoodie/hoodie.properties", "hudi"),
        ("metadata/v1.metadata.json", "iceberg"),
        ("metadata/v1.metadata.json.gz", "iceberg"),
    ],
)
def test_a_folder_whose_files_are_not_its_rows_is_told_by_its_format(place: Place, path: str, kind: str) -> None:
    root, find, put = place
    put("part-0.parquet")
    put(path)
    found = find(root)
    assert (found.format, found.place) == (kind, root) and sorted(paths(found)) == sorted([path, "part-0.parquet"])
    assert (listed := find([f"{root}/part-0.parquet"])).format == "parquet" and paths(listed) == ["part-0.parquet"]


@pytest.mark.parametrize(
    "path",
    [
        "_delta_log/0.json",
        ".hoodie/hoodie.properties",
        "metadata/v1.metadata.json",
        "metadata/00001-a.metadata.json.gz",
    ],
)
def test_a_table_in_a_folder_of_files_is_not_taken_for_more_files(place: Place, path: str) -> None:
    root, find, put = place
    put("other.parquet")
    put("of/events/part-0.parquet")
    put(f"of/events/{path}")
    with pytest.raises(ConfigError, match=r"the folder 'of/events' in .* is a table of its own"):
        find(root)
    assert paths(find(f"{root}/**/*.parquet")) == ["of/events/part-0.parquet", "other.parquet"]


@pytest.mark.parametrize(
    "path",
    [
        "_trash/t/_delta_log/0.json",
        ".Trash/t/_delta_log/0.json",
        "t/_delta_log/0.json",
        "t/metadata/2024-run.metadata.json",
    ],
)
def test_a_log_of_which_no_file_would_be_read_is_no_table_in_the_folder(place: Place, path: str) -> None:
    root, find, put = place
    put("a.parquet")
    put(path)
    if path.startswith((".", "_")):
        put(f"{path.partition('/')[0]}/t/part-0.parquet")
    assert paths(find(root)) == ["a.parquet"]


def test_who_may_not_look_above_a_partition_reads_it_all_the_same(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, find, put = place
    put("day=1/a.parquet")
    opened = listing.open_root

    class Scoped:
        """Lists nothing above the partition."""

        def __init__(self, storage: Any) -> None:
            self.storage = storage

        def list(self, prefix: str = "") -> Any:
            if prefix in ("_delta_log", ".hoodie"):
                raise StorageError("AccessDenied")
            return self.storage.list(prefix)

    def scoped(text: str, options: Any) -> Any:
        storage = opened(text, options)
        return Scoped(storage) if text == root else storage

    monkeypatch.setattr(listing, "open_root", scoped)
    assert paths(find(f"{root}/day=1")) == ["a.parquet"]


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("_delta_log/0.json", "day=1"),
        ("_delta_log/0.json", "day=1/hour=2"),
        (".hoodie/hoodie.properties", "day=1"),
        ("metadata/v1.metadata.json", "data/day=1"),
    ],
)
def test_a_partition_of_a_table_is_not_taken_for_a_table(place: Place, path: str, folder: str) -> None:
    root, find, put = place
    put("day=1/hour=2/x.parquet")
    assert paths(find(f"{root}/day=1")) == ["hour=2/x.parquet"]
    put(f"{folder}/part-0.parquet")
    put(path)
    with pytest.raises(ConfigError, match="is a folder of the table"):
        find(f"{root}/{folder}")
    assert paths(find([f"{root}/{folder}/part-0.parquet"]))


def test_a_folder_in_two_formats_asks_which(tmp_path: Path) -> None:
    for path in ("_delta_log/0.json", "metadata/v1.metadata.json"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).touch()
    with pytest.raises(ConfigError, match=r"more than one format.*say which by format='delta'"):
        find_files(tmp_path, storage_options=None, threads=1)
    for kind in ("delta", "iceberg"):
        assert find_files(tmp_path, storage_options=None, threads=1, kind=kind).format == kind  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="format='hudi' was given"):
        find_files(tmp_path, storage_options=None, threads=1, kind="hudi")


def test_a_folder_whose_name_looks_like_a_glob_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data[1]").mkdir()
    (tmp_path / "data[1]" / "a.parquet").write_bytes(b"1")
    assert paths(find_files(tmp_path / "data[1]", storage_options=None, threads=1)) == ["a.parquet"]


def test_relative_paths_and_detours_and_the_home_folder_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.parquet").write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    sources = ["t", "./t/", "t/../t", "~/t", "t/a.parquet", "t/*.parquet", ["t/a.parquet"], [Path("t/a.parquet")]]
    for source in [*sources, Path("t"), f"file://{tmp_path}/t", f"file://{tmp_path}/t/*.parquet"]:
        found = find_files(source, storage_options=None, threads=1)
        assert paths(found) == ["a.parquet"]
        assert open_storage(found.uri).read("a.parquet") == b"1"


def test_a_bucket_can_be_the_table(s3: S3) -> None:
    open_storage(f"s3://{s3.bucket}", storage_options=s3.options).put("a/x.parquet", [b"1"])
    for source in (f"s3://{s3.bucket}", f"s3://{s3.bucket}/", f"s3://{s3.bucket}/*/x.parquet"):
        assert find_files(source, storage_options=s3.options, threads=1).files[0].size_bytes == 1


def test_a_bucket_that_does_not_exist_is_told_from_a_folder_without_files(s3: S3) -> None:
    for place in (f"s3://no-{s3.bucket}", f"s3://no-{s3.bucket}/t"):
        with pytest.raises(TableNotFound, match=r"its bucket does not exist\. Check its name"):
            find_files(place, storage_options=s3.options, threads=1)
    for place in (f"s3://{s3.bucket}", f"s3://{s3.bucket}/t"):
        with pytest.raises(TableNotFound, match="nothing is there"):
            find_files(place, storage_options=s3.options, threads=1)
    with pytest.raises(StorageError) as caught:
        open_storage(f"s3://no-{s3.bucket}/run", storage_options=s3.options).put_new("log/0", b"1")
    assert str(caught.value).startswith(f"cannot write s3://no-{s3.bucket}/run: its bucket is not there")


def test_files_of_two_stores_or_buckets_are_no_table(s3: S3, tmp_path: Path) -> None:
    for files, why in (
        ([f"s3://{s3.bucket}/a", str(tmp_path / "a")], "one store, not in file, s3"),
        ([f"s3://{s3.bucket}/a", "s3://another/a"], "one bucket"),
    ):
        with pytest.raises(ConfigError, match=why):
            find_files(files, storage_options=s3.options, threads=1)


def test_what_is_no_path_is_refused() -> None:
    for source in (None, 7, b"x", "", [""], [7], {"a": 1}):
        with pytest.raises((ConfigError, TypeError)):
            find_files(source, storage_options=None, threads=1)  # type: ignore[arg-type]


def test_names_that_no_index_can_hold_are_refused_not_skipped(tmp_path: Path) -> None:
    for name in (b"a\\b.parquet", b"a\xff.parquet"):
        path = os.path.join(os.fsencode(tmp_path), name)
        with open(path, "wb"):
            pass
        with pytest.raises(StorageError, match="rename the file"):
            find_files(tmp_path, storage_options=None, threads=1)
        os.unlink(path)


def test_a_linked_folder_in_a_table_is_refused_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.parquet").write_bytes(b"1")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.parquet").write_bytes(b"1")
    (tmp_path / "t" / "linked.parquet").symlink_to(tmp_path / "other" / "b.parquet")
    assert paths(find_files(tmp_path / "t", storage_options=None, threads=1)) == ["a.parquet", "linked.parquet"]
    (tmp_path / "t" / "more").symlink_to(tmp_path / "other")
    with pytest.raises(StorageError, match=r"'more' in .* is a symbolic link"):
        find_files(tmp_path / "t", storage_options=None, threads=1)
