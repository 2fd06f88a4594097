"""One S3 request each: what is asked, how the answer is checked, and which refusals may pass.

Ranged GETs name the ETag that is expected, and what comes is compared with it, with the range asked and with its stated
length; whole objects with their checksum, where the store keeps one. Every body is sent with its SHA-256, which the
store compares. All go through one `Retrier`; refusals that are final are `Refused`, by the store's own code and never
its message, which may show what was sent. What a sequence of requests means is in ``s3``.

Its threads (ranges and parts in flight) are started when first needed, once in each process, and end with it.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from lakeckpt.errors import ObjectChanged, StorageError
from lakeckpt.lake.deadlines import Retrier, Retryable
from lakeckpt.lake.http import Answer, HttpClient
from lakeckpt.lake.s3_options import S3Options
from lakeckpt.lake.s3_signer import EMPTY_SHA256, Signer

__all__ = ["Page", "Refused", "S3Client", "Span", "Upload"]

T = TypeVar("T")
THREADS = 16
TEXT_BYTES = 64 << 20
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,60})</Code>")
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_PASSING_CODES = frozenset({"RequestTimeout", "ConditionalRequestConflict", "OperationAborted", "SlowDown"})


class Refused(Exception):
    """The store said no, and would say it again."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}".strip())
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes of an object, and what the answer said of the whole: its ETag (None: none), its size."""

    data: bytes | None
    etag: str | None
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a listing: elements as dicts of their leaves, and where the next one begins (None: it is the last)."""

    items: list[dict[str, str]]
    next: str | None
    date: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A multipart upload; ``token`` marks the object that it becomes."""

    key: str
    upload_id: str
    token: str


class S3Client:
    """Requests to one bucket, from one process. Threads may share it."""

    def __init__(self, bucket: str, options: S3Options, retrier: Retrier, place: tuple[str, str] | None = None) -> None:
        self.retrier = retrier
        self._options = options
        self._signer = Signer(bucket, options, place)
        self._http = HttpClient(
            clock=retrier.clock,
            stall_s=retrier.deadlines.attempt_s,
            connections=THREADS * 4,
            verify=self._signer.verify(),
            proxy=self._signer.proxy(),
        )

    @property
    def place(self) -> tuple[str, str]:
        """See `Signer`."""
        return self._signer.place

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """Threads for ranges and parts. What runs in them must not wait for others of them."""
        return ThreadPoolExecutor(THREADS, thread_name_prefix="lakeckpt-s3")

    # -- reading ---------------------------------------------------------------------------------------------------

    def get_span(self, what: str, key: str, start: int, stop: int, etag: str | None) -> Span:
        """Bytes [start, stop) of an object; none (and size 0) where it ends before ``start``."""

        def attempt(until: float) -> Span:
            headers = {"Range": f"bytes={start}-{stop - 1}", **_if_match(etag)}
            try:
                answer = self._once("GET", key, headers=headers, until=until, most_bytes=stop - start)
            except Refused as refused:
                if refused.status == 416:
                    return Span(data=b"", etag=None, size_bytes=0)
                raise
            return _checked_span(answer, start, stop, etag, what)

        return self.retrier.call(what, attempt, size_bytes=stop - start)

    def get_whole(self, what: str, key: str, etag: str | None, most_bytes: int) -> Span:
        """A whole object; no data where it has over ``most_bytes``.

        It is verified by its checksum; where the store keeps none, by the length that a second answer says.
        """

        def attempt(until: float) -> Span:
            headers = {"x-amz-checksum-mode": "ENABLED", **_if_match(etag)}
            answer = self._once("GET", key, headers=headers, until=until, most_bytes=most_bytes)
            found = _etag(answer, etag, what)
            if answer.body is None:
                told = answer.headers.get("content-length")
                if told is None:  # answers that are streamed have no length: a range's answer says the object's
                    return replace(self.get_span(what, key, 0, 1, found), data=None)
                return Span(data=None, etag=found, size_bytes=int(told))
            if not _has_checksum(answer.headers, answer.body):
                told = self._once("HEAD", key, headers=_if_match(found), until=until).headers.get("content-length")
                if told != str(len(answer.body)):
                    raise Retryable(f"the answer has {len(answer.body)} of {told} bytes", errno=errno.EBADMSG)
            return Span(data=answer.body, etag=found, size_bytes=len(answer.body))

        return self.retrier.call(what, attempt, size_bytes=most_bytes)

    def head(self, what: str, key: str) -> Mapping[str, str]:
        """The headers of an object."""
        return self._call(what, "HEAD", key).headers

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, what: str, key: str, data: Sequence[memoryview], *, new: bool = False) -> None:
        """Put a whole object; with ``new`` only where there is none. Asks again after a failure that may pass."""
        size = sum(map(len, data))
        digest = _sha256(data)
        headers = {
            **dict(self._options.put_headers),
            "Content-Type": "application/octet-stream",
            "Content-Length": str(size),
            "x-amz-sdk-checksum-algorithm": "SHA256",
            "x-amz-checksum-sha256": base64.b64encode(digest).decode(),
        }
        if new:
            headers["If-None-Match"] = "*"
        self._call(what, "PUT", key, headers=headers, body=data, sha256=digest.hex(), size_bytes=size)

    def delete(self, what: str, key: str) -> None:
        self._call(what, "DELETE", key)

    def create_upload(self, what: str, key: str, token: str) -> Upload:
        headers = {**dict(self._options.put_headers), "x-amz-meta-lakeckpt-put": token, "Content-Length": "0"}
        answer = self._call(what, "POST", key, query={"uploads": ""}, headers=headers)
        try:
            upload_id = _leaves(_parsed(answer.content)).get("UploadId")
        except Retryable:
            upload_id = None
        if not upload_id:
            raise StorageError(f"{what}: the store began an upload without naming it")
        return Upload(key=key, upload_id=upload_id, token=token)

    def put_part(self, what: str, upload: Upload, number: int, data: memoryview) -> str:
        """Put part ``number`` (from 1) and return its ETag."""
        answer = self._call(
            what,
            "PUT",
            upload.key,
            query={"partNumber": str(number), "uploadId": upload.upload_id},
            headers={"Content-Length": str(len(data))},
            body=[data],
            sha256=_sha256([data]).hex(),
            size_bytes=len(data),
        )
        return answer.headers.get("etag", "")

    def complete_upload(self, what: str, upload: Upload, etags: Sequence[str], size_bytes: int) -> None:
        """Let the parts become the object. An answer that got lost is looked for in the object."""
        parts = "".join(
            f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(etag)}</ETag></Part>" for n, etag in enumerate(etags, 1)
        )
        text = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        body = [memoryview(text)]
        headers = {"Content-Length": str(len(text)), "Content-Type": "application/xml"}
        query = {"uploadId": upload.upload_id}

        def attempt(until: float) -> None:
            answer = self._once(
                "POST", upload.key, query=query, headers=headers, body=body, sha256=_sha256(body).hex(), until=until
            )
            code = _code(answer.content)
            if code:  # S3 may begin to answer 200 before it knows
                raise Retryable(f"the upload could not be completed ({code})", errno=errno.EREMOTEIO)

        try:
            self.retrier.call(what, attempt, size_bytes=size_bytes)
        except Refused as refused:
            if refused.code != "NoSuchUpload":
                raise
            if self.head(what, upload.key).get("x-amz-meta-lakeckpt-put") != upload.token:
                raise

    def abort_upload(self, what: str, key: str, upload_id: str) -> None:
        try:
            self._call(what, "DELETE", key, query={"uploadId": upload_id})
        except Refused as refused:
            if refused.status != 404:
                raise

    # -- listing ---------------------------------------------------------------------------------------------------

    def list_page(self, what: str, prefix: str, token: str | None, most: int = 1000) -> Page:
        """A page of the objects whose keys begin with ``prefix``; keys are URL-encoded in it."""
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url", "max-keys": str(most)}
        if token is not None:
            query["continuation-token"] = token
        return self._page(what, query, "Contents", "NextContinuationToken")

    def uploads_page(self, what: str, prefix: str, marker: str | None) -> Page:
        """A page of the multipart uploads that are neither completed nor aborted; ``marker``: after which key."""
        query = {"uploads": "", "prefix": prefix, "encoding-type": "url"}
        if marker is not None:
            query["key-marker"] = marker
        return self._page(what, query, "Upload", "NextKeyMarker")

    def _page(self, what: str, query: Mapping[str, str], element: str, more: str) -> Page:
        def attempt(until: float) -> Page:
            answer = self._once("GET", "", query=query, until=until)
            root = _parsed(answer.content)
            leaves = _leaves(root)
            truncated = leaves.get("IsTruncated", "false").lower() == "true"
            if truncated and not leaves.get(more):
                raise StorageError(f"{what}: the store says that its listing goes on, and not where ({more})")
            items = [_leaves(one) for one in root if _tag(one) == element]
            return Page(items=items, next=leaves.get(more) if truncated else None, date=answer.headers.get("date"))

        return self.retrier.call(what, attempt)

    # -- one request -----------------------------------------------------------------------------------------------

    def _call(
        self,
        what: str,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
        sha256: str = EMPTY_SHA256,
        size_bytes: int = 0,
    ) -> Answer:
        def attempt(until: float) -> Answer:
            return self._once(method, key, query=query, headers=headers, body=body, sha256=sha256, until=until)

        return self.retrier.call(what, attempt, size_bytes=size_bytes)

    def _once(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
        sha256: str = EMPTY_SHA256,
        until: float,
        most_bytes: int = TEXT_BYTES,
    ) -> Answer:
        """One attempt: an answer that is a success, or `Retryable`, or `Refused`."""
        url = self._signer.url(key, query)
        signed = self._signer.signed(method, url, headers or {}, sha256)
        # Refusals are texts, and may be longer than what was asked for.
        answer = self._http.exchange(
            method, url, headers=signed, body=body, until=until, most_bytes=max(most_bytes, 1 << 16)
        )
        if 200 <= answer.status < 300:
            return answer
        code = _code(answer.body or b"")
        region = answer.headers.get("x-amz-bucket-region")
        if region and answer.status in (301, 307, 400, 403) and self._signer.move(region):
            raise Retryable(f"the bucket is in {region}", errno=errno.EREMOTEIO)
        if answer.status in _PASSING or code in _PASSING_CODES:
            told = answer.headers.get("retry-after", "")
            pause_s = float(told) if told.isdecimal() and len(told) < 6 else None
            raise Retryable(
                f"the store answered {answer.status} {code}".strip(), errno=errno.EREMOTEIO, pause_s=pause_s
            )
        raise Refused(answer.status, code)

    def together(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """The results of ``jobs``, run at once; the first failure is raised when none runs any more."""
        running = [self.pool.submit(job) for job in jobs]
        try:
            return [job.result() for job in running]
        finally:
            for job in running:
                job.cancel()
            for job in running:
                if not job.cancelled():
                    job.exception()


def _if_match(etag: str | None) -> dict[str, str]:
    return {} if etag is None or etag.startswith("W/") else {"If-Match": f'"{etag}"'}


def _etag(answer: Answer, expected: str | None, what: str) -> str | None:
    found = answer.headers.get("etag")
    found = None if found is None else found.strip('"')
    if expected is not None and found is not None and found != expected:
        raise ObjectChanged(f"{what}: it has the ETag {found}, not {expected}: it was written again")
    return found


def _checked_span(answer: Answer, start: int, stop: int, etag: str | None, what: str) -> Span:
    """The bytes asked for, or `Retryable` where the answer has others."""
    found = _etag(answer, etag, what)
    if answer.status == 200:  # the server does not know ranges, or the range was all
        size = len(answer.body) if answer.body is not None else stop + 1
        if start or size > stop:
            raise StorageError(f"{what}: the server does not answer ranges (it sent the whole object)")
        return Span(data=answer.content, etag=found, size_bytes=size)
    told = _RANGE.fullmatch(answer.headers.get("content-range", ""))
    if told is None or answer.body is None:
        raise Retryable("the answer does not say which bytes it has, or has too many", errno=errno.EBADMSG)
    first, last, size = map(int, told.groups())
    if first != start or last + 1 != min(stop, size) or len(answer.body) != last + 1 - first:
        raise Retryable(
            f"the answer has {len(answer.body)} bytes and calls them {first} to {last} of {size}; "
            f"asked for were [{start}, {stop})",
            errno=errno.EBADMSG,
        )
    return Span(data=answer.body, etag=found, size_bytes=size)


def _has_checksum(headers: Mapping[str, str], data: bytes) -> bool:
    """Compare with a checksum of the whole object that the store sends; False where it sends none that Python knows."""
    if headers.get("x-amz-checksum-type", "").upper() == "COMPOSITE":
        return False
    makers: tuple[tuple[str, Callable[[], bytes]], ...] = (
        ("sha256", lambda: hashlib.sha256(data).digest()),
        ("sha1", lambda: hashlib.sha1(data, usedforsecurity=False).digest()),
        ("crc32", lambda: zlib.crc32(data).to_bytes(4, "big")),
    )
    for name, made in makers:
        told = headers.get(f"x-amz-checksum-{name}", "")
        if told and "-" not in told:
            if base64.b64encode(made()).decode() != told:
                raise Retryable(f"the bytes do not have the object's {name} checksum", errno=errno.EBADMSG)
            return True
    return False


def _sha256(data: Sequence[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for chunk in data:
        digest.update(chunk)
    return digest.digest()


def _code(body: bytes) -> str:
    """The store's own name of a refusal; ``""`` where the body has none."""
    found = _CODE.search(body[:4096]) if b"<Error" in body[:4096] else None
    return found.group(1).decode() if found else ""


def _parsed(body: bytes) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError:
        raise Retryable(
            f"the answer, of {len(body)} bytes, is not the XML that it should be", errno=errno.EBADMSG
        ) from None


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _leaves(element: ElementTree.Element) -> dict[str, str]:
    return {one.tag.rpartition("}")[2]: one.text or "" for one in element if not len(one)}
