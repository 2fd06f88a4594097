"""What only an object store does: lost answers, ignored conditions, multipart uploads, credentials."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.s3.models import s3_backends

from lakeckpt.errors import ConditionalPutUnsupported, ObjectExists, StorageError
from lakeckpt.lake.fsspec_storage import FsspecStorage
from lakeckpt.lake.storage import describe
from tests.lake.conftest import CANARY, S3


@pytest.fixture
def storage(s3: S3) -> FsspecStorage:
    return FsspecStorage(f"s3://{s3.bucket}/run", storage_options=s3.options)


@pytest.fixture
def requests(storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The S3 requests that the storage's filesystem makes."""
    filesystem, _ = storage._open()
    made: list[tuple[str, dict[str, Any]]] = []
    inner = filesystem._call_s3

    async def recorded(method: str, *args: Any, **kwargs: Any) -> Any:
        made.append((method, kwargs))
        return await inner(method, *args, **kwargs)

    inner_of_files = filesystem.call_s3

    def recorded_of_files(method: str, *args: Any, **kwargs: Any) -> Any:
        made.append((method, kwargs))
        return inner_of_files(method, *args, **kwargs)

    monkeypatch.setattr(filesystem, "_call_s3", recorded)
    monkeypatch.setattr(filesystem, "call_s3", recorded_of_files)
    return made


