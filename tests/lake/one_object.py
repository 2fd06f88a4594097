"""A store of one object for processes that fork beside reads of it: ranges over HTTP or TLS."""

from __future__ import annotations

import socket
import ssl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CONTENT = bytes(range(256)) * 4096
SERVER_STARTS = "import sys; from tests.lake.one_object import serve; serve(sys.argv[1])"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        first, last = (int(one) for one in self.headers["Range"].removeprefix("bytes=").split("-"))
        body = CONTENT[first : last + 1]
        head = (
            f'HTTP/1.1 206 Partial Content\r\nContent-Length: {len(body)}\r\nETag: "one"\r\n'
            f"Content-Range: bytes {first}-{first + len(body) - 1}/{len(CONTENT)}\r\n"
            "Last-Modified: Tue, 24 Nov 2026 10:00:00 GMT\r\n\r\n"
        )
        self.wfile.write(head.encode() + body)
        self.wfile.flush()

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Tue, 24 Nov 2026 10:00:00 GMT")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Nothing: readers go when they like."""


def serve(certificate: str) -> None:
    """Serve until killed; print the port. ``certificate``: a path beside which ``both.pem`` lies, or "" for HTTP."""
    server = _Server(("127.0.0.1", 0), _Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(Path(certificate).parent / "both.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    print(server.server_address[1], flush=True)
    server.serve_forever()
