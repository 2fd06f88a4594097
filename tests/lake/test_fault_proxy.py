"""The proxy does to requests what it was told to, to those it was told to, and to no others."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from lakeckpt.errors import ConfigError
from tests.faults.fault_proxy import At, FaultProxy, HttpFault, Request, Where

BODY = bytes(range(100))


class Counting(BaseHTTPRequestHandler):
    """Says how many requests came before this one, in a header."""

    protocol_version = "HTTP/1.1"
    came: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.came.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.send_header("X-Before", str(len(self.came) - 1))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Counting.came = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Counting) as running:
        running.daemon_threads = True
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def get(proxy: FaultProxy, path: str = "/x", timeout_s: float = 60.0) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers.get("X-Before")
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("fault", "body"),
    [
        (HttpFault.SHORT, BODY[:50]),
        (HttpFault.FLIPPED, BODY[:50] + bytes([BODY[50] ^ 1]) + BODY[51:]),
    ],
)
def test_an_answer_is_changed_as_told(server: str, fault: HttpFault, body: bytes) -> None:
    with FaultProxy(server, faults=[At(2, fault)]) as proxy:
        assert [get(proxy)[1] for _ in range(3)] == [BODY, body, BODY]
        assert [(request.n, what) for request, what in proxy.injected] == [(2, fault)]


@pytest.mark.parametrize(("fault", "status"), [(HttpFault.ERROR, 500), (HttpFault.SLOW_DOWN, 503)])
def test_an_error_never_reaches_the_server(server: str, fault: HttpFault, status: int) -> None:
    with FaultProxy(server, faults=[At(1, fault)]) as proxy:
        assert get(proxy)[0] == status
    assert Counting.came == []


@pytest.mark.parametrize(("fault", "reached"), [(HttpFault.RESET, 0), (HttpFault.LOST_ANSWER, 1)])
def test_a_reset_comes_before_the_server_and_a_lost_answer_after_it(
    server: str, fault: HttpFault, reached: int
) -> None:
    with FaultProxy(server, faults=[At(1, fault)]) as proxy, pytest.raises(ConnectionError):
        get(proxy)
    assert len(Counting.came) == reached


def test_a_truncated_answer_ends_before_its_stated_length(server: str) -> None:
    with FaultProxy(server, faults=[At(1, HttpFault.TRUNCATED)]) as proxy:
        with pytest.raises(http.client.IncompleteRead) as caught:
            get(proxy)
        assert caught.value.partial == BODY[:50]


@pytest.mark.parametrize("fault", [HttpFault.STALL, HttpFault.STALL_IN_BODY])
def test_a_stall_lasts_until_the_client_goes(server: str, fault: HttpFault) -> None:
    with FaultProxy(server, faults=[At(1, fault)]) as proxy:
        with pytest.raises(TimeoutError):
            get(proxy, timeout_s=0.2)
        assert get(proxy)[1] == BODY


def test_a_stale_answer_is_the_first_one_to_the_same_request(server: str) -> None:
    stale = Where(lambda request: request.path == "/x", HttpFault.STALE)
    with FaultProxy(server) as proxy:
        assert get(proxy)[2] == "0"
        assert get(proxy)[2] == "1"
        proxy.faults = [stale]
        assert get(proxy)[2] == "0"
        assert get(proxy, "/y")[2] == "3"


def test_requests_are_picked_after_those_that_are_spared_and_so_often(server: str) -> None:
    asked: list[Request] = []
    picks = Where(lambda request: request.path.startswith("/a"), HttpFault.ERROR, times=2, skip=1)
    with FaultProxy(server, faults=[picks], on_request=asked.append) as proxy:
        found = [get(proxy, path)[0] for path in ("/a", "/b", "/a%20b", "/a?c=d", "/a")]
    assert found == [200, 200, 500, 500, 200]
    assert [request.path for request in asked] == ["/a", "/b", "/a b", "/a", "/a"]
    assert asked[3].query == {"c": "d"}


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1:1/bucket"])
def test_only_a_plain_server_can_be_stood_before(url: str) -> None:
    with pytest.raises(ConfigError, match="stands before a server like"):
        FaultProxy(url)


def test_requests_are_numbered_from_one() -> None:
    with pytest.raises(ConfigError, match="from 1 on"):
        At(0, HttpFault.ERROR)
