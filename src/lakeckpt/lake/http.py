"""What did the server answer to one request, by a given time?

`HttpClient.exchange` makes one attempt at one request over urllib3: connect, send, read the whole answer, each wait no
longer than is left. It repeats nothing, follows nothing, caches nothing, decodes nothing; whoever calls decides (see
``deadlines``). Failures of the way to the server and answers that end before their stated length are `Retryable`, told
in our own words: clients' messages may show what was sent.

Bytes arrive in pieces with a look at the clock after each, so that a server that drips ends in a timeout as well as one
that stalls. Not bounded: name resolution, which is the system's, and the head of an answer that drips byte by byte.
Threads may share a client; a forked process needs one of its own.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.util import make_headers, parse_url

from lakeckpt.errors import ConfigError, StorageTimeout
from lakeckpt.lake.deadlines import Retryable

__all__ = ["Answer", "HttpClient"]

CONNECT_S = 5.0
PIECE_BYTES = 1 << 20
_LEAST_S = 0.001


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


class HttpClient:
    """Connections to one server, at most ``connections`` of them kept. ``clock`` tells when an attempt is over; it is
    over, too, when no byte has come for ``stall_s``."""

    __slots__ = ("_clock", "_pool", "_proxied", "_servers", "_stall_s")

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        stall_s: float,
        connections: int,
        verify: bool | str | None = None,
        proxy: str | None = None,
    ) -> None:
        arguments: dict[str, Any] = {"maxsize": connections, "num_pools": 4, "retries": False}
        if verify is False:
            arguments["cert_reqs"] = "CERT_NONE"
        elif isinstance(verify, str):
            arguments["ca_certs"] = verify
        self._clock, self._stall_s, self._proxied = clock, stall_s, proxy is not None
        self._servers: dict[str, urllib3.HTTPConnectionPool] = {}
        self._pool = _proxied(proxy, arguments) if proxy else urllib3.PoolManager(**arguments)

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
        left_s = self._left_s(until)
        try:
            response = self._urlopen(url)(
                method=method,
                headers=headers,
                body=self._pieces(body, until) if body else None,
                timeout=urllib3.Timeout(connect=min(CONNECT_S, left_s), read=left_s),
                preload_content=False,
                decode_content=False,
                redirect=False,
                retries=False,
            )
        except (HTTPError, OSError) as error:
            raise _failed(error) from None
        whole = False
        try:
            answer = self._read(response, method, until, most_bytes)
            whole = answer.body is not None
            return answer
        except (HTTPError, OSError) as error:
            raise _failed(error) from None
        finally:
            if whole:
                _set_timeout(response, CONNECT_S)
                response.release_conn()
            else:
                response.close()

    def _urlopen(self, url: str) -> Callable[..., Any]:
        """urllib3's way to one server; past its look for the server's pool at every request, which costs as much."""
        scheme, _, rest = url.partition("://")
        host, _, target = rest.partition("/")
        if self._proxied:
            return partial(self._pool.urlopen, url=url)
        origin = f"{scheme}://{host}"
        server = self._servers.get(origin)
        if server is None:
            server = self._servers[origin] = self._pool.connection_from_url(origin)
        return partial(server.urlopen, url=f"/{target}")

    def _read(self, response: Any, method: str, until: float, most_bytes: int) -> Answer:
        headers = {name.lower(): value for name, value in response.headers.items()}
        told = headers.get("content-length", "")
        size = int(told) if told.isdecimal() and len(told) < 19 else None
        if method == "HEAD" or response.status in (204, 304):
            return Answer(status=response.status, headers=headers, body=b"")
        pieces: list[bytes] = []
        at = 0
        while size is None or at < size:
            if (size or at) > most_bytes:
                return Answer(status=response.status, headers=headers, body=None)
            _set_timeout(response, self._left_s(until))
            piece = response.read1(PIECE_BYTES if size is None else min(PIECE_BYTES, size - at))
            if not piece:
                break
            pieces.append(piece)
            at += len(piece)
        if size is not None and at < size:
            raise Retryable(f"the answer ended after {at} of {size} bytes", errno=errno.ECONNRESET)
        return Answer(status=response.status, headers=headers, body=b"".join(pieces))

    def _pieces(self, body: Sequence[memoryview], until: float) -> Iterator[memoryview]:
        for chunk in body:
            for start in range(0, len(chunk), PIECE_BYTES):
                self._left_s(until)
                yield chunk[start : start + PIECE_BYTES]

    def _left_s(self, until: float) -> float:
        left_s = until - self._clock()
        if left_s <= 0:
            raise _late()
        return max(min(left_s, self._stall_s), _LEAST_S)


def _proxied(proxy: str, arguments: dict[str, Any]) -> urllib3.ProxyManager:
    """Connections through ``proxy``; urllib3 does not send the user and the password in its URL by itself."""
    try:
        url = parse_url(proxy)
        said = make_headers(proxy_basic_auth=unquote(url.auth)) if url.auth else None
        return urllib3.ProxyManager(url._replace(auth=None).url, proxy_headers=said, **arguments)
    except (HTTPError, ValueError):
        raise ConfigError(
            "the HTTP proxy on the way to the store (the option 'proxy', or HTTPS_PROXY or HTTP_PROXY) is no URL like "
            "http://host:port; signs such as / and @ in a password are written as %2F and %40"
        ) from None


def _set_timeout(response: Any, timeout_s: float) -> None:
    socket = getattr(getattr(response, "connection", None), "sock", None)
    if socket is not None:
        socket.settimeout(timeout_s)


def _late() -> Retryable:
    return Retryable("no whole answer in time", kind=StorageTimeout, errno=errno.ETIMEDOUT)


def _failed(error: Exception) -> Retryable:
    """What went wrong on the way, in our words: never the client's, which may show headers or URLs."""
    if isinstance(error, ConnectTimeoutError | ReadTimeoutError | TimeoutError) and not isinstance(
        error, NewConnectionError
    ):
        return _late()
    if isinstance(error, NewConnectionError):
        return Retryable("no connection to the server", errno=errno.ECONNREFUSED)
    if isinstance(error, SSLError):
        return Retryable("no secure connection to the server (check its certificate, or ca_bundle)", errno=errno.EPROTO)
    return Retryable(f"the connection broke ({type(error).__name__})", errno=errno.ECONNRESET)
