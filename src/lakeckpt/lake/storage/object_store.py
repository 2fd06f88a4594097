"""This module stores objects in S3, Google's and Azure's stores, through obstore.

One request moves at most `SPAN_BYTES` to read and `PART_BYTES` to write, so that one timeout fits all. Larger reads are
requests side by side, all of one ETag (If-Match). Objects up to `SINGLE_PUT_BYTES` are put by one request, larger ones
by a multipart upload, which becomes an object only by its last request. ``put_new`` is a conditional put, trusted on S3
only once the store has refused a second one to the same key: some stores ignore the condition. If the answer was
lost, the object is read back. Many objects are deleted by one request. A writer that dies leaves an upload without an
object: a lifecycle rule of the bucket removes it. Retries and deadlines are those of `Retrier`; obstore itself retries
the parts of an upload and nothing else.

obstore's threads do not survive a fork, and a forked child that uses or drops its client can hang, together with its
parent. So a process that was forked after a client was made never touches obstore: it keeps the inherited clients alive
and reads S3 through s3fs, as a `FsspecStorage`. obstore starts threads, once in a process; they end with it. A large
read starts and joins threads of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from lakeckpt.counters import store_counters
from lakeckpt.errors import ConfigError, ObjectChanged, ObjectExists, ObjectMissing, StorageError
from lakeckpt.lake.storage.base import (
    Buffer,
    ObjectInfo,
    Storage,
    check_key,
    check_prefix,
    check_range,
    is_temporary,
    no_conditional_put,
    redact_uri,
    split_uri,
    temporary_name,
)
from lakeckpt.lake.storage.retry import Retrier, Retryable
from lakeckpt.lake.storage.store_errors import BehindTheEnd, Refused, failure_of, shown
from lakeckpt.lake.storage.store_options import StoreOptions

__all__ = ["SCHEMES", "ObjectStorage"]

Infos = list[ObjectInfo]
SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az"}
SPAN_BYTES = 8 << 20
SINGLE_PUT_BYTES = 32 << 20
PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4
SPANS_IN_FLIGHT = 8
PAGE_OBJECTS = DELETES_AT_ONCE = 1000
_PART_RETRIES = 4
_PLACE = re.compile(r"(?P<bucket>[^@:/?#]+)(@(?P<account>[\w-]+)\.[\w.-]+)?")


class _Clients:
    """The clients of one storage: only ``uploads`` retries by itself."""

    __slots__ = ("__weakref__", "requests", "uploads")

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.requests, self.uploads = make(0), make(_PART_RETRIES)
        _clients.add(self)


class _Fork:
    """``made_this`` is true in a process that was forked from a process with clients; ``lock`` is for its threads."""

    made_this = False
    lock = threading.Lock()


_clients: weakref.WeakSet[_Clients] = weakref.WeakSet()


def _after_fork() -> None:
    """Keep what was inherited for ever: a child that drops a client would take its connections from the parent."""
    for one in list(_clients):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        _Fork.made_this = True
    _Fork.lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class ObjectStorage:
    """A `Storage` at ``s3://bucket/folder``, ``gs://…`` or ``az://…``; options: see `StoreOptions.of`."""

    __slots__ = ("_bucket", "_child", "_clients", "_given", "_key", "_kind", "_options", "_proved", "_retrier", "_uri")

    def __init__(self, uri: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        scheme, rest = split_uri(uri)
        self._uri, self._kind = uri.rstrip("/"), SCHEMES[scheme]
        place, _, root = rest.rstrip("/").partition("/")
        match = _PLACE.fullmatch(place)
        if match is None or (match["account"] and self._kind != "az"):
            raise ConfigError(f"a URL of a store looks like {scheme}://bucket/folder, not {redact_uri(uri)!r}")
        if "//" in f"/{root}":
            raise ConfigError(
                f"{self.name} has an empty folder name ('//'), which obstore cannot name: move the objects, or open a "
                "table through filesystem=s3fs.S3FileSystem(…)"
            )
        self._bucket, self._key = match["bucket"], f"{root}/" if root else ""
        self._given = dict(storage_options or {})
        account = {"account_name": match["account"]} if match["account"] else {}
        self._options = StoreOptions.of({**account, **self._given}, scheme=self._kind)
        self._retrier = Retrier(self._options.deadlines, counters=store_counters(self._kind))
        self._proved = self._kind != "s3"
        self._child: tuple[Storage, datetime | None] | None = None
        self._clients = None if _Fork.made_this else _Clients(self._client)

    def __repr__(self) -> str:
        return f"ObjectStorage({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._uri, self._given))

    @property
    def name(self) -> str:
        """The URL, without credentials."""
        return self._uri if "@" in self._uri and self._kind == "az" else redact_uri(self._uri)

    @property
    def place(self) -> str:
        """A text that differs from that of a place of the same name at another endpoint."""
        return f"{self._options.config.get('endpoint', '')} {self._bucket} {self._key}"

    def list(self, prefix: str = "") -> Infos:
        if (child := self._in_child()) is not None:
            return child.list(prefix)
        folder = check_prefix(prefix)
        what = self._what("list", folder)
        found = self._infos(self._entries(what, f"{self._key}{folder}".rstrip("/")))
        if folder and not found:
            with contextlib.suppress(ObjectMissing):
                found = self._infos([self._asked(what, "head", f"{self._key}{folder}")])
        return _without_placeholders(found)

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        if (child := self._in_child()) is not None:
            return child.read(path, start, stop, etag=etag)
        check_key(path)
        if not check_range(path, start, stop):
            return b""
        first, size, etag = self._span(path, start, min(start + SPAN_BYTES, stop or 2**62), etag)
        stop = size if stop is None else min(stop, size)
        lows = range(start + len(first), stop, SPAN_BYTES)
        if not lows:
            return first
        with ThreadPoolExecutor(SPANS_IN_FLIGHT, thread_name_prefix="lakeckpt-spans") as pool:
            spans = pool.map(lambda low: self._span(path, low, min(low + SPAN_BYTES, stop), etag)[0], lows)
            return b"".join([first, *spans])

    def put(self, path: str, chunks: Sequence[Buffer]) -> int:
        check_key(path)
        what, key = self._what("write", path), self._key + path
        views = [memoryview(chunk).cast("B") for chunk in chunks]
        size = sum(map(len, views))
        if size <= SINGLE_PUT_BYTES:
            self._asked(what, "put", key, b"".join(views), size_bytes=size, use_multipart=False)
        else:
            self._retrier.call(what, lambda: self._upload(what, key, views), size_bytes=size)
        return size

    def put_new(self, path: str, data: bytes) -> None:
        check_key(path)
        self._require_conditional_put()
        what = self._what("write", path)

        def attempt() -> None:
            try:
                self._ask(what, "put", self._key + path, data, mode="create", use_multipart=False)
            except Refused:
                with contextlib.suppress(ObjectMissing):  # then another's put to the key was under way, and failed
                    if self.read(path, 0, len(data) + 1) == data:
                        return  # the answer to it was lost
                    raise ObjectExists(f"there is an object at {path!r} in {self.name} already") from None
                raise Retryable("another put to the same key was under way", errno=errno.EBUSY) from None

        self._retrier.call(what, attempt, size_bytes=len(data))

    def delete(self, path: str) -> None:
        check_key(path)
        with contextlib.suppress(ObjectMissing):
            self._asked(self._what("delete", path), "delete", self._key + path)

    def delete_all(self, paths: Sequence[str]) -> None:
        """Delete many objects, up to `DELETES_AT_ONCE` with one request. It is no error if some are not there."""
        for path in paths:
            check_key(path)
        for at in range(0, len(paths), DELETES_AT_ONCE):
            some = paths[at : at + DELETES_AT_ONCE]
            try:
                self._asked(self._what("delete", some[0]), "delete", [self._key + path for path in some])
            except ObjectMissing:  # stores other than S3 stop at an object that is not there
                for path in some:
                    self.delete(path)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _entries(self, what: str, prefix: str) -> Iterator[Mapping[str, Any]]:
        """Yield the store's entry of each object whose key begins with the folders ``prefix``."""
        stream: Any = None
        last: str | None = None

        def next_page() -> Any:
            nonlocal stream
            try:
                if stream is None:
                    stream = self._ask(what, "list", prefix, offset=last, chunk_size=PAGE_OBJECTS)
                with self._explaining(what):
                    return next(stream, None)
            except BaseException:
                stream = None  # the next attempt goes on behind the last entry that came
                raise

        while (page := self._retrier.call(what, next_page)) is not None:
            for entry in page:
                last = entry["path"]
                yield entry

    def _infos(self, entries: Iterable[Mapping[str, Any]]) -> Infos:
        cut = len(self._key)
        return [
            ObjectInfo(
                path=one["path"][cut:],
                size_bytes=one["size"],
                etag=_etag(one),
                mtime_ns=int(one["last_modified"].timestamp() * 1_000_000) * 1000,
            )
            for one in entries
            if len(one["path"]) > cut and not is_temporary(one["path"])
        ]

    def _span(self, path: str, start: int, stop: int, etag: str | None) -> tuple[bytes, int, str | None]:
        """Return bytes [start, stop) of an object, its size and its ETag; no bytes if it ends before ``start``."""
        what = self._what("read", path)
        options: dict[str, Any] = {"range": (start, stop)}
        if etag is not None:
            options["if_match"] = f'"{etag}"'

        def attempt() -> tuple[bytes, int, str | None]:
            try:
                answer = self._ask(what, "get", self._key + path, options=options)
            except Refused:
                raise ObjectChanged(f"{what}: it was written again (its ETag is another)") from None
            except BehindTheEnd:
                return b"", start, etag
            meta = answer.meta
            now = _etag(meta)
            if etag is not None and now not in (None, etag):
                raise ObjectChanged(f"{what}: it has the ETag {now}, not {etag}: it was written again")
            with self._explaining(what):
                data = bytes(answer.bytes())
            store_counters(self._kind).read(len(data))
            if answer.range != (start, min(stop, meta["size"])) or len(data) != answer.range[1] - start:
                raise Retryable(f"the answer has {len(data)} bytes and calls them {answer.range}", errno=errno.EPROTO)
            return data, meta["size"], now

        return self._retrier.call(what, attempt, size_bytes=stop - start)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _upload(self, what: str, key: str, views: Sequence[memoryview]) -> None:
        parts = (bytes(view[at : at + PART_BYTES]) for view in views for at in range(0, len(view), PART_BYTES))
        self._ask(what, "put", key, parts, chunk_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT, by="uploads")

    def _require_conditional_put(self) -> None:
        """Make sure, once, that the store refuses to put if an object is."""
        if self._proved:
            return
        path = temporary_name(secrets.token_hex(8))
        what = self._what("write", "")
        try:
            for _ in range(2):
                self._asked(what, "put", self._key + path, b"1", mode="create", use_multipart=False)
        except Refused:
            self._proved = True
        except StorageError as error:
            if "NotImplemented" in str(error) or "501" in str(error):
                raise no_conditional_put(self.name, "it does not implement conditional puts") from None
            raise
        finally:
            with contextlib.suppress(StorageError):
                self.delete(path)
        if not self._proved:
            raise no_conditional_put(self.name, "it replaced an object that a conditional put must not touch")

    # -- the client ------------------------------------------------------------------------------------------------

    def _client(self, retries: int) -> Any:
        import obstore.store as stores

        of_kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[self._kind]
        limits = self._options.deadlines
        bound_s = limits.attempt_s + (PART_BYTES if retries else SPAN_BYTES) / limits.slowest_bytes_per_s
        times = {"timeout": f"{bound_s * 1000:.0f}ms", "connect_timeout": f"{limits.attempt_s * 1000:.0f}ms"}
        try:
            return of_kind(
                self._bucket,
                config=self._options.config,
                client_options={**times, **self._options.client},
                retry_config={"max_retries": retries},
                credential_provider=self._options.provider,
            )
        except Exception as error:
            advice = "docs/how-to/s3.md lists the options"
            raise ConfigError(f"cannot open {self.name}: {shown(error, self._options)} ({advice})") from None

    def _in_child(self) -> Storage | None:
        """Return the storage that a forked process reads with; None if obstore may be used."""
        if not _Fork.made_this:
            return None
        with _Fork.lock:
            if self._child is None or (self._child[1] is not None and datetime.now(UTC) >= self._child[1]):
                self._child = self._opened_in_child()
            return self._child[0]

    def _opened_in_child(self) -> tuple[Storage, datetime | None]:
        """Open S3 through s3fs; also when its credentials expire, if that is known."""
        from lakeckpt.lake.storage.fsspec import FsspecStorage

        if self._kind == "s3":
            with contextlib.suppress(ImportError):
                import s3fs

                keys = self._options.keys()
                filesystem = s3fs.S3FileSystem(**self._options.for_s3fs(keys), skip_instance_cache=True)
                place = f"{self._bucket}/{self._key}".rstrip("/")
                return FsspecStorage(filesystem, place, name=self.name), keys.get("expires_at")
        raise ConfigError(
            f"{self.name} was opened before this process was forked, and its client does not survive a fork: start "
            "worker processes by forkserver or spawn (multiprocessing_context='forkserver'), or install s3fs, by which "
            "forked processes read S3"
        )

    def _what(self, verb: str, path: str) -> str:
        return f"cannot {verb} {path!r} in {self.name}" if path else f"cannot {verb} {self.name}"

    def _asked(self, what: str, method: str, *arguments: Any, size_bytes: int = 0, **named: Any) -> Any:
        return self._retrier.call(what, lambda: self._ask(what, method, *arguments, **named), size_bytes=size_bytes)

    def _ask(self, what: str, method: str, *arguments: Any, by: str = "requests", **named: Any) -> Any:
        """Make one request of obstore. Raises `Retryable`, or the error that is final."""
        if _Fork.made_this:
            self._in_child()
            raise StorageError(f"{self.name} is only read in a forked process: write in the process that opened it")
        import obstore

        with self._explaining(what):
            return getattr(obstore, method)(getattr(self._clients, by), *arguments, **named)

    @contextlib.contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, ConfigError, Retryable):
            raise
        except Exception as error:
            failure = failure_of(error, what, self._options)
        else:
            return
        raise failure


def _etag(entry: Mapping[str, Any]) -> str | None:
    return (entry["e_tag"] or "").strip('"') or None


def _without_placeholders(found: Infos) -> Infos:
    """Return objects sorted by path, without empty ones that stand for a folder."""
    found.sort(key=lambda info: info.path)
    if all(info.size_bytes for info in found):
        return found
    folders = {info.path[: slash.start()] for info in found for slash in re.finditer("/", info.path)}
    return [info for info in found if info.size_bytes or info.path not in folders]


def _rebuild(uri: str, storage_options: Mapping[str, Any]) -> ObjectStorage:
    return ObjectStorage(uri, storage_options=storage_options)
