"""What every `Storage` keeps, whichever store is below."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

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
