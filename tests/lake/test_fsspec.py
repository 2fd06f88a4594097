"""Tables are read through any filesystem of fsspec, and nothing is written through it."""

from __future__ import annotations

import io
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from lakeckpt import LakeDataset, LakeLoader, open_table
from lakeckpt.errors import (
    ConditionalPutUnsupported,
    ConfigError,
    DataFileChanged,
    ObjectChanged,
    ObjectMissing,
    StorageError,
    TableNotFound,
)
from lakeckpt.lake.storage.fsspec import FsspecStorage
from lakeckpt.lake.storage.open import open_storage
from tests.lake.conftest import S3

ROWS = 64


def parquet(rows: int = ROWS) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"x": np.arange(rows)}), buffer, row_group_size=8)
    return buffer.getvalue()


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    filesystem = MemoryFileSystem()
    yield filesystem
    filesystem.store.clear()


@pytest.fixture
def on_s3(s3: S3) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(**s3.options)


def paths(storage: FsspecStorage) -> list[str]:
    return [info.path for info in storage.list()]


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_table_is_read_through_a_filesystem(request: pytest.FixtureRequest, s3: S3, kind: str) -> None:
    filesystem: Any = request.getfixturevalue("memory" if kind == "memory" else "on_s3")
    filesystem.pipe_file(f"{s3.bucket}/lake/part=1/a.parquet", parquet())
    table = open_table(f"{kind}://{s3.bucket}/lake", filesystem=filesystem)
    assert table.num_rows == ROWS and table.schema.names == ["x", "part"]
    batches = LakeLoader(LakeDataset(table, batch_size=10, shuffle=True))
    assert sorted(x for batch in batches for x in batch["x"].tolist()) == list(range(ROWS))
    with pytest.raises(TableNotFound):
        open_table(f"{s3.bucket}/nothing", filesystem=filesystem)
    filesystem.pipe_file(f"{s3.bucket}/lake/part=1/a.parquet", parquet(ROWS + 1))
    with pytest.raises(DataFileChanged):
        table.verify()


def test_a_table_is_opened_by_a_url_that_only_fsspec_knows(memory: MemoryFileSystem) -> None:
    memory.pipe_file("/lake/a.parquet", parquet())
    assert open_table("memory://lake").num_rows == ROWS


def test_what_cannot_be_opened_through_a_filesystem_is_refused(memory: MemoryFileSystem) -> None:
    memory.pipe_file("/lake/_delta_log/00000000000000000000.json", b"{}")
    with pytest.raises(ConfigError, match="deltalake and hudi open tables by themselves"):
        open_table("memory://lake", filesystem=memory)
    with pytest.raises(ConfigError, match="exclude each other"):
        open_table("memory://lake", filesystem=memory, storage_options={"key": "k"})
    with pytest.raises(ConfigError, match="is a filesystem of fsspec, not str"):
        open_table("memory://lake", filesystem="memory")
    with pytest.raises(ConfigError, match=r"runs lie on .* or in object stores"):
        open_storage("memory://run")
    with pytest.raises(ConfigError, match="through fsspec"):
        open_table("nosuch://user:secret@host/lake")


def test_ranges_and_etags_are_those_of_the_store(s3: S3, on_s3: s3fs.S3FileSystem) -> None:
    s3.client.put_object(Bucket=s3.bucket, Key="lake/a", Body=b"0123456789")
    storage = FsspecStorage(on_s3, f"s3://{s3.bucket}/lake")
    (info,) = storage.list("a")
    assert storage.read("a", 2, 5, etag=info.etag) == b"234" and storage.read("a", 8, 20) == b"89"
    assert storage.read("a", 10, 20) == b"" == storage.read("a", 3, 3)
    (own,) = open_storage(f"s3://{s3.bucket}/lake", storage_options=s3.options).list()
    assert (own.path, own.size_bytes, own.etag) == (info.path, info.size_bytes, info.etag)
    s3.client.put_object(Bucket=s3.bucket, Key="lake/a", Body=b"abcdefghij")
    with pytest.raises(ObjectChanged, match="written again"):
        storage.read("a", 2, 5, etag=info.etag)
    with pytest.raises(ObjectMissing):
        storage.read("b")
    assert pickle.loads(pickle.dumps(storage)).read("a", 0, 3) == b"abc"