def answering(storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Let ``change(really_put, path, data)`` stand for the filesystem's own conditional put."""
    filesystem, _ = storage._open()
    inner = filesystem.pipe_file

    def pipe_file(path: str, data: bytes, mode: str = "overwrite") -> Any:
        return change(inner, path, data) if mode == "create" else inner(path, data)

    monkeypatch.setattr(filesystem, "pipe_file", pipe_file)


def test_a_conditional_put_sends_if_none_match(
    storage: FsspecStorage, requests: list[tuple[str, dict[str, Any]]]
) -> None:
    storage.put_new("log/0", b"1")
    puts = [kwargs for method, kwargs in requests if method == "put_object"]
    assert [(kwargs["Key"].rpartition("/")[2], kwargs.get("IfNoneMatch")) for kwargs in puts][-1] == ("0", "*")
    assert all(kwargs.get("IfNoneMatch") == "*" for kwargs in puts)


def test_the_store_is_asked_once_whether_it_honours_the_condition(
    storage: FsspecStorage, requests: list[tuple[str, dict[str, Any]]], s3: S3
) -> None:
    for n in range(3):
        storage.put_new(f"log/{n}", b"1")
    assert sum(method == "put_object" for method, _ in requests) == 3 + 2
    assert s3.keys() == ["run/log/0", "run/log/1", "run/log/2"]


def test_a_store_that_ignores_the_condition_is_refused_before_anything_is_committed(
    storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch, s3: S3
) -> None:
    answering(storage, monkeypatch, lambda put, path, data: put(path, data))
    with pytest.raises(ConditionalPutUnsupported, match=r"replaced an object .* keep the run on"):
        storage.put_new("log/0", b"1")
    assert s3.keys() == []


def test_a_store_that_does_not_know_the_condition_is_refused(
    storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(put: Any, path: str, data: bytes) -> None:
        raise OSError("An error occurred (NotImplemented) when calling the PutObject operation")

    answering(storage, monkeypatch, refuse)
    with pytest.raises(ConditionalPutUnsupported, match="does not implement"):
        storage.put_new("log/0", b"1")


def test_a_put_whose_answer_was_lost_is_found_to_have_won(
    storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put_new("warm", b"1")
    puts: list[str] = []

    def lose(put: Any, path: str, data: bytes) -> None:
        puts.append(path)
        put(path, data, mode="create")
        raise TimeoutError("no answer")

    answering(storage, monkeypatch, lose)
    storage.put_new("log/0", b"mine")
    assert len(puts) == 1
    assert storage.read("log/0") == b"mine"


def test_a_client_that_repeats_its_own_successful_put_has_won(
    storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put_new("warm", b"1")

    def repeat(put: Any, path: str, data: bytes) -> None:
        put(path, data, mode="create")
        put(path, data, mode="create")  # FileExistsError, as after a timeout inside the client

    answering(storage, monkeypatch, repeat)
    storage.put_new("log/0", b"mine")


def test_a_put_whose_answer_was_lost_to_another_writer_has_lost(
    storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put_new("warm", b"1")

    def lose(put: Any, path: str, data: bytes) -> None:
        put(path, b"theirs", mode="create")
        raise TimeoutError("no answer")

    answering(storage, monkeypatch, lose)
    with pytest.raises(ObjectExists):
        storage.put_new("log/0", b"mine")


def test_a_put_that_never_arrived_is_tried_again_and_then_reported(
    storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put_new("warm", b"1")
    failures = [TimeoutError("no answer"), TimeoutError("no answer")]

    def fail_twice(put: Any, path: str, data: bytes) -> None:
        if failures:
            raise failures.pop()
        put(path, data, mode="create")

    answering(storage, monkeypatch, fail_twice)
    storage.put_new("log/0", b"mine")
    assert storage.read("log/0") == b"mine"
    failures.extend(TimeoutError("no answer") for _ in range(9))
    with pytest.raises(StorageError, match=r"cannot write 'log/1' in .*TimeoutError: no answer"):
        storage.put_new("log/1", b"mine")
    assert len(failures) == 6
    assert [info.path for info in storage.list("log")] == ["log/0"]


def test_a_large_put_is_a_multipart_upload_that_a_failure_aborts(
    storage: FsspecStorage, requests: list[tuple[str, dict[str, Any]]], s3: S3
) -> None:
    def chunks(fail: bool) -> Iterator[bytes]:
        for _ in range(8):
            yield b"x" * (8 << 20)
        if fail:
            raise KeyError("stop")

    with pytest.raises(KeyError):
        storage.put("x", chunks(fail=True))
    methods = [method for method, _ in requests]
    assert "create_multipart_upload" in methods
    assert "abort_multipart_upload" in methods
    assert "complete_multipart_upload" not in methods
    assert "put_object" not in methods
    assert "Uploads" not in s3.client.list_multipart_uploads(Bucket=s3.bucket)
    assert storage.put("x", chunks(fail=False)) == 64 << 20
    assert s3.client.head_object(Bucket=s3.bucket, Key="run/x")["ContentLength"] == 64 << 20


def test_listings_and_reads_ask_the_store_each_time(
    storage: FsspecStorage, requests: list[tuple[str, dict[str, Any]]], s3: S3
) -> None:
    storage.put("a/x", [b"1"])
    assert storage.list()[0].size_bytes == 1
    s3.client.put_object(Bucket=s3.bucket, Key="run/a/x", Body=b"22")
    s3.client.put_object(Bucket=s3.bucket, Key="run/a/y", Body=b"333")
    assert [info.size_bytes for info in storage.list("a")] == [2, 3]
    assert storage.read("a/x") == b"22"
    s3.client.delete_object(Bucket=s3.bucket, Key="run/a/x")
    assert [info.path for info in storage.list()] == ["a/y"]


def test_a_listing_says_etag_and_time_and_leaves_placeholders_out(storage: FsspecStorage, s3: S3) -> None:
    for key in ("run/", "run/folder/", "run/x", "run-other/x", "runner", "run/.lakeckpt-1.tmp"):
        s3.client.put_object(Bucket=s3.bucket, Key=key, Body=b"")
    (info,) = storage.list()
    head = s3.client.head_object(Bucket=s3.bucket, Key="run/x")
    assert info.path == "x"
    assert info.etag == head["ETag"].strip('"')
    assert info.mtime_ns == int(head["LastModified"].timestamp() * 1e9)


def test_more_objects_than_one_page_are_listed(storage: FsspecStorage, s3: S3) -> None:
    backend = s3_backends["123456789012"]["aws"]  # the server's own memory: a thousand requests take their time
    for n in range(1003):
        backend.put_object(s3.bucket, f"run/{n:05d}", b"")
    assert [info.path for info in storage.list()] == [f"{n:05d}" for n in range(1003)]


def test_a_missing_bucket_is_empty_to_readers_and_an_error_to_writers(s3: S3) -> None:
    storage = FsspecStorage("s3://no-such-bucket-7/run", storage_options=s3.options)
    assert storage.list() == []
    with pytest.raises(StorageError, match="bucket or folder is not there"):
        storage.put("x", [b"1"])


def test_credentials_are_shown_nowhere(
    s3: S3, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, logger="lakeckpt")
    uri = f"s3://{s3.bucket}/run?token={CANARY}#{CANARY}"
    storage = FsspecStorage(uri, storage_options=s3.options)
    with_user = FsspecStorage(f"sftp://user:{CANARY}@host/run")
    shown = [repr(storage), storage.name, describe(storage), repr(with_user), with_user.name]
    filesystem, _ = storage._open()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(f"the signature made with {CANARY} for {uri} is wrong")

    for name in ("pipe_file", "cat_file", "find", "rm_file"):
        monkeypatch.setattr(filesystem, name, refuse)
    for call in (
        lambda: storage.put("x", [b"1"]),
        lambda: storage.put_new("x", b"1"),
        lambda: storage.read("x"),
        lambda: storage.list(),
        lambda: storage.delete("x"),
    ):
        with pytest.raises(StorageError) as caught:
            call()
        shown.append("".join(traceback.format_exception(caught.value)))
    assert "***" in shown[-1]
    assert not [text for text in [*shown, caplog.text] if CANARY in text]


def test_another_process_makes_its_own_filesystem(storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = storage._open()
    assert storage._open()[0] is first
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert storage._open()[0] is not first


def test_a_pickled_storage_reads_with_the_same_options(storage: FsspecStorage) -> None:
    storage.put("x", [b"1"])
    data = pickle.dumps(storage)
    assert CANARY.encode() not in data
    again = pickle.loads(data)
    assert again.read("x") == b"1"
    assert again.name == storage.name


def test_a_filesystem_without_conditional_puts_is_refused_for_commits_only(tmp_path: Path) -> None:
    storage = FsspecStorage(f"file://{tmp_path}/run")
    with pytest.raises(ConditionalPutUnsupported, match="fsspec has no conditional put for it"):
        storage.put_new("x", b"1")
    assert storage.put("a/x", [b"12"]) == 2
    assert storage.put("a/large", [b"x" * (20 << 20)] * 2) == 40 << 20
    assert [(info.path, info.size_bytes) for info in storage.list()] == [("a/large", 40 << 20), ("a/x", 2)]


@pytest.mark.parametrize("before_it_fails", [1, 40 << 20])
def test_where_files_show_while_they_are_written_a_put_is_moved_into_place(
    tmp_path: Path, before_it_fails: int
) -> None:
    storage = FsspecStorage(f"file://{tmp_path}/run")
    seen: list[list[str]] = []

    def chunks() -> Iterator[bytes]:
        yield b"x" * before_it_fails
        seen.append([info.path for info in storage.list()])
        raise KeyError("stop")

    with pytest.raises(KeyError):
        storage.put("a/x", chunks())
    assert seen == [[]]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
