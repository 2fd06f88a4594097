"""`HttpClient`, against servers on loopback: signals, forks under TLS, kept connections, bodies, proxies."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lakeckpt.errors import ConfigError, StorageError
from lakeckpt.lake.deadlines import Retryable
from lakeckpt.lake.http import Answer, HttpClient
from tests.patience import PATIENCE_S


class Echo(BaseHTTPRequestHandler):
    """Answers with what it got. ``connections`` are those that requests came on, in their order."""

    protocol_version = "HTTP/1.1"
    connections: list[int]
    heads: list[dict[str, str]]

    def do_GET(self) -> None:
        self.connections.append(self.client_address[1])
        self.heads.append(dict(self.headers.items()))
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[tuple[str, type[Echo]]]:
    echo = type("Mine", (Echo,), {"connections": [], "heads": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), echo) as server:
        server.daemon_threads = True
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_port}", echo
        finally:
            server.shutdown()
            thread.join()


def client(**options: Any) -> HttpClient:
    return HttpClient(**{"clock": time.monotonic, "stall_s": 30, "connections": 4, **options})


def ask(by: HttpClient, url: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
    pieces = [memoryview(body)[:3], memoryview(body)[3:]] if body else []
    return by.exchange(
        method, url, headers=headers, body=pieces, until=time.monotonic() + PATIENCE_S, most_bytes=max(len(body), 1)
    )


def in_thread(call: Callable[[], Answer]) -> Answer:
    found: list[Answer] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("where", [lambda call: call(), in_thread], ids=["main thread", "another thread"])
def test_bodies_go_and_come_whole_and_connections_are_kept(where: Callable[[Callable[[], Answer]], Answer]) -> None:
    large = os.urandom(3_000_001)
    with serving() as (url, echo):
        by = client()
        for method, body in (("PUT", large), ("POST", b"abcdef"), ("POST", b""), ("DELETE", b""), ("GET", b"")):
            answer = where(lambda method=method, body=body: ask(by, f"{url}/a%20b", method, body))  # type: ignore[misc]
            assert (answer.status, answer.content) == (200, body)
        assert where(lambda: ask(by, url, "HEAD")).status == 200
    assert len(set(echo.connections)) == 1
    assert echo.heads[0]["Content-Length"] == str(len(large))
    assert "Expect" not in echo.heads[0]


def test_an_answer_of_too_many_bytes_is_not_taken() -> None:
    with serving() as (url, _):
        view = memoryview(b"x" * 2000)
        answer = client().exchange(
            "PUT", url, headers={}, body=[view], until=time.monotonic() + PATIENCE_S, most_bytes=1999
        )
    assert (answer.status, answer.body) == (200, None)


def test_a_connection_that_the_server_closed_meanwhile_is_made_again() -> None:
    with serving() as (url, echo):
        by = client()
        ask(by, url, "PUT", b"abcdef", Connection="close")
        assert ask(by, url, "PUT", b"abcdef").content == b"abcdef"
    assert len(set(echo.connections)) == 2


def test_ctrl_c_right_after_a_request_was_handed_over_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        by = client(stall_s=1000)
        threads, jobs = by._threads, []

        class Interrupted:
            def submit(self, *work: Any) -> None:
                jobs.append(threads.submit(*work))
                raise KeyboardInterrupt

        monkeypatch.setitem(by.__dict__, "_threads", Interrupted())
        until, url = time.monotonic() + 1000, f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(KeyboardInterrupt):
            by.exchange("GET", url, headers={}, until=until, most_bytes=1)
        with pytest.raises(Retryable):
            jobs[0].result(PATIENCE_S)


def test_ctrl_c_is_heard_while_a_server_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        accepted = threading.Event()

        def interrupt() -> None:
            with silent.accept()[0] as connection:
                connection.recv(1)
                accepted.set()
                os.kill(os.getpid(), signal.SIGINT)
                with contextlib.suppress(OSError):
                    while connection.recv(4096):  # until the client has given up
                        pass

        thread = threading.Thread(target=interrupt)
        thread.start()
        by = client(stall_s=1000)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # test runners ignore it in their workers
        try:
            with pytest.raises(KeyboardInterrupt):
                by.exchange(
                    "GET",
                    f"http://127.0.0.1:{silent.getsockname()[1]}",
                    headers={},
                    until=time.monotonic() + 1000,  # more than pytest gives this test
                    most_bytes=1,
                )
        finally:
            signal.signal(signal.SIGINT, before)
            thread.join()
        assert accepted.is_set()


def test_no_process_waits_at_its_end_for_what_it_reads_ahead() -> None:
    program = """
import sys, time
from lakeckpt.lake.http import HttpClient
from lakeckpt.lake.ranges import in_background
client = HttpClient(clock=time.monotonic, stall_s=1000, connections=4)
def read(path):
    client.exchange("GET", sys.argv[1] + path, headers={}, until=time.monotonic() + 1000, most_bytes=1)
in_background(read, "/1"), in_background(read, "/2")
sys.stdin.read(1)
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen([sys.executable, "-c", program, url], stdin=subprocess.PIPE)
        try:
            with silent.accept()[0] as first, silent.accept()[0] as second:
                assert first.recv(1) == second.recv(1) == b"G"
                process.communicate(b"x", timeout=PATIENCE_S)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0


def test_a_header_cannot_become_two() -> None:
    with serving() as (url, echo), pytest.raises(StorageError, match="more than one line"):
        ask(client(), url, **{"If-Match": 'x"\r\nx-evil: 1'})
    assert not echo.heads


def test_a_server_that_is_not_there_is_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(Retryable, match="no connection to the server"):
        ask(client(), f"http://127.0.0.1:{port}")


def test_proxies_are_urls() -> None:
    for proxy in ("http://user:pa/ss@127.0.0.1:9", "ftp://h:1", "http://", "proxy:8080"):
        with pytest.raises(ConfigError, match="is no URL like") as raised:
            client(proxy=proxy)
        assert "user" not in str(raised.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key and the certificate of 127.0.0.1, signed by itself, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(pem))
    return path


@contextlib.contextmanager
def serving_tls(certificate: Path) -> Iterator[tuple[str, type[Echo]]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving(context) as found:
        yield found


def test_certificates_are_verified_unless_told_otherwise(certificate: Path) -> None:
    with serving_tls(certificate) as (url, _):
        assert ask(client(verify=str(certificate)), url).status == 200
        assert ask(client(verify=False), url).status == 200
        with pytest.raises(Retryable, match="no secure connection"):
            ask(client(), url)


def test_a_forked_child_that_lets_go_of_the_client_does_not_end_the_parents_connections(certificate: Path) -> None:
    with serving_tls(certificate) as (url, echo):
        by = client(verify=str(certificate))
        in_thread(lambda: ask(by, url))
        child = os.fork()
        if not child:
            del by
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        in_thread(lambda: ask(by, url))
    assert len(set(echo.connections)) == 1, "the connection was ended by the child"
