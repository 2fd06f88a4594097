"""How do the five methods of `Storage` hold over S3 and what speaks like it?

Listings come from the store, page by page. Reads are ranges of 8 MiB, several in flight, all of one ETag. Small objects
are put in one request; large ones as a multipart upload, parts in flight, that becomes an object only by its last
request. ``put_new`` is a put with If-None-Match, trusted only once the store has refused a second one to the same key:
some stores ignore the condition. Where the answer to it was lost, the object is read back.

A writer that dies in the middle leaves at most one upload per object that it was writing. No put completes an upload
that is older than `UPLOAD_LIFETIME_S`, so that `S3Storage.clear_leftovers` may abort older ones of our own names. Other
people's uploads are never aborted.

The client is made when first used, once in each process. Credentials stay in `Secrets`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import unquote_plus

from lakeckpt.errors import (
    ConfigError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    StorageError,
    StorageTimeout,
)
from lakeckpt.lake.chunks import CallersError, guarded, take_up_to, unwrapping
from lakeckpt.lake.deadlines import Retrier
from lakeckpt.lake.folders import TEMPORARY_PREFIX, TEMPORARY_SUFFIX, is_temporary
from lakeckpt.lake.s3_client import Page, Refused, S3Client, Upload
from lakeckpt.lake.s3_options import S3Options
from lakeckpt.lake.storage import (
    Buffer,
    ObjectInfo,
    check_key,
    check_prefix,
    check_range,
    no_conditional_put,
    redact_uri,
    split_uri,
)

__all__ = ["S3Storage"]

SPAN_BYTES = 8 << 20
SINGLE_PUT_BYTES = 32 << 20
PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4
MAX_PARTS = 10_000
UPLOAD_LIFETIME_S = 3600.0
_READ_TRIES = 3


class _Making:
    """One lock for all; a forked process gets a new one, as the old one may be held by a thread that it has not."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.lock = threading.Lock()


_making = _Making()
os.register_at_fork(after_in_child=_making.renew)


