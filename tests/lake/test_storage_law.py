"""What every `Storage` keeps, whichever store is below."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from lakeckpt.errors import ObjectExists, StorageError
from lakeckpt.lake.fsspec_storage import FsspecStorage
from lakeckpt.lake.storage import ObjectInfo, check_key, describe, open_storage
from lakeckpt.testing.storage_law import StorageLaw


def paths(infos: list[ObjectInfo]) -> list[str]:
    return [info.path for info in infos]


class TestStorageLaw(StorageLaw):
    """Every kind of store that the fixture ``make_storage`` of this folder makes."""


class StaleListings(MemoryFileSystem):
    """Remembers each listing, whatever it is told; forgets when its cache is invalidated."""

    protocol = "stalelistings"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    seen: ClassVar[dict[str, Any]] = {}

    def find(self, path: str, **kwargs: Any) -> Any:
        return self.seen.setdefault(path, super().find(path, **kwargs))

    def invalidate_cache(self, path: str | None = None) -> None:
        self.seen.clear()


class StubbornListings(StaleListings):
    """Remembers each listing, unless it was made without a cache."""

    protocol = "stubbornlistings"
    cachable = False

    def __init__(self, use_listings_cache: bool = True) -> None:
        super().__init__()
        self.remembers = use_listings_cache

    def find(self, path: str, **kwargs: Any) -> Any:
        if not self.remembers:
            self.seen.clear()
        return super().find(path, **kwargs)

    def invalidate_cache(self, path: str | None = None) -> None:
        pass


@pytest.mark.parametrize("kind", [StaleListings, StubbornListings])
def test_a_filesystem_that_caches_listings_is_kept_from_it(kind: type[StaleListings]) -> None:
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
    storage = FsspecStorage(f"{kind.protocol}://run")
    filesystem, root = storage._open()
    assert isinstance(filesystem, kind)
    assert storage.list() == []
    filesystem.pipe_file(f"{root}/x", b"1")
    assert paths(storage.list()) == ["x"]
    filesystem.rm_file(f"{root}/x")
    assert storage.list() == []


class Flaky(MemoryFileSystem):
    """Lists as most filesystems of fsspec do, by its own ``find``; a folder cannot be listed, for a reason."""

    protocol = "flaky"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    find = AbstractFileSystem.find
    fails: ClassVar[dict[str, OSError]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace(f"{cls.protocol}://", "memory://"))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if (failure := self.fails.get(path.rstrip("/").rpartition("/")[2])) is not None:
            raise failure
        return super().ls(path, detail=detail, **options)


@pytest.mark.parametrize("folder", ["run", "a", "deep"])
@pytest.mark.parametrize("failure", [ConnectionResetError("reset"), PermissionError("no"), TimeoutError("late")])
def test_a_folder_that_cannot_be_listed_is_not_left_out(
    monkeypatch: pytest.MonkeyPatch, folder: str, failure: OSError
) -> None:
    """fsspec leaves it out: of a table files are missing then, and of a log all of it."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    storage = open_storage("flaky://lake/run")
    assert storage.list() == [] and storage.list("a/x") == []
    for path in ("a/x", "a/deep/y", "z"):
        storage.put(path, [b"1"])
    assert [info.path for info in storage.list()] == ["a/deep/y", "a/x", "z"]
    assert [info.path for info in storage.list("a/x")] == ["a/x"]
    monkeypatch.setitem(Flaky.fails, folder, failure)
    with pytest.raises(StorageError, match=type(failure).__name__):
        storage.list()
    monkeypatch.setitem(Flaky.fails, folder, FileNotFoundError(folder))  # since its parent was listed
    assert [info.path for info in storage.list()] == {"run": [], "a": ["z"], "deep": ["a/x", "z"]}[folder]
    Flaky.store.clear()


class OfFoldersAlone(Flaky):
    """Cannot list a file, as fsspec's SFTP."""

    protocol = "folders"

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if self.isfile(path):
            raise NotADirectoryError(path)
        return super().ls(path, detail=detail, **options)


def test_one_file_is_found_where_only_folders_can_be_listed() -> None:
    fsspec.register_implementation("folders", OfFoldersAlone, clobber=True)
    storage = open_storage("folders://lake/run")
    storage.put("a/x", [b"123"])
    assert [info.path for info in storage.list("a/x")] == ["a/x"] and storage.list("a/y") == []
    Flaky.store.clear()


class Unsized(Flaky):
    """Tells sizes of files one by one, as web servers do; of one of them not at all."""

    protocol = "unsized"

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return [{**one, "size": None} for one in super().ls(path, detail=True, **options)]

    def info(self, path: str, **options: Any) -> Any:
        found = super().info(path, **options)
        return {**found, "size": None} if path.endswith("endless") else found


def test_sizes_are_asked_for_where_a_listing_has_none() -> None:
    fsspec.register_implementation("unsized", Unsized, clobber=True)
    storage = open_storage("unsized://lake/run")
    storage.put("a/x", [b"123"])
    assert [(info.path, info.size_bytes) for info in storage.list()] == [("a/x", 3)]
    storage.put("a/endless", [b"123"])
    with pytest.raises(StorageError, match=r"does not say how large .*endless"):
        storage.list()
    Flaky.store.clear()


def test_check_key_takes_only_str() -> None:
    with pytest.raises(StorageError, match="must be a str, not bytes"):
        check_key(b"x")  # type: ignore[arg-type]


def test_a_file_url_is_a_local_folder(tmp_path: object) -> None:
    storage = open_storage(f"file://{tmp_path}/with%20space")
    storage.put("x", [b"1"])
    assert describe(storage) == f"{tmp_path}/with space"
    assert open_storage(f"{tmp_path}/with space").read("x") == b"1"


def test_conditional_puts_into_memory_do_not_interleave(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[str] = []

    def put(data: bytes) -> None:
        try:
            open_storage("memory://interleaved/run").put_new("x", data)
            outcomes.append(f"{data.decode()} won")
        except ObjectExists:
            outcomes.append(f"{data.decode()} lost")

    second = threading.Thread(target=put, args=(b"second",))
    exists = MemoryFileSystem.exists

    def exists_while_another_comes(self: MemoryFileSystem, path: str, **kwargs: Any) -> bool:
        answer = exists(self, path, **kwargs)
        if threading.current_thread() is not second and not second.ident:
            second.start()
            second.join(timeout=0.2)  # it must wait for us; were it not to, it would be done by now
        return bool(answer)

    monkeypatch.setattr(MemoryFileSystem, "exists", exists_while_another_comes)
    put(b"first")
    second.join()
    assert outcomes == ["first won", "second lost"]