def test_a_forked_process_has_a_filesystem_of_its_own(s3: S3, on_s3: s3fs.S3FileSystem) -> None:
    s3.client.put_object(Bucket=s3.bucket, Key="lake/a", Body=b"0123456789")
    storage = FsspecStorage(on_s3, f"{s3.bucket}/lake")
    assert storage.read("a", 2, 5) == b"234"
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_reads, args=(storage,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and storage.read("a", 2, 5) == b"234"


def _reads(storage: FsspecStorage) -> None:
    assert storage.read("a", 2, 5) == b"234"


def test_nothing_is_written(memory: MemoryFileSystem) -> None:
    storage = FsspecStorage(memory, "/lake")
    with pytest.raises(StorageError, match="tables are only read"):
        storage.put("a", [b"1"])
    with pytest.raises(ConditionalPutUnsupported):
        storage.put_new("a", b"1")
    with pytest.raises(StorageError, match="tables are only read"):
        storage.delete("a")


class Odd(MemoryFileSystem):
    """Lists as most filesystems do, by its own ``find``; remembers listings; says sizes of single files alone."""

    protocol = "odd"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    find = AbstractFileSystem.find
    fails: ClassVar[dict[str, OSError]] = {}
    seen: ClassVar[dict[str, Any]] = {}

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if (failure := self.fails.get(path.rstrip("/").rpartition("/")[2])) is not None:
            raise failure
        if path not in self.seen:
            self.seen[path] = [{**one, "size": None} for one in super().ls(path, detail=True, **options)]
        return self.seen[path]

    def info(self, path: str, **options: Any) -> Any:
        found = super().info(path, **options)
        return {**found, "size": None} if path.endswith("endless") else found

    def invalidate_cache(self, path: str | None = None) -> None:
        self.seen.clear()


@pytest.fixture
def odd() -> Iterator[FsspecStorage]:
    filesystem = Odd()
    for path in ("a/x", "a/deep/y", "z"):
        filesystem.pipe_file(f"/run/{path}", b"123")
    filesystem.seen.clear()
    yield FsspecStorage(filesystem, "/run")
    filesystem.store.clear()


@pytest.mark.parametrize("folder", ["run", "a", "deep"])
@pytest.mark.parametrize("failure", [ConnectionResetError("reset"), PermissionError("no"), TimeoutError("late")])
def test_a_folder_that_cannot_be_listed_is_not_skipped(
    odd: FsspecStorage, monkeypatch: pytest.MonkeyPatch, folder: str, failure: OSError
) -> None:
    """fsspec skips it: of a table files would be missing then."""
    assert paths(odd) == ["a/deep/y", "a/x", "z"] and [one.path for one in odd.list("a/x")] == ["a/x"]
    monkeypatch.setitem(Odd.fails, folder, failure)
    with pytest.raises(StorageError):
        odd.list()
    monkeypatch.setitem(Odd.fails, folder, FileNotFoundError(folder))  # deleted since its parent was listed
    assert paths(odd) == {"run": [], "a": ["z"], "deep": ["a/x", "z"]}[folder]


def test_listings_are_never_from_a_cache_and_have_sizes(odd: FsspecStorage) -> None:
    assert {info.size_bytes for info in odd.list()} == {3}
    odd._filesystem.rm_file("/run/z")
    assert paths(odd) == ["a/deep/y", "a/x"]
    odd._filesystem.pipe_file("/run/endless", b"123")
    with pytest.raises(StorageError, match=r"does not know how large .*endless"):
        odd.list()


def test_errors_hold_no_text_of_the_filesystem(odd: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Odd.fails, "a", OSError("key=canary-5ecr3t"))
    with pytest.raises(StorageError, match="OSError") as caught:
        odd.list()
    assert "canary" not in str(caught.value)


def test_a_local_filesystem_reads_a_local_folder(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet())
    import fsspec

    assert open_table(str(tmp_path), filesystem=fsspec.filesystem("file")).num_rows == ROWS
