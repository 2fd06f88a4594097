"""This module runs a proxy that makes an object store answer late, wrongly, or not at all.

`FaultProxy` stands in front of any server that speaks S3 over plain HTTP (moto, MinIO, a bucket behind a gateway).
Requests go through unchanged, signature and all, but for those that a rule picks: by number, or by what they ask for::

    with FaultProxy("http://127.0.0.1:5000", faults=[
        At(7, HttpFault.RESET),                                          # the seventh request of all
        Where(lambda request: request.method == "PUT", HttpFault.LOST_ANSWER, times=1),
    ]) as proxy:
        train("s3://bucket/run", storage_options={"endpoint_url": proxy.url, ...})

Numbers make a failing case a line to copy, and a sweep over all n a proof. ``latency_s`` delays every answer, as
distance does. ``proxy.requests`` is the record of what was asked: it holds no headers, hence no signatures. One thread
listens and one serves each connection; `close` (or the end of ``with``) ends all of them and waits for them.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from lakeckpt.errors import ConfigError

__all__ = ["At", "FaultProxy", "HttpFault", "Request", "Where"]

UPSTREAM_TIMEOUT_S = 60.0
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection"})


class HttpFault(enum.Enum):
    """What happens to a request. Those marked * reach the server first."""

    ERROR = "error"  # 500 InternalError
    SLOW_DOWN = "slow down"  # 503 SlowDown
    NOT_IMPLEMENTED = "not implemented"  # 501 NotImplemented
    STALL = "stall"  # no answer, for as long as the client or the proxy lives
    STALL_IN_BODY = "stall in body"  # * half of the body, then nothing
    TRUNCATED = "truncated"  # * half of the body, then the end of the connection
    SHORT = "short"  # * half of the body, called the whole
    RESET = "reset"  # the connection is reset before anything is done
    FLIPPED = "flipped"  # * one bit in the middle of the body is wrong
    LOST_ANSWER = "lost answer"  # * it is done, and the connection is reset
    STALE = "stale"  # * a GET is answered as the same GET was answered the first time it was asked


_REFUSALS = {
    HttpFault.ERROR: (500, "InternalError"),
    HttpFault.SLOW_DOWN: (503, "SlowDown"),
    HttpFault.NOT_IMPLEMENTED: (501, "NotImplemented"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """``n`` counts from 1. ``path`` is unquoted, ``query`` as asked; ``range`` the header, or ``""``; no other header
    is kept."""

    n: int
    method: str
    path: str
    query: Mapping[str, str]
    range: str
    conditional: bool
    size_bytes: int


@dataclass(frozen=True, slots=True)
class At:
    """``fault`` happens to request ``n`` (from 1)."""

    n: int
    fault: HttpFault

    def __post_init__(self) -> None:
        if self.n < 1 or not isinstance(self.fault, HttpFault):
            raise ConfigError(f"a fault happens at a request number from 1 on, got {self.n!r} and {self.fault!r}")


@dataclass(frozen=True, slots=True)
class Where:
    """``fault`` happens to the requests for which ``picks`` is true, the first ``times`` of them (None: to all),
    after ``skip`` that are spared."""

    picks: Callable[[Request], bool]
    fault: HttpFault
    times: int | None = None
    skip: int = 0


class FaultProxy:
    """A proxy on ``port`` of the loopback device (0: a free one), in front of ``server`` (an ``http://`` URL).

    ``faults`` are tried in their order; the first that picks a request decides. ``on_request(request)`` is called
    before anything happens to a request, in the thread of its connection: to kill a process at the n-th request, say.
    """

    def __init__(
        self,
        server: str,
        *,
        faults: Iterable[At | Where] = (),
        latency_s: float = 0.0,
        on_request: Callable[[Request], None] | None = None,
        port: int = 0,
    ) -> None:
        parts = urlsplit(server)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError(f"a FaultProxy stands before a server like http://127.0.0.1:5000, not {server!r}")
        self.faults = list(faults)
        self.requests: list[Request] = []
        """All requests so far, in the order in which they came."""
        self.injected: list[tuple[Request, HttpFault]] = []
        """Those to which something happened."""
        self.latency_s = latency_s
        self._server = (parts.hostname, parts.port or 80)
        self._on_request = on_request
        self._fired: dict[int, int] = {}
        self._first: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._listener = _Listener(("127.0.0.1", port), _Handler)
        self._listener.proxy = self
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(0.05,), name="lakeckpt-fault-proxy", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, break the connections that are open, and wait for the threads."""
        self._closed.set()
        self._listener.shutdown()
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listener.server_close()
        self._thread.join()

    # -- for the handler -------------------------------------------------------------------------------------------

    def _decide(self, told: Mapping[str, Any]) -> HttpFault | None:
        """Count a request, and say what happens to it."""
        with self._lock:
            request = Request(n=len(self.requests) + 1, **told)
            self.requests.append(request)
        if self._on_request is not None:
            self._on_request(request)
        with self._lock:
            for index, rule in enumerate(self.faults):
                if self._picks(index, rule, request):
                    self.injected.append((request, rule.fault))
                    return rule.fault
        return None

    def _picks(self, index: int, rule: At | Where, request: Request) -> bool:
        if isinstance(rule, At):
            return rule.n == request.n
        if not rule.picks(request):
            return False
        seen = self._fired[index] = self._fired.get(index, 0) + 1
        return seen > rule.skip and (rule.times is None or seen <= rule.skip + rule.times)

    def _forward(self, handler: _Handler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's answer to the request, whole."""
        connection = http.client.HTTPConnection(*self._server, timeout=UPSTREAM_TIMEOUT_S)
        try:
            connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                if name.lower() not in _HOP:
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            content = answer.read()
            headers = [(n, v) for n, v in answer.getheaders() if n.lower() not in (*_HOP, "content-length")]
            if handler.command == "HEAD":
                headers.append(("Content-Length", answer.headers.get("Content-Length", "0")))
            return answer.status, headers, content
        finally:
            connection.close()

    def _remembered(
        self, key: str, answer: tuple[int, list[tuple[str, str]], bytes], *, stale: bool
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        with self._lock:
            first = self._first.setdefault(key, answer)
        return first if stale else answer


class _Listener(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections break here by design: say nothing."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.server.proxy._lock:
            self.server.proxy._sockets.add(self.connection)

    def finish(self) -> None:
        with self.server.proxy._lock:
            self.server.proxy._sockets.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests are in ``proxy.requests``."""

    def _serve(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if proxy._closed.is_set():
            self.close_connection = True
            return
        fault = proxy._decide(self._told(len(body)))
        if proxy.latency_s and proxy._closed.wait(proxy.latency_s):
            return
        if fault is HttpFault.RESET:
            self._reset()
        elif fault is HttpFault.STALL:
            self._stall()
        elif fault in _REFUSALS:
            status, code = _REFUSALS[fault]
            text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            self._answer(status, [("Content-Type", "application/xml")], text)
        else:
            self._forwarded(fault, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _forwarded(self, fault: HttpFault | None, body: bytes) -> None:
        proxy = self.server.proxy
        try:
            answer = proxy._forward(self, body)
        except (OSError, http.client.HTTPException):
            self._reset()
            return
        if self.command == "GET":
            key = f"{self.path} {self.headers.get('Range', '')}"
            answer = proxy._remembered(key, answer, stale=fault is HttpFault.STALE)
        status, headers, content = answer
        half = len(content) // 2
        if fault is HttpFault.LOST_ANSWER:
            self._reset()
        elif fault in (HttpFault.TRUNCATED, HttpFault.STALL_IN_BODY):
            self._answer(status, headers, content, sent=half)
            if fault is HttpFault.STALL_IN_BODY:
                self._stall()
            self.close_connection = True
        elif fault is HttpFault.SHORT:
            self._answer(status, headers, content[:half])
        elif fault is HttpFault.FLIPPED and content:
            self._answer(status, headers, content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
        else:
            self._answer(status, headers, content)

    def _answer(
        self, status: int, headers: Iterable[tuple[str, str]], content: bytes, *, sent: int | None = None
    ) -> None:
        lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if self.command != "HEAD":
            lines.append(f"Content-Length: {len(content)}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self.wfile.write(head + content[: len(content) if sent is None else sent])
        self.wfile.flush()

    def _stall(self) -> None:
        """Say nothing until the client or the proxy goes."""
        self.close_connection = True
        self.connection.settimeout(0.05)
        while not self.server.proxy._closed.is_set():
            try:
                if not self.connection.recv(1 << 16):
                    return
            except TimeoutError:
                continue
            except OSError:
                return

    def _reset(self) -> None:
        """Break the connection with a reset (RST), not an orderly end."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def _told(self, size_bytes: int) -> dict[str, Any]:
        parts = urlsplit(self.path)
        return {
            "method": self.command,
            "path": unquote(parts.path),
            "query": dict(parse_qsl(parts.query, keep_blank_values=True)),
            "range": self.headers.get("Range", ""),
            "conditional": any(name in self.headers for name in ("If-Match", "If-None-Match")),
            "size_bytes": size_bytes,
        }
