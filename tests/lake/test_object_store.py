"""What only an object store does: lost answers, ignored conditions, uploads, pinned ETags, checksums, deadlines."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import obstore
import pytest
from moto.s3.models import s3_backends

from lakeckpt.errors import (
    ConditionalPutUnsupported,
    ConfigError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    StorageError,
)
from lakeckpt.lake.storage.base import Storage, delete_all
from lakeckpt.lake.storage.object_store import PART_BYTES, SPAN_BYTES, ObjectStorage
from lakeckpt.lake.storage.open import open_storage
from tests.faults.fault_proxy import At, FaultProxy, HttpFault, Request, Where
from tests.lake.conftest import S3
from tests.patience import PATIENCE_S

DATA = bytes(range(256)) * 40
QUICK = {"attempt_s": 10.0, "total_s": 60.0, "pause_s": 0.01}


@pytest.fixture
def proxy(moto_endpoint: str) -> Iterator[FaultProxy]:
    with FaultProxy(moto_endpoint) as one:
        yield one


@pytest.fixture
def storage(s3: S3, proxy: FaultProxy) -> ObjectStorage:
    return opened(s3, proxy)


def opened(s3: S3, proxy: FaultProxy, **options: Any) -> ObjectStorage:
    storage = open_storage(f"s3://{s3.bucket}/run", storage_options={**s3.options_at(proxy.url), **QUICK, **options})
    assert isinstance(storage, ObjectStorage)
    return storage


def asked(proxy: FaultProxy, method: str, after: int = 0) -> list[Request]:
    return [request for request in proxy.requests[after:] if request.method == method]


CALLS: dict[str, Callable[[ObjectStorage], object]] = {
    "list": lambda storage: [(info.path, info.size_bytes) for info in storage.list()],
    "read a range": lambda storage: storage.read("a/x", 100, 1000),
    "read all": lambda storage: storage.read("a/x"),
    "put": lambda storage: storage.put("a/y", [DATA]),
    "put_new": lambda storage: storage.put_new("a/z", DATA),
    "delete": lambda storage: storage.delete("a/x"),
}
PASSING = [
    HttpFault.ERROR,
    HttpFault.SLOW_DOWN,
    HttpFault.RESET,
    HttpFault.TRUNCATED,
    HttpFault.SHORT,
    HttpFault.LOST_ANSWER,
]


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_that_passes_is_not_noticed(s3: S3, proxy: FaultProxy, fault: HttpFault, call: str) -> None:
    storage = opened(s3, proxy)
    storage.put("a/x", [DATA])
    storage.put_new("warm", b"1")  # the store has been asked whether it honours the condition
    storage.delete("warm")
    expected = {"list": [("a/x", len(DATA))], "read a range": DATA[100:1000], "read all": DATA, "put": len(DATA)}
    proxy.faults = [At(len(proxy.requests) + 1, fault)]
    assert CALLS[call](storage) == expected.get(call)
    assert [fault for _, fault in proxy.injected] == [fault]
    proxy.faults = []
    names = {"put": ["a/x", "a/y"], "put_new": ["a/x", "a/z"], "delete": []}.get(call, ["a/x"])
    assert [info.path for info in storage.list()] == names
    assert all(storage.read(name) == DATA for name in names)


@pytest.mark.parametrize("fault", [pytest.param(HttpFault.STALL, marks=pytest.mark.soak), HttpFault.STALL_IN_BODY])
def test_an_answer_that_stalls_is_asked_for_again(s3: S3, proxy: FaultProxy, fault: HttpFault) -> None:
    opened(s3, proxy).put("a/x", [DATA])
    storage = opened(s3, proxy, attempt_s=0.5, slowest_bytes_per_s=1 << 26)
    proxy.faults = [At(len(proxy.requests) + 1, fault)]
    assert storage.read("a/x", 100, 1000) == DATA[100:1000]
    assert [fault for _, fault in proxy.injected] == [fault]


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (HttpFault.ERROR, StorageError, "the store answered 500 InternalError"),
        (HttpFault.SLOW_DOWN, StorageError, "the store answered 503 SlowDown"),
        (HttpFault.RESET, StorageError, "the connection broke"),
        (HttpFault.TRUNCATED, StorageError, "the connection broke"),
        (HttpFault.SHORT, StorageError, r"the answer has 450 bytes and calls them \(100, 1000\)"),
        (HttpFault.STALL, StorageError, "no whole answer in time"),
        pytest.param(HttpFault.STALL_IN_BODY, StorageError, "no whole answer in time", marks=pytest.mark.soak),
    ],
)
def test_a_fault_that_stays_is_a_typed_error_in_bounded_time(
    s3: S3, proxy: FaultProxy, fault: HttpFault, kind: type[StorageError], says: str
) -> None:
    opened(s3, proxy).put("a/x", [DATA])
    storage = opened(s3, proxy, attempt_s=0.5, total_s=1.0, pause_s=0.4, slowest_bytes_per_s=1 << 26)
    before = len(proxy.requests)
    proxy.faults = [Where(lambda request: True, fault)]
    with pytest.raises(kind, match=says) as caught:
        storage.read("a/x", 100, 1000)
    assert f"cannot read 'a/x' in s3://{s3.bucket}/run: " in str(caught.value)
    assert len(proxy.requests) > before
    assert caught.value.errno is not None


def test_an_object_without_a_checksum_is_held_to_its_length(storage: ObjectStorage, proxy: FaultProxy, s3: S3) -> None:
    backend = s3_backends["123456789012"]["aws"]
    backend.put_object(s3.bucket, "run/foreign", DATA)
    assert storage.read("foreign") == DATA
    proxy.faults = [Where(lambda request: request.method == "GET", HttpFault.SHORT, times=1)]
    assert storage.read("foreign") == DATA
    assert len(proxy.injected) == 1


def test_nothing_but_the_attempts_of_ours_reaches_the_store(s3: S3, proxy: FaultProxy) -> None:
    storage = opened(s3, proxy, total_s=0.5)
    storage.put("a/x", [DATA])
    for call in ("read all", "list", "put", "delete"):
        proxy.faults = [Where(lambda request: True, HttpFault.ERROR)]
        before = len(proxy.requests)
        with pytest.raises(StorageError, match=r"\(\d+ attempts? in ") as caught:
            CALLS[call](storage)
        assert f"({len(proxy.requests) - before} attempt" in str(caught.value)


# -- reading ---------------------------------------------------------------------------------------------------------


def test_a_large_read_is_ranges_in_flight_of_one_etag(s3: S3, moto_endpoint: str) -> None:
    together = threading.Barrier(3, timeout=PATIENCE_S)
    data = bytes(1 << 20) + DATA * 2000

    def meet(request: Request) -> None:
        if request.method == "GET" and request.range and not request.range.startswith("bytes=0-"):
            together.wait()

    assert 3 * SPAN_BYTES > len(data) - 100 > 2 * SPAN_BYTES
    with FaultProxy(moto_endpoint) as proxy:
        storage = opened(s3, proxy, attempt_s=20.0, total_s=60.0)
        storage.put("x", [data + data[:SPAN_BYTES]])
        proxy._on_request = meet
        assert storage.read("x", 0, len(data) + SPAN_BYTES) == data + data[:SPAN_BYTES]
        gets = asked(proxy, "GET")
        assert len(gets) == 4
        assert [request.conditional for request in gets] == [False, True, True, True]


@pytest.mark.parametrize("bounds", [(0, None), (10, 20), (0, 3 * SPAN_BYTES)])
def test_another_object_than_the_listed_one_is_refused(storage: ObjectStorage, bounds: tuple[int, int | None]) -> None:
    storage.put("x", [b"1" * 100])
    (listed,) = storage.list()
    storage.put("x", [b"2" * 100])
    with pytest.raises(ObjectChanged, match=r"cannot read 'x' in .* written again"):
        storage.read("x", *bounds, etag=listed.etag)
    assert storage.read("x", 10, 20) == b"2" * 10


def test_an_object_that_is_replaced_during_a_read_is_refused(s3: S3, moto_endpoint: str) -> None:
    old, new = b"o" * (2 * SPAN_BYTES), b"n" * (2 * SPAN_BYTES)
    backend = s3_backends["123456789012"]["aws"]

    def replace(request: Request) -> None:
        if request.range.startswith(f"bytes={SPAN_BYTES}-"):
            backend.put_object(s3.bucket, "run/x", new)

    with FaultProxy(moto_endpoint, on_request=replace) as proxy:
        backend.put_object(s3.bucket, "run/x", old)
        with pytest.raises(ObjectChanged, match="written again"):
            opened(s3, proxy).read("x", 0, 2 * SPAN_BYTES)


def test_a_store_that_ignores_if_match_is_seen_through_by_the_etag_of_its_answer(
    storage: ObjectStorage, proxy: FaultProxy
) -> None:
    storage.put("x", [b"1" * 100])
    (listed,) = storage.list()
    storage.read("x", 10, 20)  # what a stale cache will answer with later
    storage.put("x", [b"2" * 100])
    proxy.faults = [Where(lambda request: True, HttpFault.STALE)]
    assert storage.read("x", 10, 20, etag=listed.etag) == b"1" * 10  # it is what was listed, from wherever it came
    (now,) = opened_listing(storage, proxy)
    proxy.faults = [Where(lambda request: True, HttpFault.STALE)]
    with pytest.raises(ObjectChanged, match="it has the ETag"):
        storage.read("x", 10, 20, etag=now)


def opened_listing(storage: ObjectStorage, proxy: FaultProxy) -> list[str | None]:
    proxy.faults = []
    return [info.etag for info in storage.list()]


# -- conditional puts ------------------------------------------------------------------------------------------------


def test_the_store_is_asked_once_whether_it_honours_the_condition(
    storage: ObjectStorage, proxy: FaultProxy, s3: S3
) -> None:
    for n in range(3):
        storage.put_new(f"log/{n}", b"1")
    puts = asked(proxy, "PUT")
    assert len(puts) == 3 + 2
    assert all(request.conditional for request in puts)
    assert s3.keys() == ["run/log/0", "run/log/1", "run/log/2"]


def test_a_conditional_put_whose_every_answer_is_lost_is_an_error_and_there(s3: S3, proxy: FaultProxy) -> None:
    storage = opened(s3, proxy, total_s=2.0)
    storage.put_new("warm", b"1")
    proxy.faults = [Where(lambda request: request.method == "PUT", HttpFault.LOST_ANSWER)]
    with pytest.raises(StorageError, match="cannot write 'log/0'"):
        storage.put_new("log/0", b"mine")
    proxy.faults = []
    assert storage.read("log/0") == b"mine"
    storage.put_new("log/0", b"mine")  # which a caller finds out by asking again


def test_a_conditional_put_that_lost_its_answer_to_another_writer_has_lost(s3: S3, moto_endpoint: str) -> None:
    def theirs(request: Request) -> None:
        if request.path.endswith("log/0") and request.method == "PUT" and not proxy.injected:
            s3.client.put_object(Bucket=s3.bucket, Key="run/log/0", Body=b"theirs")

    with FaultProxy(moto_endpoint, on_request=theirs) as proxy:
        proxy.faults = [Where(lambda request: request.path.endswith("log/0"), HttpFault.RESET, times=1)]
        with pytest.raises(ObjectExists):
            opened(s3, proxy).put_new("log/0", b"mine")


# -- uploads ---------------------------------------------------------------------------------------------------------


def parts(count: int) -> list[bytes]:
    return [bytes([n]) * PART_BYTES for n in range(count)]


@pytest.mark.parametrize(
    "fault",
    [HttpFault.LOST_ANSWER, *(pytest.param(one, marks=pytest.mark.soak) for one in (HttpFault.ERROR, HttpFault.RESET))],
)
def test_an_upload_outlives_a_fault_at_each_of_its_requests(s3: S3, proxy: FaultProxy, fault: HttpFault) -> None:
    storage = opened(s3, proxy, attempt_s=20.0, total_s=60.0)
    storage.put("warm", [b""])
    for n in (1, 3, 5):  # the upload is begun, a part, it is completed
        proxy.faults = [At(len(proxy.requests) + n, fault)]
        assert storage.put("x", parts(3)) == 3 * PART_BYTES
        proxy.faults = []
        assert storage.read("x", PART_BYTES - 1, PART_BYTES + 1) == b"\0\1"
        assert s3.client.head_object(Bucket=s3.bucket, Key="run/x")["ContentLength"] == 3 * PART_BYTES
        storage.delete("x")
    assert len(proxy.injected) == 3


def test_an_upload_that_fails_is_aborted_and_never_an_object(s3: S3, proxy: FaultProxy) -> None:
    storage = opened(s3, proxy, total_s=0.5, slowest_bytes_per_s=1 << 40)
    proxy.faults = [Where(lambda request: request.query.get("partNumber") == "2", HttpFault.ERROR)]
    with pytest.raises(StorageError, match="500 InternalError"):
        storage.put("x", parts(3))
    assert s3.keys() == []
    assert "Uploads" not in s3.client.list_multipart_uploads(Bucket=s3.bucket)


class Answering(BaseHTTPRequestHandler):
    """A store of one object, ``content``. ``keys`` are the access keys that it takes now (None: any)."""

    protocol_version = "HTTP/1.1"
    content, keys, says_length = DATA, None, True
    refusal = "who is it"

    def do_GET(self) -> None:
        key = self.headers["Authorization"].partition("Credential=")[2].partition("/")[0]
        if self.keys is not None and key not in self.keys():
            message = f"<Message>{self.refusal}</Message>"
            self.answer(403, f"<Error><Code>InvalidAccessKeyId</Code>{message}</Error>".encode())
            return
        first, last = (int(one) for one in self.headers["Range"].removeprefix("bytes=").split("-"))
        self.answer(206, self.content[first : last + 1], f"bytes {first}-{last}/{len(self.content)}")

    def answer(self, status: int, body: bytes, content_range: str | None = None) -> None:
        self.send_response(status)
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Tue, 24 Nov 2026 10:00:00 GMT")
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        if self.says_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = not self.says_length

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def answering(options: dict[str, Any], **told: Any) -> Iterator[Storage]:
    store = type("Mine", (Answering,), told)
    with ThreadingHTTPServer(("127.0.0.1", 0), store) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        place = {"endpoint": f"http://127.0.0.1:{server.server_port}", "region": "us-east-1"}
        try:
            yield open_storage("s3://bucket/run", storage_options={**place, **QUICK, "total_s": 0.001, **options})
        finally:
            server.shutdown()
            thread.join()


def test_a_store_that_says_no_length_is_refused() -> None:
    with answering({"key": "k", "secret": "s"}, says_length=False) as storage:
        with pytest.raises(StorageError, match="Content-Length"):
            storage.read("x", 0, 10)


def test_keys_that_expire_every_two_seconds_are_renewed_before_they_do() -> None:
    issued: list[tuple[str, datetime]] = []

    def provider() -> dict[str, Any]:
        issued.append((f"key{len(issued)}", datetime.now(UTC) + timedelta(seconds=2)))
        key, expires = issued[-1]
        return {"access_key_id": key, "secret_access_key": "s", "token": None, "expires_at": expires}

    def valid() -> set[str]:
        return {key for key, expires in issued if datetime.now(UTC) < expires}

    begun, until = datetime.now(UTC), time.monotonic() + PATIENCE_S
    with answering({"credential_provider": provider}, keys=staticmethod(valid)) as storage:
        while (datetime.now(UTC) - begun) < timedelta(seconds=4.5):
            assert time.monotonic() < until
            assert storage.read("x", 10, 20) == DATA[10:20]
    assert len(issued) >= 3


def test_secrets_are_in_no_name_and_no_error() -> None:
    options = {"key": "k", "secret": "canary/5ecr3t+=", "token": "canary-token"}
    with answering(options, keys=staticmethod(set), refusal="not canary/5ecr3t+= of k") as storage:
        with pytest.raises(StorageError, match=r"403 InvalidAccessKeyId: not \*\*\* of k") as caught:
            storage.read("x", 0, 10)
        assert "canary" not in f"{caught.value} {storage!r} {storage._options!r}"
    with pytest.raises(ConfigError, match="belong together") as refused:
        open_storage("s3://bucket/run", storage_options={"secret": "canary"})
    assert "canary" not in str(refused.value)


def test_a_storage_is_pickled_with_its_options(storage: ObjectStorage) -> None:
    storage.put("x", [DATA])
    assert pickle.loads(pickle.dumps(storage)).read("x") == DATA


def test_an_upload_whose_last_answer_was_lost_is_written_anew(s3: S3, proxy: FaultProxy) -> None:
    def completes(request: Request) -> bool:
        return "uploadId" in request.query and request.method == "POST"

    storage = opened(s3, proxy, attempt_s=20.0)
    proxy.faults = [Where(completes, HttpFault.LOST_ANSWER, times=1)]
    assert storage.put("x", parts(3)) == 3 * PART_BYTES
    assert storage.read("x", PART_BYTES - 1, PART_BYTES + 1) == b"\0\1"


def test_many_objects_are_deleted_by_one_request(storage: ObjectStorage, proxy: FaultProxy) -> None:
    for n in range(5):
        storage.put(f"a/{n}", [b"1"])
    before = len(proxy.requests)
    delete_all(storage, [*(f"a/{n}" for n in range(4)), "never/there"])
    assert len(proxy.requests) - before == 1
    assert [info.path for info in storage.list()] == ["a/4"]


def test_a_store_without_batches_deletes_one_by_one_where_its_user_says_so(s3: S3, proxy: FaultProxy) -> None:
    storage = opened(s3, proxy)
    for n in range(3):
        storage.put(f"a/{n}", [b"1"])
    proxy.faults = [Where(lambda request: "delete" in request.query, HttpFault.NOT_IMPLEMENTED)]
    with pytest.raises(StorageError, match=r"cannot delete 'a/0' .* 501 .*disable_bulk_delete"):
        delete_all(storage, ["a/0", "never/there", "a/1"])
    one_by_one = opened(s3, proxy, disable_bulk_delete=True)
    delete_all(one_by_one, ["a/0", "never/there", "a/1"])
    one_by_one.delete("a/2")
    assert [request.method for request in proxy.requests[-4:]] == ["DELETE"] * 4 and storage.list() == []


def test_a_store_that_ignores_the_condition_is_refused_before_anything_is_committed(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch, s3: S3
) -> None:
    put = obstore.put

    def ignoring(store: Any, path: str, data: Any, *, mode: str = "overwrite", **options: Any) -> Any:
        return put(store, path, data, **options)

    monkeypatch.setattr(obstore, "put", ignoring)
    with pytest.raises(ConditionalPutUnsupported, match=r"replaced an object .* keep the run on"):
        storage.put_new("log/0", b"1")
    assert s3.keys() == []


# -- listing ---------------------------------------------------------------------------------------------------------


def test_more_objects_than_one_page_are_listed(storage: ObjectStorage, s3: S3) -> None:
    backend = s3_backends["123456789012"]["aws"]  # the server's own memory: a thousand requests take their time
    for n in range(1003):
        backend.put_object(s3.bucket, f"run/{n:05d}", b"")
    assert [info.path for info in storage.list()] == [f"{n:05d}" for n in range(1003)]


KEYS = ["a b/c d.parquet", "a+b/c.parquet", "a%20b/ü&=?#.parquet", "plain.parquet"]


def test_a_listing_says_etag_and_time_and_leaves_placeholders_out(storage: ObjectStorage, s3: S3) -> None:
    for key in ("run/", "run/folder/", "run/folder/x", "run-other/x", "runner", "run/.lakeckpt-1.tmp"):
        s3.client.put_object(Bucket=s3.bucket, Key=key, Body=b"")
    (info,) = storage.list()
    head = s3.client.head_object(Bucket=s3.bucket, Key="run/folder/x")
    assert info.path == "folder/x"
    assert info.etag == head["ETag"].strip('"')
    assert info.mtime_ns is not None
    assert info.mtime_ns // 10**9 == int(head["LastModified"].timestamp())
    assert storage.list("folder/x") == [info]


def test_a_missing_bucket_is_an_error(s3: S3) -> None:
    storage = open_storage("s3://no-such-bucket-7/run", storage_options=s3.options)
    for call in (storage.list, lambda: storage.list("a"), lambda: storage.read("x"), lambda: storage.put("x", [b"1"])):
        with pytest.raises(ObjectMissing, match="its bucket is not there"):
            call()


@pytest.mark.parametrize("uri", ["s3://", "s3:///x", "s3://key:secret@bucket/x"])
def test_what_names_no_bucket_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="looks like s3://bucket/folder") as caught:
        open_storage(uri)
    assert "secret" not in str(caught.value)