class S3Storage:
    """A `Storage` at ``s3://bucket/prefix``; ``storage_options`` as `S3Options` says."""

    __slots__ = ("_bucket", "_client", "_conditional", "_options", "_place", "_root", "_uri", "name")

    def __init__(
        self,
        uri: str,
        *,
        storage_options: Mapping[str, Any] | S3Options | None = None,
        place: tuple[str, str] | None = None,
    ) -> None:
        self._uri = uri.rstrip("/")
        self._bucket, _, root = split_uri(self._uri)[1].partition("/")
        if not self._bucket or "@" in self._bucket or ":" in self._bucket:
            raise ConfigError(f"an S3 URL looks like s3://bucket/folder, not {redact_uri(uri)!r}; options go beside it")
        self._root = f"{root}/" if root else ""
        self._options = storage_options if isinstance(storage_options, S3Options) else S3Options.of(storage_options)
        self._client: tuple[int, S3Client] | None = None
        self._place = place  # of the bucket, where another storage found it
        self._conditional = False
        self.name = redact_uri(self._uri)

    def __repr__(self) -> str:
        return f"S3Storage({self.name!r})"

    @property
    def place(self) -> str:
        """What tells it apart from places of the same name at other endpoints."""
        told = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
        return f"{self._options.endpoint or next(filter(None, told), '')} {self._bucket} {self._root}"

    def __reduce__(self) -> tuple[Any, ...]:
        place = self._place if self._client is None else self._client[1].place
        return (_rebuild, (self._uri, self._options, place))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        folder = check_prefix(prefix)
        with self._explaining("list", folder) as what:
            try:
                below = f"{self._root}{folder}/" if folder else self._root
                found = self._listed(what, below)
                if folder and not found:
                    page = self._open().list_page(what, self._root + folder, None, most=1)
                    found = tuple(info for info in self._infos(page) if info.path == folder)
            except Refused as refused:
                if refused.code == "NoSuchBucket":
                    return []
                raise
        return sorted(found, key=lambda info: info.path)

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        check_key(path)
        if not check_range(path, start, stop):
            return b""
        with self._explaining("read", path) as what:
            for tries_left in reversed(range(_READ_TRIES)):
                try:
                    return self._read(what, self._root + path, start, stop, etag)
                except Refused as refused:
                    if refused.status != 412:
                        raise
                    failure: ObjectChanged = ObjectChanged(f"{what}: it was written again (its ETag is another)")
                except ObjectChanged as changed:
                    failure = changed
                if etag is not None or not tries_left:
                    raise failure from None
        raise AssertionError("the loop returns or raises")

    def put(self, path: str, chunks: Iterable[Buffer]) -> int:
        check_key(path)
        with unwrapping(), self._explaining("write", path) as what:
            head, rest, size = take_up_to(guarded(chunks), SINGLE_PUT_BYTES)
            if rest is not None:
                return self._upload(what, self._root + path, itertools.chain(head, rest))
            self._open().put(what, self._root + path, [memoryview(chunk) for chunk in head])
            return size

    def put_new(self, path: str, data: bytes) -> None:
        check_key(path)
        self._require_conditional_put()
        with self._explaining("write", path) as what:
            try:
                self._open().put(what, self._root + path, [memoryview(data)], new=True)
                return
            except Refused as refused:
                if refused.status != 412:
                    raise
        # Ours, if the answer to the put that succeeded was lost and the put made again.
        if self.read(path, 0, len(data) + 1) != data:
            raise ObjectExists(f"there is an object at {path!r} in {self.name} already")

    def delete(self, path: str) -> None:
        check_key(path)
        with self._explaining("delete", path) as what:
            try:
                self._open().delete(what, self._root + path)
            except Refused as refused:
                if refused.status != 404:
                    raise

    # -- beside the Protocol ---------------------------------------------------------------------------------------

    def has_bucket(self) -> bool:
        """Whether the bucket is there; `list` says of one that is not that nothing is in it."""
        with self._explaining("list", "") as what:
            try:
                self._open().list_page(what, self._root, None, most=1)
            except Refused as refused:
                if refused.code == "NoSuchBucket":
                    return False
                raise
        return True

    def clear_leftovers(self, *, uploads: re.Pattern[str] | None = None) -> int:
        """Abort the multipart uploads of ours that no writer can complete any more; return how many.

        These are older than `UPLOAD_LIFETIME_S`, by the store's own clock, and their path matches ``uploads``.
        """
        cleared, marker = 0, None
        with self._explaining("clear", "") as what:
            while uploads is not None:
                try:
                    page = self._open().uploads_page(what, self._root, marker)
                except Refused as refused:
                    if refused.code == "NoSuchBucket":
                        return cleared
                    raise
                now = time.time() if page.date is None else parsedate_to_datetime(page.date).timestamp()
                for item in page.items:
                    begun_ns, key = _nanoseconds(item.get("Initiated")), unquote_plus(item.get("Key", ""))
                    old = begun_ns is not None and now - begun_ns / 1e9 > UPLOAD_LIFETIME_S
                    if old and key.startswith(self._root) and uploads.fullmatch(key[len(self._root) :]):
                        self._open().abort_upload(what, key, item.get("UploadId", ""))
                        cleared += 1
                if page.next is None or page.next == marker:
                    return cleared
                marker = unquote_plus(page.next)
        return cleared

    # -- reading ---------------------------------------------------------------------------------------------------

    def _listed(self, what: str, below: str) -> Sequence[ObjectInfo]:
        client = self._open()
        found: list[ObjectInfo] = []
        seen: set[str] = set()
        page = client.list_page(what, below, None)
        while page.next is not None:
            if page.next in seen:
                raise StorageError(f"{what}: the store repeats a page of its listing without end")
            seen.add(page.next)
            coming = client.pool.submit(client.list_page, what, below, page.next)  # while this one is looked at
            found += self._infos(page)
            page = coming.result()
        return [*found, *self._infos(page)]

    def _infos(self, page: Page) -> Iterator[ObjectInfo]:
        for item in page.items:
            path = unquote_plus(item.get("Key", ""))[len(self._root) :]
            if not path or path.endswith("/") or is_temporary(path):
                continue
            etag = item.get("ETag", "").strip('"') or None
            size = int(item.get("Size", "-1"))
            yield ObjectInfo(path=path, size_bytes=size, etag=etag, mtime_ns=_nanoseconds(item.get("LastModified")))

    def _read(self, what: str, key: str, start: int, stop: int | None, etag: str | None) -> bytes:
        client = self._open()
        if start == 0 and stop is None:
            whole = client.get_whole(what, key, etag, SPAN_BYTES)
            if whole.data is not None:
                return whole.data
            etag, stop, head = whole.etag, whole.size_bytes, b""
        else:
            first = client.get_span(what, key, start, min(start + SPAN_BYTES, stop or 2**62), etag)
            assert first.data is not None
            head = first.data
            etag, stop = first.etag, min(stop or 2**62, first.size_bytes)
        begin = start + len(head)
        if begin >= stop:
            return head
        spans = [(at, min(at + SPAN_BYTES, stop)) for at in range(begin, stop, SPAN_BYTES)]
        jobs = [partial(client.get_span, what, key, low, high, etag) for low, high in spans]
        return b"".join([head, *(span.data or b"" for span in client.together(jobs))])

    # -- writing ---------------------------------------------------------------------------------------------------

    def _upload(self, what: str, key: str, chunks: Iterable[Buffer]) -> int:
        """Write an object in parts, visible only once it is whole; on any failure its upload is aborted."""
        client, begun = self._open(), time.monotonic()
        upload = client.create_upload(what, key, secrets.token_hex(16))
        try:
            etags, size = self._put_parts(what, upload, chunks)
            if time.monotonic() - begun > UPLOAD_LIFETIME_S / 2:
                raise StorageTimeout(f"{what}: writing it took over {UPLOAD_LIFETIME_S / 2:.0f} s: it was given up")
            client.complete_upload(what, upload, etags, size)
            return size
        except BaseException:
            with contextlib.suppress(Refused, StorageError):
                client.abort_upload(what, key, upload.upload_id)
            raise

    def _put_parts(self, what: str, upload: Upload, chunks: Iterable[Buffer]) -> tuple[Sequence[str], int]:
        client, size = self._open(), 0
        etags: list[str] = []
        running: list[Future[str]] = []
        try:
            for number, part in enumerate(_parts(chunks), 1):
                if number > MAX_PARTS:
                    raise StorageError(f"{what}: it has more than the {size} bytes that an upload can have")
                size += len(part)
                running.append(client.pool.submit(client.put_part, what, upload, number, memoryview(part)))
                if len(running) >= PARTS_IN_FLIGHT:
                    etags.append(running.pop(0).result())
            etags += [job.result() for job in running]
        finally:
            for job in running:
                if not job.cancel():
                    job.exception()
        return etags, size

    def _require_conditional_put(self) -> None:
        """Make sure, once, that the store refuses to put where an object is."""
        if self._conditional:
            return
        path = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        try:
            with self._explaining("write", "") as what:
                try:
                    for data in (b"1", b"2"):
                        self._open().put(what, self._root + path, [memoryview(data)], new=True)
                except Refused as refused:
                    if refused.status == 501 or refused.code == "NotImplemented":
                        raise no_conditional_put(self.name, "it does not implement conditional puts") from None
                    if refused.status != 412:
                        raise
                    self._conditional = True
                    return
            raise no_conditional_put(self.name, "it replaced an object that a conditional put must not touch")
        finally:
            with contextlib.suppress(StorageError):
                self.delete(path)

    # -- the client ------------------------------------------------------------------------------------------------

    def _open(self) -> S3Client:
        """The client of this process, made once, however many threads come at once: it costs 0.1 s."""
        made, process = self._client, os.getpid()
        if made is None or made[0] != process:
            with _making.lock:
                made = self._client
                if made is None or made[0] != process:
                    place = made[1].place if made is not None else self._place
                    client = S3Client(self._bucket, self._options, Retrier(self._options.deadlines), place)
                    self._client = made = (process, client)
        return made[1]

    @contextlib.contextmanager
    def _explaining(self, verb: str, path: str) -> Iterator[str]:
        """Turn refusals into our errors. What other errors say is ours already, and holds no credentials."""
        where = f"{path!r} in {self.name}" if path else self.name
        try:
            yield f"cannot {verb} {where}"
        except (StorageError, ConfigError, CallersError, Refused) as error:
            if not isinstance(error, Refused):
                raise
            failure = _explained(error, verb, where)
        else:
            return
        raise failure from None


