"""What only an object store does: lost answers, ignored conditions, uploads, pinned ETags, checksums, deadlines."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from moto.s3.models import FakeKey, s3_backends

from lakeckpt.errors import (
    ConditionalPutUnsupported,
    ConfigError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    StorageError,
    StorageTimeout,
)
from lakeckpt.lake import s3 as s3_module
from lakeckpt.lake import s3_client
from lakeckpt.lake.s3 import PART_BYTES, SPAN_BYTES, S3Storage
from lakeckpt.lake.s3_signer import Signer
from lakeckpt.lake.storage import Storage, clear_leftovers, open_storage
from lakeckpt.testing.fault_proxy import At, FaultProxy, HttpFault, Request, Where
from tests.lake.conftest import S3
from tests.patience import PATIENCE_S

DATA = bytes(range(256)) * 40
QUICK = {"attempt_s": 10.0, "total_s": 60.0, "pause_s": 0.01}


@pytest.fixture
def proxy(moto_endpoint: str) -> Iterator[FaultProxy]:
    with FaultProxy(moto_endpoint) as one:
        yield one


@pytest.fixture
def storage(s3: S3, proxy: FaultProxy) -> S3Storage:
    return opened(s3, proxy)


def opened(s3: S3, proxy: FaultProxy, **options: Any) -> S3Storage:
    storage = open_storage(f"s3://{s3.bucket}/run", storage_options={**s3.options_at(proxy.url), **QUICK, **options})
    assert isinstance(storage, S3Storage)
    return storage


def asked(proxy: FaultProxy, method: str, after: int = 0) -> list[Request]:
    return [request for request in proxy.requests[after:] if request.method == method]


CALLS: dict[str, Callable[[S3Storage], object]] = {
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
    storage._conditional = True  # the store has been asked
    expected = {"list": [("a/x", len(DATA))], "read a range": DATA[100:1000], "read all": DATA, "put": len(DATA)}
    proxy.faults = [At(len(proxy.requests) + 1, fault)]
    assert CALLS[call](storage) == expected.get(call)
    assert [fault for _, fault in proxy.injected] == [fault]
    proxy.faults = []
    names = {"put": ["a/x", "a/y"], "put_new": ["a/x", "a/z"], "delete": []}.get(call, ["a/x"])
    assert [info.path for info in storage.list()] == names
    assert all(storage.read(name) == DATA for name in names)


@pytest.mark.parametrize("fault", [HttpFault.STALL, HttpFault.STALL_IN_BODY])
def test_an_answer_that_stalls_is_asked_for_again(s3: S3, proxy: FaultProxy, fault: HttpFault) -> None:
    opened(s3, proxy).put("a/x", [DATA])
    storage = opened(s3, proxy, attempt_s=0.5)
    proxy.faults = [At(len(proxy.requests) + 1, fault)]
    assert storage.read("a/x", 100, 1000) == DATA[100:1000]
    assert [fault for _, fault in proxy.injected] == [fault]


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (HttpFault.ERROR, StorageError, "the store answered 500 InternalError"),
        (HttpFault.SLOW_DOWN, StorageError, "the store answered 503 SlowDown"),
        (HttpFault.RESET, StorageError, "the connection broke"),
        (HttpFault.TRUNCATED, StorageError, "the answer ended after 450 of 900 bytes"),
        (HttpFault.SHORT, StorageError, "the answer has 450 bytes and calls them 100 to 999"),
        (HttpFault.STALL, StorageTimeout, "no whole answer in time"),
        (HttpFault.STALL_IN_BODY, StorageTimeout, "no whole answer in time"),
    ],
)
def test_a_fault_that_stays_is_a_typed_error_in_bounded_time(
    s3: S3, proxy: FaultProxy, fault: HttpFault, kind: type[StorageError], says: str
) -> None:
    opened(s3, proxy).put("a/x", [DATA])
    storage = opened(s3, proxy, attempt_s=0.5, total_s=6.0, max_attempts=3)
    before = len(proxy.requests)
    proxy.faults = [Where(lambda request: True, fault)]
    with pytest.raises(kind, match=says) as caught:
        storage.read("a/x", 100, 1000)
    assert f"cannot read 'a/x' in s3://{s3.bucket}/run: " in str(caught.value)
    assert 1 <= len(proxy.requests) - before <= 3
    assert caught.value.errno is not None


def test_a_flipped_bit_in_a_whole_object_is_seen_by_its_checksum(storage: S3Storage, proxy: FaultProxy) -> None:
    storage.put("a/x", [DATA])
    proxy.faults = [At(len(proxy.requests) + 1, HttpFault.FLIPPED)]
    assert storage.read("a/x") == DATA
    assert len(proxy.injected) == 1
    proxy.faults = [Where(lambda request: True, HttpFault.FLIPPED)]
    with pytest.raises(StorageError, match="do not have the object's sha256 checksum"):
        storage.read("a/x")


def test_an_object_without_a_checksum_is_held_to_its_length(storage: S3Storage, proxy: FaultProxy, s3: S3) -> None:
    backend = s3_backends["123456789012"]["aws"]
    backend.put_object(s3.bucket, "run/foreign", DATA)
    assert storage.read("foreign") == DATA
    proxy.faults = [Where(lambda request: request.method == "GET", HttpFault.SHORT, times=1)]
    assert storage.read("foreign") == DATA
    assert len(proxy.injected) == 1


def test_nothing_but_the_attempts_of_ours_reaches_the_store(s3: S3, proxy: FaultProxy) -> None:
    storage = opened(s3, proxy, max_attempts=4)
    storage.put("a/x", [DATA])
    for call, attempts in (("read all", 4), ("list", 4), ("put", 4), ("delete", 4)):
        proxy.faults = [Where(lambda request: True, HttpFault.ERROR)]
        before = len(proxy.requests)
        with pytest.raises(StorageError, match=r"\(4 attempts in "):
            CALLS[call](storage)
        assert len(proxy.requests) - before == attempts


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
def test_another_object_than_the_listed_one_is_refused(storage: S3Storage, bounds: tuple[int, int | None]) -> None:
    storage.put("x", [b"1" * 100])
    (listed,) = storage.list()
    storage.put("x", [b"2" * 100])
    with pytest.raises(ObjectChanged, match=r"cannot read 'x' in .* written again"):
        storage.read("x", *bounds, etag=listed.etag)
    assert storage.read("x", 10, 20) == b"2" * 10


def test_an_object_that_is_replaced_during_a_read_comes_whole_all_the_same(s3: S3, moto_endpoint: str) -> None:
    old, new = b"o" * (2 * SPAN_BYTES), b"n" * (2 * SPAN_BYTES)
    backend = s3_backends["123456789012"]["aws"]

    def replace(request: Request) -> None:
        if request.range.startswith(f"bytes={SPAN_BYTES}-") and len(proxy.requests) < 3:
            backend.put_object(s3.bucket, "run/x", new)

    with FaultProxy(moto_endpoint, on_request=replace) as proxy:
        backend.put_object(s3.bucket, "run/x", old)
        assert opened(s3, proxy).read("x", 0, 2 * SPAN_BYTES) == new


def test_a_store_that_ignores_if_match_is_seen_through_by_the_etag_of_its_answer(
    storage: S3Storage, proxy: FaultProxy
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


def opened_listing(storage: S3Storage, proxy: FaultProxy) -> list[str | None]:
    proxy.faults = []
    return [info.etag for info in storage.list()]


def test_ranges_that_a_server_does_not_know_are_refused(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("x", [DATA])
    signer = storage._open()._signer
    signed = signer.signed

    def without_range(method: str, url: str, headers: dict[str, str], sha256: str) -> dict[str, str]:
        return signed(method, url, {k: v for k, v in headers.items() if k != "Range"}, sha256)

    monkeypatch.setattr(type(signer), "signed", lambda self, *args: without_range(*args))
    with pytest.raises(StorageError, match="does not answer ranges"):
        storage.read("x", 10, 20)


# -- conditional puts ------------------------------------------------------------------------------------------------


def test_the_store_is_asked_once_whether_it_honours_the_condition(
    storage: S3Storage, proxy: FaultProxy, s3: S3
) -> None:
    for n in range(3):
        storage.put_new(f"log/{n}", b"1")
    puts = asked(proxy, "PUT")
    assert len(puts) == 3 + 2
    assert all(request.conditional for request in puts)
    assert s3.keys() == ["run/log/0", "run/log/1", "run/log/2"]


def test_a_store_that_ignores_the_condition_is_refused_before_anything_is_committed(
    storage: S3Storage, monkeypatch: pytest.MonkeyPatch, s3: S3
) -> None:
    client = storage._open()
    put = client.put
    monkeypatch.setattr(client, "put", lambda what, key, data, new=False: put(what, key, data))
    with pytest.raises(ConditionalPutUnsupported, match=r"replaced an object .* keep the run on"):
        storage.put_new("log/0", b"1")
    assert s3.keys() == []


def test_a_conditional_put_whose_every_answer_is_lost_is_an_error_and_there(
    storage: S3Storage, proxy: FaultProxy
) -> None:
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


def parts(count: int) -> Iterator[bytes]:
    for n in range(count):
        yield bytes([n]) * PART_BYTES


@pytest.mark.parametrize("fault", [HttpFault.LOST_ANSWER, HttpFault.ERROR, HttpFault.RESET])
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
    storage = opened(s3, proxy, max_attempts=2)
    proxy.faults = [Where(lambda request: request.query.get("partNumber") == "2", HttpFault.ERROR)]
    with pytest.raises(StorageError, match="500 InternalError"):
        storage.put("x", parts(3))
    assert s3.keys() == []
    assert "Uploads" not in s3.client.list_multipart_uploads(Bucket=s3.bucket)


def test_uploads_of_the_dead_are_cleared_and_those_of_the_living_or_of_others_are_not(
    storage: S3Storage, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("run/dead", "run/a/dead", "other/dead", "run/theirs", "run/dead.tmp", "dead", "runs/dead"):
        s3.client.create_multipart_upload(Bucket=s3.bucket, Key=key)
    client = storage._open()
    page = client.uploads_page

    def begun_now(what: str, prefix: str, marker: str | None) -> Any:
        found = page(what, prefix, marker)  # moto says 2010 of every upload
        for item in found.items:
            item["Initiated"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return found

    with monkeypatch.context() as patched:
        patched.setattr(client, "uploads_page", begun_now)
        assert clear_leftovers(storage, uploads=re.compile("(a/)?dead")) == 0
    assert clear_leftovers(storage) == 0
    assert clear_leftovers(storage, uploads=re.compile("(a/)?dead")) == 2
    left = s3.client.list_multipart_uploads(Bucket=s3.bucket)["Uploads"]
    assert sorted(upload["Key"] for upload in left) == [
        "dead",
        "other/dead",
        "run/dead.tmp",
        "run/theirs",
        "runs/dead",
    ]


class Chunked(BaseHTTPRequestHandler):
    """A store, or a gateway before one, that streams its answers and says no length. It has one object."""

    protocol_version = "HTTP/1.1"
    content = b""
    ranges = True

    def do_GET(self) -> None:
        first, last = 0, len(self.content) - 1
        asked = self.headers.get("Range", "")
        if asked and self.ranges:
            first, last = (int(one) for one in asked.removeprefix("bytes=").split("-"))
            last = min(last, len(self.content) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.content)}")
        else:
            self.send_response(200)
        self.send_header("ETag", '"one"')
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # who asked has enough
            for at in range(first, last + 1, 1 << 20):
                piece = self.content[at : min(at + (1 << 20), last + 1)]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def streaming(size_bytes: int, *, ranges: bool = True) -> Iterator[tuple[Storage, bytes]]:
    content = random.Random(5).randbytes(size_bytes)
    store = type("Mine", (Chunked,), {"content": content, "ranges": ranges})
    with ThreadingHTTPServer(("127.0.0.1", 0), store) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        place = {"endpoint": f"http://127.0.0.1:{server.server_port}", "region": "us-east-1"}
        options = {**place, "key": "k", "secret": "s", **QUICK, "max_attempts": 1}
        try:
            yield open_storage("s3://bucket/run", storage_options=options), content
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("size_bytes", [SPAN_BYTES + 1, 2 * SPAN_BYTES, 2 * SPAN_BYTES + 5])
def test_a_large_object_is_read_whole_from_a_store_that_sends_no_length(size_bytes: int) -> None:
    with streaming(size_bytes) as (storage, content):
        assert storage.read("x") == content
        assert storage.read("x", 5) == content[5:]


def test_a_large_object_from_a_store_that_sends_neither_length_nor_ranges_is_an_error() -> None:
    with streaming(SPAN_BYTES + 1, ranges=False) as (storage, _):
        with pytest.raises(StorageError, match="does not answer ranges"):
            storage.read("x")


# -- listing ---------------------------------------------------------------------------------------------------------


def test_more_objects_than_one_page_are_listed(storage: S3Storage, s3: S3) -> None:
    backend = s3_backends["123456789012"]["aws"]  # the server's own memory: a thousand requests take their time
    for n in range(1003):
        backend.put_object(s3.bucket, f"run/{n:05d}", b"")
    assert [info.path for info in storage.list()] == [f"{n:05d}" for n in range(1003)]


def test_a_listing_that_goes_on_nowhere_is_not_taken_for_whole(
    storage: S3Storage, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.client.put_object(Bucket=s3.bucket, Key="run/x", Body=b"")
    leaves = s3_client._leaves

    def as_version_1(element: Any) -> dict[str, str]:
        return {**leaves(element), "IsTruncated": "true", "NextContinuationToken": ""}

    monkeypatch.setattr(s3_client, "_leaves", as_version_1)
    with pytest.raises(StorageError, match="the store says that its listing goes on, and not where"):
        storage.list()


KEYS = ["a b/c d.parquet", "a+b/c.parquet", "a%20b/ü&=?#.parquet", "plain.parquet"]


@pytest.mark.parametrize("encode", [urllib.parse.quote_plus, urllib.parse.quote], ids=["Amazon's", "others'"])
def test_keys_are_read_however_a_store_spells_them_in_listings(
    storage: S3Storage, s3: S3, monkeypatch: pytest.MonkeyPatch, encode: Callable[..., str]
) -> None:
    """Amazon and MinIO write a space as a plus, and a plus as %2B; others write a space as %20."""

    def spelled(key: FakeKey, encoding_type: str | None = None) -> str:
        return encode(key.name, safe="/") if encoding_type == "url" else str(key.name)

    monkeypatch.setattr(FakeKey, "safe_name", spelled)
    for key in KEYS:
        s3.client.put_object(Bucket=s3.bucket, Key=f"run/{key}", Body=key.encode())
    found = [info.path for info in storage.list()]
    assert sorted(found) == sorted(KEYS) and [storage.read(path).decode() for path in found] == found


def test_a_listing_says_etag_and_time_and_leaves_placeholders_out(storage: S3Storage, s3: S3) -> None:
    for key in ("run/", "run/folder/", "run/x", "run-other/x", "runner", "run/.lakeckpt-1.tmp"):
        s3.client.put_object(Bucket=s3.bucket, Key=key, Body=b"")
    (info,) = storage.list()
    head = s3.client.head_object(Bucket=s3.bucket, Key="run/x")
    assert info.path == "x"
    assert info.etag == head["ETag"].strip('"')
    assert info.mtime_ns is not None
    assert info.mtime_ns // 10**9 == int(head["LastModified"].timestamp())
    assert storage.list("x") == [info]


def test_a_missing_bucket_is_empty_to_readers_and_an_error_to_writers(s3: S3) -> None:
    storage = open_storage("s3://no-such-bucket-7/run", storage_options=s3.options)
    assert storage.list() == [] == storage.list("a")
    assert clear_leftovers(storage, uploads=re.compile("x")) == 0
    with pytest.raises(ObjectMissing):
        storage.read("x")
    with pytest.raises(StorageError, match="its bucket is not there"):
        storage.put("x", [b"1"])


@pytest.mark.parametrize("uri", ["s3://", "s3:///x", "s3://key:secret@bucket/x"])
def test_what_names_no_bucket_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="looks like s3://bucket/folder") as caught:
        open_storage(uri)
    assert "secret" not in str(caught.value)


def test_however_many_threads_come_at_once_one_client_is_made(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    all_here = threading.Barrier(8)

    class Counted(s3_module.S3Client):
        def __init__(self, *args: Any) -> None:
            made.append(1)
            super().__init__(*args)

    monkeypatch.setattr(s3_module, "S3Client", Counted)
    storage = open_storage(f"s3://{s3.bucket}", storage_options=s3.options)

    def ask() -> None:
        all_here.wait()
        storage.list()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_where_a_bucket_is_is_found_once_for_copies_and_forked_processes(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = S3Storage(f"s3://{s3.bucket}/run", storage_options=s3.options)
    storage.put("x", [DATA])
    monkeypatch.setattr(Signer, "_resolved", _never)
    assert pickle.loads(pickle.dumps(storage)).read("x") == DATA
    child = os.fork()
    if not child:
        os._exit(storage.read("x") != DATA)
    assert os.waitpid(child, 0)[1] == 0


def _never(*_: object) -> None:
    raise AssertionError("it was found already")
