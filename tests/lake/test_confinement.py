"""No key, link or odd file in a local folder makes a storage touch anything outside of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lakeckpt.errors import ConfigError, ObjectMissing, StorageError
from lakeckpt.lake.storage.base import clear_leftovers, split_uri
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.storage.open import open_storage


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(b"secret")
    (folder / ".lakeckpt-0.tmp").write_bytes(b"not ours")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_linked_folder_is_refused_by_every_method(root: Path, outside: Path, follow: bool, inside: bool) -> None:
    target = outside
    if inside:
        target = root / "real"
        target.mkdir()
    (root / "link").symlink_to(target)
    storage = LocalStorage(root, follow_file_links=follow)
    for call in (
        lambda: storage.list(),
        lambda: storage.list("link"),
        lambda: storage.list("link/a"),
        lambda: storage.read("link/secret"),
        lambda: storage.put("link/new", [b"1"]),
        lambda: storage.put("link/a/new", [b"1"]),
        lambda: storage.put_new("link/new", b"1"),
        lambda: storage.delete("link/secret"),
        lambda: storage.local_path("link/secret"),
    ):
        with pytest.raises(
            StorageError, match=r"'link(/secret|/a)?' in .* is a symbolic link or lies behind one, which could lead out"
        ):
            call()
    assert sorted(os.listdir(outside)) == [".lakeckpt-0.tmp", "secret"]


def test_a_linked_file_is_neither_read_nor_written_through(root: Path, outside: Path) -> None:
    (root / "x").symlink_to(outside / "secret")
    storage = LocalStorage(root)
    for call in (storage.list, lambda: storage.read("x"), lambda: storage.put_new("x", b"1")):
        with pytest.raises(StorageError, match="symbolic link"):
            call()
    storage.put("x", [b"new"])  # replaces the link itself
    assert (outside / "secret").read_bytes() == b"secret"
    assert storage.read("x") == b"new"


def test_deleting_a_link_removes_the_link(root: Path, outside: Path) -> None:
    (root / "x").symlink_to(outside / "secret")
    LocalStorage(root).delete("x")
    assert os.listdir(root) == []
    assert (outside / "secret").exists()


def test_a_table_may_consist_of_linked_files(root: Path, outside: Path) -> None:
    (root / "x").symlink_to(outside / "secret")
    storage = LocalStorage(root, follow_file_links=True)
    (info,) = storage.list()
    assert (info.path, info.size_bytes) == ("x", 6)
    assert storage.read("x") == b"secret"


def test_a_link_to_nothing_is_named(root: Path) -> None:
    (root / "x").symlink_to("nowhere")
    with pytest.raises(StorageError, match=r"'x' in .* symbolic link to nothing"):
        LocalStorage(root, follow_file_links=True).list()


def test_clearing_leftovers_does_not_follow_links(root: Path, outside: Path) -> None:
    (root / "link").symlink_to(outside)
    (root / ".lakeckpt-1.tmp").symlink_to(outside / ".lakeckpt-0.tmp")
    assert clear_leftovers(LocalStorage(root)) == 0
    assert sorted(os.listdir(outside)) == [".lakeckpt-0.tmp", "secret"]


def test_pipes_and_folders_are_no_objects(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "folder").mkdir()
    storage = LocalStorage(root)
    assert storage.list() == []
    for name in ("pipe", "folder"):
        with pytest.raises(ObjectMissing):
            storage.read(name)


def test_the_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    LocalStorage(tmp_path / "alias").put("x", [b"1"])
    assert (root / "x").read_bytes() == b"1"


def test_a_folder_swapped_for_a_link_while_in_use_leads_nowhere(root: Path, outside: Path) -> None:
    storage = LocalStorage(root)
    storage.put("a/x", [b"1"])
    (root / "a" / "x").unlink()
    (root / "a").rmdir()
    (root / "a").symlink_to(outside)
    with pytest.raises(StorageError, match="symbolic link"):
        storage.put("a/x", [b"2"])
    assert not (outside / "x").exists()


def test_urls_that_are_not_places_are_refused() -> None:
    for uri, why in (
        ("", "needs a path or a URL"),
        ("file://host/x", "names a host"),
        ("simplecache::s3://bucket/x", "chained"),
        ("nosuchscheme://x/y", "nosuchscheme"),
    ):
        with pytest.raises(ConfigError, match=why):
            open_storage(uri).list()
    with pytest.raises(ConfigError, match="local folder"):
        open_storage("/tmp/x", storage_options={"key": "1"})
    with pytest.raises(ConfigError, match="needs a path or a URL"):
        open_storage(b"/tmp/x")  # type: ignore[arg-type]
    assert split_uri("/a::b") == ("file", "/a::b")