def _explained(refused: Refused, verb: str, where: str) -> StorageError:
    if refused.code == "NoSuchBucket" or (refused.status == 404 and verb != "read"):
        missing = StorageError(f"cannot {verb} {where}: its bucket is not there: check its name, and the endpoint")
        if verb == "read":
            missing = ObjectMissing(f"there is no object {where}: its bucket is not there")
        missing.errno = errno.ENOENT
        return missing
    if refused.status == 404:
        return ObjectMissing(f"there is no object {where}")
    if refused.status in (401, 403):
        error = StorageError(
            f"cannot {verb} {where}: the store refuses the credentials ({refused}): check them and the bucket's policy"
        )
        error.errno = errno.EACCES
        return error
    error = StorageError(f"cannot {verb} {where}: the store answered {refused}")
    error.errno = errno.EREMOTEIO
    return error


def _rebuild(uri: str, options: S3Options, place: tuple[str, str] | None = None) -> S3Storage:
    return S3Storage(uri, storage_options=options, place=place)


def _parts(chunks: Iterable[Buffer]) -> Iterator[bytearray]:
    """The same bytes in parts of `PART_BYTES`, which grow so that 10,000 of them hold the largest object (5 TB)."""
    part, number = bytearray(), 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(view):
            full = PART_BYTES << min(number // 1000, 6)
            taken = view[: full - len(part)]
            part += taken
            view = view[len(taken) :]
            if len(part) == full:
                yield part
                part, number = bytearray(), number + 1
    if part or not number:
        yield part


def _nanoseconds(text: str | None) -> int | None:
    try:
        return None if text is None else int(datetime.fromisoformat(text).timestamp() * 1_000_000) * 1000
    except ValueError:
        return None
