"""What did the server answer to one request, by a given time?

`HttpClient.exchange` makes one attempt at one request over libcurl: resolve, connect, send and read the whole answer by
one point in time, and without a silence that is longer than is said. It follows nothing, caches nothing, decodes
nothing; whoever calls decides what is repeated (see ``deadlines``). Failures of the way to the server and answers that
end before their stated length are `Retryable`, told in our own words: clients' messages may show what was sent.

Threads may share a client; a forked process needs one of its own. In the main thread a request runs in a thread of the
client's, so that a signal is heard at once, and not when the store has answered.
"""

from __future__ import annotations

import errno
import math
import os
import ssl
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import pycurl

from lakeckpt.errors import ConfigError, StorageError, StorageTimeout
from lakeckpt.lake.deadlines import Retryable

__all__ = ["Answer", "HttpClient", "give_up_when"]

CONNECT_S = 5.0
PIECE_BYTES = 1 << 20
_MAIN_THREADS = 4
_LATE = pycurl.E_OPERATION_TIMEDOUT
_NO_SERVER = frozenset({pycurl.E_COULDNT_CONNECT, pycurl.E_COULDNT_RESOLVE_HOST, pycurl.E_COULDNT_RESOLVE_PROXY})
_NOT_SECURE = frozenset(
    {
        pycurl.E_SSL_CONNECT_ERROR,
        pycurl.E_PEER_FAILED_VERIFICATION,
        pycurl.E_SSL_CACERT_BADFILE,
        pycurl.E_SSL_CERTPROBLEM,
        pycurl.E_SSL_CIPHER,
        pycurl.E_SSL_ISSUER_ERROR,
        pycurl.E_SSL_ENGINE_INITFAILED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``headers`` have lower-case names. ``body`` is None where it would have had more than the bytes allowed."""

    status: int
    headers: Mapping[str, str]
    body: bytes | None

    @property
    def content(self) -> bytes:
        """The body; that it was not too large has been looked at."""
        assert self.body is not None
        return self.body


class _Thread(threading.local):
    given_up: Callable[[], bool] | None = None


_thread = _Thread()


def give_up_when(asked: Callable[[], bool]) -> None:
    """Requests of this thread are given up once ``asked()`` says so: asked at least once a second, and often."""
    _thread.given_up = asked


class HttpClient:
    """Connections to servers, at most ``connections`` of them kept. ``clock`` tells when an attempt is over; it is
    over, too, when no byte has come for ``stall_s`` (in whole seconds, which is how libcurl counts)."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        stall_s: float,
        connections: int,
        verify: bool | str | None = None,
        proxy: str | None = None,
    ) -> None:
        self._clock, self._connections = clock, connections
        self._idle: deque[tuple[Any, int]] = deque()  # handles of libcurl, and the socket that each keeps (-1: none)
        self._options = _common(stall_s, verify, proxy)
        _clients.add(self)

    def exchange(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: Sequence[memoryview] = (),
        until: float,
        most_bytes: int,
    ) -> Answer:
        """Send a request and read its answer by ``until``, on the clock. `Retryable` where there was none."""
        in_main = threading.current_thread() is threading.main_thread()
        if _thread.given_up is not None and _thread.given_up():
            raise StorageError("the process is ending: nothing more is read ahead")
        if not in_main:
            exchange = _Exchange(method, url, headers, body, most_bytes, given_up=_thread.given_up)
            return self._made(exchange, until)
        left = threading.Event()
        exchange = _Exchange(method, url, headers, body, most_bytes, given_up=left.is_set)
        try:  # from before it is begun: Ctrl-C may come right after
            try:
                job = self._threads.submit(self._made, exchange, until)
            except RuntimeError:  # the interpreter is ending: there are no more threads
                return self._made(exchange, until)
            return job.result()
        finally:
            left.set()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """For the main thread: one works, others may be at what was given up."""
        return ThreadPoolExecutor(_MAIN_THREADS, thread_name_prefix="lakeckpt-http")

    def _made(self, exchange: _Exchange, until: float) -> Answer:
        left_s = until - self._clock()
        if left_s <= 0:
            raise _late()
        try:
            handle, _ = self._idle.pop()
        except IndexError:
            handle = pycurl.Curl()
        try:
            for option, value in self._options:
                handle.unsetopt(option) if value is None else handle.setopt(option, value)
            handle.setopt(pycurl.TIMEOUT_MS, max(1, int(left_s * 1000)))
            return exchange.perform(handle)
        finally:
            kept = handle.getinfo(pycurl.ACTIVESOCKET)
            handle.reset()  # of all but its connection
            if len(self._idle) < self._connections:
                self._idle.append((handle, kept))

    def cut_off(self) -> None:
        """In a forked process: let nothing that is done to the connections here reach the servers.

        They are the parent's. libcurl says goodbye on those with TLS when it lets go of them, which would end them.
        """
        nowhere = os.open(os.devnull, os.O_RDWR)
        for _, kept in self._idle:
            if kept >= 0:
                os.dup2(nowhere, kept, inheritable=False)
        os.close(nowhere)


_clients: weakref.WeakSet[HttpClient] = weakref.WeakSet()


def _cut_off() -> None:
    for client in list(_clients):
        client.cut_off()
    _clients.clear()


os.register_at_fork(after_in_child=_cut_off)


class _Exchange:
    """A request and what has come of its answer so far."""

    __slots__ = (
        "_at",
        "_body",
        "_given_up",
        "_headers",
        "_lines",
        "_method",
        "_most_bytes",
        "_pieces",
        "_size",
        "_url",
    )

    def __init__(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Sequence[memoryview],
        most_bytes: int,
        *,
        given_up: Callable[[], bool] | None,
    ) -> None:
        self._method, self._url, self._headers, self._body = method, url, headers, body
        self._most_bytes, self._given_up = most_bytes, given_up
        self._lines: list[bytes] = []
        self._pieces: list[bytes] | None = []
        self._at = self._size = 0

    def perform(self, handle: Any) -> Answer:
        handle.setopt(pycurl.URL, self._url)
        handle.setopt(pycurl.HTTPHEADER, [*self._told(), b"Expect:", b"Accept:", b"User-Agent: lakeckpt"])
        handle.setopt(pycurl.HEADERFUNCTION, self._line)
        handle.setopt(pycurl.WRITEFUNCTION, self._piece)
        if self._method == "HEAD":
            handle.setopt(pycurl.NOBODY, 1)
        elif self._method != "GET":
            handle.setopt(pycurl.CUSTOMREQUEST, self._method)
        if self._method in ("PUT", "POST"):
            self._sends(handle)
        if (given_up := self._given_up) is not None:
            handle.setopt(pycurl.NOPROGRESS, 0)
            handle.setopt(pycurl.XFERINFOFUNCTION, lambda *_: given_up())
        try:
            handle.perform()
        except pycurl.error as error:
            if self._pieces is not None:
                raise self._failed(error.args[0]) from None
        status = handle.getinfo(pycurl.RESPONSE_CODE)
        headers = self._parsed()
        return Answer(status=status, headers=headers, body=None if self._pieces is None else b"".join(self._pieces))

    def _told(self) -> Iterator[bytes]:
        for name, value in self._headers.items():
            if "\n" in value or "\r" in value:
                raise StorageError(f"the header {name} of a request would have more than one line")
            if name.lower() != "content-length":  # libcurl says it
                yield (f"{name}: {value}" if value else f"{name};").encode("latin-1", "replace")

    # -- what is sent ----------------------------------------------------------------------------------------------

    def _sends(self, handle: Any) -> None:
        size = sum(map(len, self._body))
        sending = _Sending(self._body)
        handle.setopt(pycurl.UPLOAD, 1)
        handle.setopt(pycurl.CUSTOMREQUEST, self._method)
        handle.setopt(pycurl.INFILESIZE_LARGE, size)
        handle.setopt(pycurl.READFUNCTION, sending.read)
        handle.setopt(pycurl.SEEKFUNCTION, sending.seek)
        if size >= PIECE_BYTES:
            handle.setopt(pycurl.UPLOAD_BUFFERSIZE, PIECE_BYTES)

    # -- what is received ------------------------------------------------------------------------------------------

    def _line(self, line: bytes) -> None:
        if line.startswith(b"HTTP/"):  # also after an interim answer, and that of a proxy
            self._lines.clear()
        self._lines.append(line)

    def _parsed(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for line in self._lines[1:]:
            name, colon, value = line.decode("latin-1").partition(":")
            if colon:
                name, value = name.strip().lower(), value.strip()
                found[name] = f"{found[name]}, {value}" if name in found else value
        return found

    def _piece(self, piece: bytes) -> int:
        if not self._pieces:
            told = self._parsed().get("content-length", "")
            self._size = int(told) if told.isdecimal() and len(told) < 19 else 0
        self._at += len(piece)
        if self._pieces is None or max(self._at, self._size) > self._most_bytes:
            self._pieces = None
            return 0  # so that libcurl ends it
        self._pieces.append(piece)
        return len(piece)

    def _failed(self, code: int) -> Retryable:
        """What went wrong on the way, in our words: never the client's, which may show headers or URLs."""
        if code == _LATE:
            return _late()
        if code in _NO_SERVER:
            return Retryable("no connection to the server", errno=errno.ECONNREFUSED)
        if code in _NOT_SECURE:
            return Retryable(
                "no secure connection to the server (check its certificate, or ca_bundle)", errno=errno.EPROTO
            )
        if code == pycurl.E_PARTIAL_FILE:
            size = self._parsed().get("content-length", "those stated")
            return Retryable(f"the answer ended after {self._at} of {size} bytes", errno=errno.ECONNRESET)
        return Retryable(f"the connection broke (libcurl's error {code})", errno=errno.ECONNRESET)


class _Sending:
    """A body, piece by piece; from its begin again where libcurl finds a kept connection dead."""

    __slots__ = ("_at", "_chunk", "_chunks")

    def __init__(self, chunks: Sequence[memoryview]) -> None:
        self._chunks = [chunk.cast("B") for chunk in chunks]
        self._chunk = self._at = 0

    def read(self, most: int) -> bytes:
        while self._chunk < len(self._chunks):
            found = self._chunks[self._chunk][self._at : self._at + most]
            if len(found):
                self._at += len(found)
                return found.tobytes()
            self._chunk, self._at = self._chunk + 1, 0
        return b""

    def seek(self, offset: int, origin: int) -> int:
        if offset or origin != os.SEEK_SET:
            return int(pycurl.SEEKFUNC_CANTSEEK)
        self._chunk = self._at = 0
        return int(pycurl.SEEKFUNC_OK)


def _common(stall_s: float, verify: bool | str | None, proxy: str | None) -> list[tuple[int, Any]]:
    """The options of every request."""
    options = [
        (pycurl.NOSIGNAL, 1),
        (pycurl.PATH_AS_IS, 1),
        (pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS),
        (pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1),
        (pycurl.MAXCONNECTS, 1),
        (pycurl.CONNECTTIMEOUT_MS, int(CONNECT_S * 1000)),
        (pycurl.LOW_SPEED_LIMIT, 1),
        (pycurl.LOW_SPEED_TIME, math.ceil(stall_s)),
        (pycurl.BUFFERSIZE, PIECE_BYTES // 2),
        (pycurl.PROXY, ""),  # not the environment's: who calls has looked there
    ]
    if proxy is not None:
        options += [(pycurl.PROXY, _checked_proxy(proxy)), (pycurl.NOPROXY, "")]
    if verify is False:
        return [*options, (pycurl.SSL_VERIFYPEER, 0), (pycurl.SSL_VERIFYHOST, 0)]
    if isinstance(verify, str):
        folder = os.path.isdir(verify)
        return [*options, (pycurl.CAINFO, None if folder else verify), (pycurl.CAPATH, verify if folder else None)]
    system = ssl.get_default_verify_paths()  # libcurl's own is that of the machine it was built on
    paths = ((pycurl.CAINFO, system.cafile), (pycurl.CAPATH, system.capath))
    return [*options, *((option, path) for option, path in paths if path is not None and os.path.exists(path))]


def _checked_proxy(proxy: str) -> str:
    try:
        url = urlsplit(proxy)
        good = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            "the HTTP proxy on the way to the store (the option 'proxy', or HTTPS_PROXY or HTTP_PROXY) is no URL like "
            "http://host:port; signs such as / and @ in a password are written as %2F and %40"
        )
    return proxy


def _late() -> Retryable:
    return Retryable("no whole answer in time", kind=StorageTimeout, errno=errno.ETIMEDOUT)
