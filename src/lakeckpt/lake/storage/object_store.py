"""This module stores objects in S3, Google's and Azure's stores, through obstore.

One request moves at most `SPAN_BYTES` to read and `PART_BYTES` to write, so that one timeout fits all. Larger reads are
requests side by side, all of one ETag (If-Match). Objects up to `SINGLE_PUT_BYTES` are put by one request, larger ones
by a multipart upload, which becomes an object only by its last request. ``put_new`` is a conditional put, trusted on S3
only once the store has refused a second one to the same key: some stores ignore the condition. Where the answer was
lost, the object is read back. Many objects are deleted by one request, and one by one where a store refuses batches.
Retries and deadlines are those of `Retrier`: obstore itself retries the parts of an upload and nothing else. A writer
that dies leaves an upload without an object: a lifecycle rule of the bucket removes it.

obstore's threads do not survive a fork, and a forked child that uses or drops its client can hang, together with its
parent. So a process that was forked after a client was made never touches obstore: it keeps the inherited clients alive
and reads S3 through s3fs, as a `FsspecStorage`. obstore starts threads, once in a process; they end with it.
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
from typing import Any, TypeVar

from lakeckpt.errors import (
    ConfigError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    StorageError,
)
from lakeckpt.lake.storage.base import (
    Buffer,
    CallersError,
    ObjectInfo,
    Storage,
    check_key,
    check_prefix,
    check_range,
    guarded,
    is_temporary,
    no_conditional_put,
    redact_uri,
    split_uri,
    take_up_to,
    temporary_name,
    unwrapping,
)
from lakeckpt.lake.storage.options import StoreOptions
from lakeckpt.lake.storage.retry import Retrier, Retryable

__all__ = ["SCHEMES", "ObjectStorage"]

T = TypeVar("T")
Infos = list[ObjectInfo]
SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az"}
SPAN_BYTES = 8 << 20
SINGLE_PUT_BYTES = 32 << 20
PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4
SPANS_IN_FLIGHT = 8
DELETES_AT_ONCE = 1000
_READ_TRIES = 3
_LARGEST_UPLOAD = 10_000 * PART_BYTES
_PART_RETRIES = 4
_STATUS = re.compile(r"status code: (\d+)")
_CODE, _MESSAGE = re.compile(r"<Code>([^<]*)</Code>"), re.compile(r"<Message>([^<]*)</Message>")
_PASSING = frozenset({408, 409, 429})
_PASSING_CODES = frozenset({"ExpiredToken", "RequestTimeout", "RequestTimeTooSkewed"})
_PLACE = re.compile(r"(?P<bucket>[^@:/?#]+)(@(?P<account>[\w-]+)\.[\w.-]+)?")


class _Client:
    """The clients of one storage in one process: ``batches`` deletes many objects with one request, ``store`` one."""

    __slots__ = ("__weakref__", "batches", "process", "store", "uploads")

    def __init__(self, make: Callable[..., Any]) -> None:
        self.process = os.getpid()
        self.store, self.uploads, self.batches = make(0), make(_PART_RETRIES), make(0, in_batches=True)
        _clients.add(self)


class _Process:
    """Whether this process may use obstore; its lock. ``born_by_fork`` is true in a child of a process that did."""

    __slots__ = ("born_by_fork", "lock", "spans")

    def __init__(self) -> None:
        self.born_by_fork = False
        self.renew()

    def renew(self) -> None:
        self.lock = threading.Lock()
        self.spans: ThreadPoolExecutor | None = None

    def together(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        with self.lock:
            if self.spans is None:
                self.spans = ThreadPoolExecutor(SPANS_IN_FLIGHT, thread_name_prefix="lakeckpt-spans")
        running = [self.spans.submit(job) for job in jobs]
        try:
            return [one.result() for one in running]
        finally:
            for one in running:
                one.cancel()


_clients: weakref.WeakSet[_Client] = weakref.WeakSet()
_process = _Process()


def _after_fork() -> None:
    """Keep what was inherited for ever: a child that drops a client would take its connections from the parent."""
    for client in list(_clients):
        for one in (client, client.store, client.uploads, client.batches):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        _process.born_by_fork = True
    _process.renew()


os.register_at_fork(after_in_child=_after_fork)


class ObjectStorage:
    """A `Storage` at ``s3://bucket/folder``, ``gs://…`` or ``az://…``; ``storage_options`` as `StoreOptions` says."""

    __slots__ = ("_bucket", "_child", "_client", "_given", "_key", "_options", "_proved", "_retrier", "_uri", "name")

    def __init__(self, uri: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        scheme, rest = split_uri(uri)
        self._uri = uri.rstrip("/")
        self.name = redact_uri(self._uri)
        place, _, root = rest.rstrip("/").partition("/")
        match = _PLACE.fullmatch(place)
        if match is None or (match["account"] and SCHEMES[scheme] != "az"):
            raise ConfigError(f"a URL of a store looks like {scheme}://bucket/folder, not {redact_uri(uri)!r}")
        if "//" in f"/{root}":
            raise ConfigError(
                f"{self.name} has an empty folder name ('//'), which obstore cannot name: move the objects, or open a "
                "table through filesystem=s3fs.S3FileSystem(…)"
            )
        if match["account"]:
            self.name = self._uri
        self._bucket, self._key = match["bucket"], f"{root}/" if root else ""
        self._given = dict(storage_options or {})
        account = {"account_name": match["account"]} if match["account"] else {}
        self._options = StoreOptions.of({**account, **self._given}, scheme=SCHEMES[scheme])
        self._retrier = Retrier(self._options.deadlines)
        self._client: _Client | None = None
        self._child: tuple[Storage, datetime | None] | None = None
        self._proved = SCHEMES[scheme] != "s3"
        if not _process.born_by_fork:
            self._open()  # which says what is wrong with the options

    def __repr__(self) -> str:
        return f"ObjectStorage({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._uri, self._given))

    @property
    def place(self) -> str:
        """What tells the storage apart from places of the same name at other endpoints."""
        return f"{self._options.config.get('endpoint', '')} {self._bucket} {self._key}"

    def list(self, prefix: str = "") -> Infos:
        if (child := self._in_child()) is not None:
            return child.list(prefix)
        folder = check_prefix(prefix)
        what = self._what("list", folder)
        try:
            found = [info for page in self._pages(what, f"{self._key}{folder}") for info in page]
        except _BucketMissing:
            return []
        if folder and not found:
            with contextlib.suppress(ObjectMissing):
                found = self._infos([self._asked(what, "head", f"{self._key}{folder}")])
        return _without_placeholders(found)

    def list_after(self, prefix: str, after: str, *, limit: int) -> Infos:
        """Return the first ``limit`` objects of a folder whose path sorts after ``after``: usually one request."""
        found: Infos = []
        folder = f"{self._key}{check_prefix(prefix)}"
        with contextlib.suppress(_BucketMissing):
            for page in self._pages(self._what("list", prefix), folder, offset=self._key + after, page=limit):
                found += page
                if len(found) >= limit:
                    break
        return found[:limit]

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        if (child := self._in_child()) is not None:
            return child.read(path, start, stop, etag=etag)
        check_key(path)
        if not check_range(path, start, stop):
            return b""
        what = self._what("read", path)
        for _ in range(_READ_TRIES - 1 if etag is None else 0):
            with contextlib.suppress(ObjectChanged):
                return self._read(what, path, start, stop, None)
        return self._read(what, path, start, stop, etag)

    def put(self, path: str, chunks: Iterable[Buffer]) -> int:
        check_key(path)
        what, key = self._what("write", path), self._key + path
        with unwrapping():
            head, rest, size = take_up_to(guarded(chunks), SINGLE_PUT_BYTES)
            if rest is None:
                data = head[0] if len(head) == 1 else b"".join(head)
                self._asked(what, "put", key, data, size_bytes=size, use_multipart=False)
                return size
            whole = _Uploaded(head, rest)
            again = not isinstance(chunks, Iterator)

            def attempt(until: float) -> int:
                nonlocal whole
                if whole.begun:
                    whole = _Uploaded([], guarded(chunks))
                self._ask("put", key, whole, chunk_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT, of="uploads")
                return whole.size_bytes

            try:
                return self._call(what, attempt, size_bytes=_LARGEST_UPLOAD) if again else self._once(what, attempt)
            finally:
                whole.close()

    def put_new(self, path: str, data: bytes) -> None:
        check_key(path)
        self._require_conditional_put()
        what = self._what("write", path)

        def attempt(until: float) -> None:
            try:
                self._ask("put", self._key + path, data, mode="create", use_multipart=False)
            except _Refused:
                with contextlib.suppress(ObjectMissing):  # then another's put to the key was under way, and failed
                    if self.read(path, 0, len(data) + 1) == data:
                        return  # the answer to it was lost
                    raise ObjectExists(f"there is an object at {path!r} in {self.name} already") from None
                raise Retryable("another put to the same key was under way") from None

        self._call(what, attempt, size_bytes=len(data))

    def delete(self, path: str) -> None:
        check_key(path)
        with contextlib.suppress(ObjectMissing):
            self._asked(self._what("delete", path), "delete", self._key + path)

    def delete_all(self, paths: Sequence[str]) -> None:
        """Delete many objects, up to `DELETES_AT_ONCE` with one request. It is no error if some are not there."""
        for path in paths:
            check_key(path)
        for at in range(0, len(paths), DELETES_AT_ONCE):
            some = list(paths[at : at + DELETES_AT_ONCE])
            if not self._deleted_at_once(some):
                for path in some:
                    self.delete(path)

    def _deleted_at_once(self, paths: Sequence[str]) -> bool:
        """Return False where the store refuses batches, or stopped at an object that is not there."""
        keys = [self._key + path for path in paths]
        try:
            self._retrier.call(self._what("delete", paths[0]), lambda until: self._ask("delete", keys, of="batches"))
        except _Final:
            return False
        return True

    # -- beside the Protocol ---------------------------------------------------------------------------------------

    def has_bucket(self) -> bool:
        """Return whether the bucket is there; `list` says of one that is not that nothing is in it."""
        try:
            next(self._pages(self._what("list", ""), self._key.rstrip("/"), page=1), None)
        except _BucketMissing:
            return False
        return True

    # -- reading ---------------------------------------------------------------------------------------------------

    def _pages(self, what: str, prefix: str, *, offset: str | None = None, page: int = 1000) -> Iterator[Infos]:
        stream: Any = None

        def next_page(until: float) -> Any:
            nonlocal stream
            try:
                if stream is None:
                    stream = self._ask("list", prefix.rstrip("/"), offset=offset, chunk_size=page)
                with self._translated():
                    return next(stream, None)
            except BaseException:
                stream = None  # the next attempt goes on behind what has come
                raise

        while (entries := self._call(what, next_page)) is not None:
            if entries:
                offset = entries[-1]["path"]
                yield self._infos(entries)

    def _infos(self, entries: Iterable[Mapping[str, Any]]) -> Infos:
        cut = len(self._key)
        return [
            ObjectInfo(
                path=one["path"][cut:],
                size_bytes=one["size"],
                etag=(one["e_tag"] or "").strip('"') or None,
                mtime_ns=int(one["last_modified"].timestamp() * 1_000_000) * 1000,
            )
            for one in entries
            if len(one["path"]) > cut and not is_temporary(one["path"])
        ]

    def _read(self, what: str, path: str, start: int, stop: int | None, etag: str | None) -> bytes:
        first, size, found = self._span(what, path, start, min(start + SPAN_BYTES, stop or 2**62), etag)
        stop = size if stop is None else min(stop, size)
        at = start + len(first)
        if at >= stop:
            return first
        bounds = [(low, min(low + SPAN_BYTES, stop)) for low in range(at, stop, SPAN_BYTES)]
        jobs = [lambda low=low, high=high: self._span(what, path, low, high, found)[0] for low, high in bounds]
        return b"".join([first, *_process.together(jobs)])

    def _span(self, what: str, path: str, start: int, stop: int, etag: str | None) -> tuple[bytes, int, str | None]:
        """Return bytes [start, stop) of an object, its size and its ETag; no bytes where it ends before ``start``."""
        options: dict[str, Any] = {"range": (start, stop)}
        if etag is not None:
            options["if_match"] = f'"{etag}"'

        def attempt(until: float) -> tuple[bytes, int, str | None]:
            try:
                answer = self._ask("get", self._key + path, options=options)
            except _Refused:
                raise ObjectChanged(f"{what}: it was written again (its ETag is another)") from None
            except _BehindTheEnd:
                return b"", start, etag
            except Retryable as failure:
                if "non-partial response" in str(failure) and self._is_empty(path, etag):
                    return b"", start, etag
                raise
            meta = answer.meta
            now = (meta["e_tag"] or "").strip('"') or None
            if etag is not None and now not in (None, etag):
                raise ObjectChanged(f"{what}: it has the ETag {now}, not {etag}: it was written again")
            with self._translated():
                data = bytes(answer.bytes())
            if answer.range != (start, min(stop, meta["size"])) or len(data) != answer.range[1] - start:
                raise Retryable(f"the answer has {len(data)} bytes and calls them {answer.range}", errno=errno.EPROTO)
            return data, meta["size"], now

        return self._call(what, attempt, size_bytes=stop - start)

    def _is_empty(self, path: str, etag: str | None) -> bool:
        """Return whether an object has no bytes: nginx then answers with status 200, whatever the range."""
        meta = self._ask("head", self._key + path)
        return meta["size"] == 0 and etag in (None, (meta["e_tag"] or "").strip('"'))

    # -- writing ---------------------------------------------------------------------------------------------------

    def _require_conditional_put(self) -> None:
        """Make sure, once, that the store refuses to put where an object is."""
        if self._proved:
            return
        path = temporary_name(secrets.token_hex(8))
        what, key = self._what("write", ""), self._key + path

        def refused(until: float) -> bool:
            try:
                self._ask("put", key, b"1", mode="create", use_multipart=False)
            except _Refused:
                return True
            return False

        try:
            self._proved = self._call(what, refused) or self._call(what, refused)
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

    def _in_child(self) -> Storage | None:
        """Return the storage that a forked process reads with; None where obstore may be used."""
        if not _process.born_by_fork:
            return None
        with _process.lock:
            if self._child is None or (self._child[1] is not None and datetime.now(UTC) >= self._child[1]):
                self._child = self._opened_in_child()
            return self._child[0]

    def _opened_in_child(self) -> tuple[Storage, datetime | None]:
        from lakeckpt.lake.storage.fsspec import FsspecStorage

        if SCHEMES[split_uri(self._uri)[0]] == "s3":
            try:
                import s3fs
            except ImportError:
                pass
            else:
                expires = self._options.provider() if self._options.provider is not None else {}
                filesystem = s3fs.S3FileSystem(**self._options.for_s3fs(), skip_instance_cache=True)
                place = f"{self._bucket}/{self._key}".rstrip("/")
                return FsspecStorage(filesystem, place, name=self.name), expires.get("expires_at")
        raise ConfigError(
            f"{self.name} was opened before this process was forked, and its client does not survive a fork: start "
            "worker processes by forkserver or spawn (multiprocessing_context='forkserver'), or install s3fs, by which "
            "forked processes read S3"
        )

    def _open(self) -> _Client:
        client = self._client
        if client is None or client.process != os.getpid():
            with _process.lock:
                client = self._client
                if client is None or client.process != os.getpid():
                    client = self._client = _Client(self._made)
        return client

    def _made(self, retries: int, *, in_batches: bool = False) -> Any:
        import obstore.store as stores

        kind = SCHEMES[split_uri(self._uri)[0]]
        of_kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[kind]
        alone = {"disable_bulk_delete": True} if kind == "s3" and not in_batches else {}  # some stores have no batches
        limits = self._options.deadlines
        bound_s = limits.attempt_s + (SPAN_BYTES if not retries else PART_BYTES) / limits.slowest_bytes_per_s
        client = {"timeout": f"{bound_s * 1000:.0f}ms", "connect_timeout": f"{limits.attempt_s * 1000:.0f}ms"}
        try:
            return of_kind(
                self._bucket,
                config={**self._options.config, **alone},
                client_options={**client, **self._options.client},
                retry_config={"max_retries": retries},
                credential_provider=self._options.provider,
            )
        except Exception as error:
            raise ConfigError(f"cannot open {self.name}: {self._shown(error)}") from None

    def _what(self, verb: str, path: str) -> str:
        return f"cannot {verb} {path!r} in {self.name}" if path else f"cannot {verb} {self.name}"

    def _asked(self, what: str, method: str, *arguments: Any, size_bytes: int = 0, **named: Any) -> Any:
        return self._call(what, lambda until: self._ask(method, *arguments, **named), size_bytes=size_bytes)

    def _ask(self, method: str, *arguments: Any, of: str = "store", **named: Any) -> Any:
        """Make one request of obstore."""
        if _process.born_by_fork:
            self._opened_in_child()
            raise StorageError(f"{self.name} is only read in a forked process: write in the process that opened it")
        import obstore

        client = self._open()
        with self._translated():
            return getattr(obstore, method)(getattr(client, of), *arguments, **named)

    def _call(self, what: str, attempt: Callable[[float], T], *, size_bytes: int = 0) -> T:
        try:
            return self._retrier.call(what, attempt, size_bytes=size_bytes)
        except _Final as failure:
            raise failure.error(what) from None

    def _once(self, what: str, attempt: Callable[[float], T]) -> T:
        try:
            return attempt(0.0)
        except _Final as failure:
            raise failure.error(what) from None
        except Retryable as failure:
            error = failure.kind(f"{what}: {failure}")
            error.errno = failure.errno
            raise error from None

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what obstore raises into `Retryable`, or into one of the final failures below."""
        try:
            yield
        except (StorageError, ConfigError, CallersError, Retryable):
            raise
        except Exception as error:
            failure = _failure(error, self._shown(error))
        else:
            return
        raise failure

    def _shown(self, error: BaseException) -> str:
        """Return an error's text in one line, without secrets and without what is for obstore's authors."""
        text = str(error).partition("\n\nDebug source")[0]
        code, message = _CODE.search(text), _MESSAGE.search(text)
        status = _STATUS.search(text)
        if status is not None:
            named = f" {code[1]}" if code is not None else ""
            text = f"the store answered {status[1]}{named}" + (f": {message[1]}" if message is not None else "")
        if "169.254.169.254" in text:
            text = (
                "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass key and secret, "
                "or anon=True, as storage_options"
            )
        return self._options.scrub(" ".join(text.split())[:500])


class _Uploaded:
    """The chunks of an upload on their way to obstore: counted, and with an end that `close` can bring about."""

    def __init__(self, head: list[bytes], rest: Iterator[memoryview]) -> None:
        self.begun, self.size_bytes = False, 0
        self._head, self._rest = head, rest

    def __iter__(self) -> Iterator[bytes]:
        self.begun = True
        for chunk in self._head:
            self.size_bytes += len(chunk)
            yield chunk
        self._head = []
        for view in self._rest:
            for at in range(0, len(view), PART_BYTES):
                part = bytes(view[at : at + PART_BYTES])
                self.size_bytes += len(part)
                yield part

    def close(self) -> None:
        """Drop what was not sent."""
        self._head, self._rest = [], iter(())


class _Final(Exception):
    """A failure that another attempt would meet again."""

    kind: type[StorageError] = StorageError

    def __init__(self, text: str, code: int = errno.EREMOTEIO) -> None:
        super().__init__(text)
        self.errno = code

    def error(self, what: str) -> StorageError:
        error = self.kind(f"{what}: {self}")
        error.errno = self.errno
        return error


class _Missing(_Final):
    kind = ObjectMissing


class _BucketMissing(ObjectMissing):
    """Listings take it for an empty folder."""


class _NoBucket(_Final):
    kind = _BucketMissing


class _Refused(_Final):
    """The object is not as the condition of the request says."""


class _BehindTheEnd(_Final):
    """The range begins where the object ends, or behind."""


def _failure(error: Exception, text: str) -> Exception:
    """Return what an exception of obstore means."""
    name, whole = type(error).__name__, str(error)
    status = int(found[1]) if (found := _STATUS.search(whole)) is not None else None
    code = match[1] if (match := _CODE.search(whole)) is not None else ""
    if "empty path segment" in text:
        return _Final(f"{text}. Move that object, or open a table through filesystem=s3fs.S3FileSystem(…)")
    if code == "NoSuchBucket":
        return _NoBucket("its bucket is not there", errno.ENOENT)
    if isinstance(error, FileNotFoundError):
        return _Missing("there is no such object", errno.ENOENT)
    if name in ("PreconditionError", "AlreadyExistsError", "NotModifiedError"):
        return _Refused(text)
    if status == 416:
        return _BehindTheEnd(text)
    if status is not None and status < 500 and status not in _PASSING and code not in _PASSING_CODES:
        return _Final(text, errno.EACCES if status in (401, 403) else errno.EREMOTEIO)
    if name in ("PermissionDeniedError", "UnauthenticatedError", "InvalidPathError", "NotSupportedError"):
        return _Final(text, errno.EACCES)
    if status == 501:
        return _Final(text)
    if "kind: Timeout" in whole or "TimedOut" in whole:
        return Retryable("no whole answer in time", kind=StorageError, errno=errno.ETIMEDOUT)
    if status is None and ("HTTP error" in whole or "error decoding" in whole):
        return Retryable(f"the connection broke ({text})", errno=errno.ECONNRESET)
    return Retryable(text, errno=errno.EREMOTEIO)


def _without_placeholders(found: Infos) -> Infos:
    """Return objects sorted by path, without empty ones that stand for a folder."""
    found.sort(key=lambda info: info.path)
    if all(info.size_bytes for info in found):
        return found
    folders = {info.path[:at] for info in found for at in _slashes(info.path)}
    return [info for info in found if info.size_bytes or info.path not in folders]


def _slashes(path: str) -> Iterator[int]:
    return (at for at, letter in enumerate(path) if letter == "/")


def _rebuild(uri: str, storage_options: Mapping[str, Any]) -> ObjectStorage:
    return ObjectStorage(uri, storage_options=storage_options)
