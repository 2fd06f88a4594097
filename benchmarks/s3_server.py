"""A store that speaks enough S3 and serves ranges at gigabytes a second: nginx in front of a plain folder.

`NginxS3` starts two processes and stops them: nginx (Debian's ``nginx`` and ``libnginx-mod-http-echo``), which answers
GET and HEAD of objects from the folder, with its own ETags, ranges and If-Match; and this module
(``python -m benchmarks.s3_server``), which gets all else from it: listings, puts, conditional puts, multipart uploads,
deletes. With ``latency_s`` nginx lets every request wait that long first, without a thread for each.

What is put becomes visible whole, by a rename. nginx's ETags are of the size and the second in which a file was
written, so that each put is given a second of its own. Signatures are not looked at.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from urllib.request import urlopen
from xml.etree import ElementTree
from xml.sax.saxutils import escape

PACKAGES = "nginx libnginx-mod-http-echo"
_ECHO = Path("/usr/lib/nginx/modules/ngx_http_echo_module.so")
_PAGE = 1000
_CONFIGURATION = """
load_module {echo};
daemon off;
worker_processes 2;
pid {home}/nginx.pid;
error_log {home}/error.log warn;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_timeout 300;
    keepalive_requests 1000000;
    client_max_body_size 0;
    default_type application/octet-stream;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    map $request_method:$args $to {{
        default backend;
        "~^(GET|HEAD):$" {file};
    }}
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        root {folder};
        location / {{ error_page 418 = @$to; return 418; }}
        recursive_error_pages on;
        location @file {{ error_page 403 = @folder; }}
        location @folder {{ return 404; }}
        location @late {{ echo_sleep {latency_s}; echo_exec @file; }}
        location @backend {{
            proxy_pass http://127.0.0.1:{backend};
            proxy_http_version 1.1;
            proxy_set_header Host $http_host;
            proxy_request_buffering off;
        }}
    }}
}}
"""


class NginxS3:
    """A running server; a context manager. ``folder/<bucket>/<key>`` are the objects, which may be written directly."""

    def __init__(self, *, latency_s: float = 0.0) -> None:
        nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        if nginx is None or not _ECHO.exists():
            raise SystemExit(f"this needs Debian's packages {PACKAGES}: apt-get install {PACKAGES}")
        self._home = Path(tempfile.mkdtemp(prefix="lakeckpt-nginx-"))
        self._home.chmod(0o755)
        self.folder = self._home / "objects"
        (self._home / "uploads").mkdir()
        self.folder.mkdir()
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            port, backend = _free_port(), _free_port()
            self.url = f"http://127.0.0.1:{port}"
            told = [sys.executable, "-m", __spec__.name, str(self._home), str(backend), str(latency_s)]
            self._processes.append(subprocess.Popen(told))
            text = _CONFIGURATION.format(
                echo=_ECHO, home=self._home, folder=self.folder, port=port, backend=backend,
                latency_s=latency_s or 0.001, file="late" if latency_s else "file",
            )  # fmt: skip
            user = "user root;" if os.geteuid() == 0 else ""
            (self._home / "nginx.conf").write_text(user + text)
            self._processes.append(
                subprocess.Popen([nginx, "-e", str(self._home / "error.log"), "-c", str(self._home / "nginx.conf")])
            )
            self._wait()
        except BaseException:
            self.close()
            raise

    def options(self) -> dict[str, Any]:
        """``storage_options`` that open it."""
        place = {"endpoint_url": self.url, "region": "us-east-1"}
        return {"key": "k", "secret": "any", **place, "disable_bulk_delete": True}

    def __enter__(self) -> NginxS3:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop both processes and remove the objects."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def _wait(self) -> None:
        until = time.monotonic() + 20
        while True:
            try:
                with urlopen(f"{self.url}/none?list-type=2", timeout=5):
                    return
            except OSError as error:
                if time.monotonic() > until or any(p.poll() is not None for p in self._processes):
                    log = self._home / "error.log"
                    raise RuntimeError(f"nginx did not start: {log.read_text() if log.exists() else error}") from error
                time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# -- the process behind nginx: all but the reading of objects ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Objects:
    """The folder of objects and that of uploads; ``seconds`` gives each file that is put a time of its own."""

    home: Path
    seconds: Iterator[int]
    lock: threading.Lock
    pages: dict[tuple[str, str], list[tuple[str, str]]]

    def path(self, key: str) -> Path:
        return self.home / "objects" / key

    def publish(self, made: Path, key: str, *, new: bool) -> bool:
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        with self.lock:
            second = next(self.seconds)
        os.utime(made, (second, second))
        try:
            if new:
                os.link(made, target)
                made.unlink()
            else:
                made.replace(target)
        except FileExistsError:
            made.unlink()
            return False
        return True

    def listed(self, bucket: str, prefix: str, *, again: bool, named: Callable[[str], str]) -> list[tuple[str, str]]:
        """What is there, as keys and their elements of a listing; ``again``: as when the first page was asked for.

        ``named`` encodes a key as the request asked for it.
        """
        if not again or (bucket, prefix) not in self.pages:
            self.pages[bucket, prefix] = [
                (key, _element(named(key), told)) for key, told in self._looked(bucket, prefix)
            ]
        return self.pages[bucket, prefix]

    def _looked(self, bucket: str, prefix: str) -> list[tuple[str, os.stat_result]]:
        top = self.home / "objects" / bucket
        # The deepest folder that all keys with this prefix lie in; the keys themselves are compared below.
        below = top / prefix.rpartition("/")[0]
        found = []
        for folder, _, names in os.walk(below):
            inside = os.path.relpath(folder, top)
            for name in names:
                path = os.path.join(folder, name)
                key = name if inside == "." else f"{inside}/{name}"
                if key.startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):
                        found.append((key, os.stat(path)))
        return sorted(found)


def _etag(told: os.stat_result) -> str:
    return f'"{int(told.st_mtime):x}-{told.st_size:x}"'


@functools.lru_cache(maxsize=1 << 17)
def _element_of(key: str, size_bytes: int, etag: str, modified: float) -> str:
    return (
        f"<Contents><Key>{escape(key)}</Key><Size>{size_bytes}</Size><ETag>{escape(etag)}</ETag>"
        f"<LastModified>{_time(modified)}</LastModified></Contents>"
    )


def _element(key: str, told: os.stat_result) -> str:
    return _element_of(key, told.st_size, _etag(told), told.st_mtime)


def _time(second: float) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: _Objects
    latency_s: float

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def _serve(self) -> None:
        time.sleep(self.latency_s)
        parts = urlsplit(self.path)
        key, query = unquote(parts.path).lstrip("/"), dict(parse_qsl(parts.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        with contextlib.suppress(BrokenPipeError):
            getattr(self, f"_{self.command.lower()}")(key, query, body)

    do_GET = do_PUT = do_POST = do_DELETE = _serve

    def _get(self, key: str, query: dict[str, str], body: bytes) -> None:
        bucket = key.partition("/")[0]
        if "uploads" in query:
            return self._uploads(bucket, query.get("prefix", ""))
        token, most = query.get("continuation-token") or query.get("start-after", ""), int(query.get("max-keys", _PAGE))
        named = quote if query.get("encoding-type") == "url" else str
        listed = self.objects.listed(bucket, query.get("prefix", ""), again="continuation-token" in query, named=named)
        found = listed[bisect.bisect_right(listed, token, key=lambda one: one[0]) :]
        items = "".join(element for _, element in found[:most])
        more = f"<NextContinuationToken>{escape(found[most - 1][0])}</NextContinuationToken>" if found[most:] else ""
        self._say(
            200,
            f"<ListBucketResult><KeyCount>{len(found[:most])}</KeyCount>"
            f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{items}",
            "ListBucketResult",
        )

    def _uploads(self, bucket: str, prefix: str) -> None:
        items = ""
        for folder in sorted((self.objects.home / "uploads").iterdir()):
            of, _, key = (folder / "key").read_text().partition("/")
            if of == bucket and key.startswith(prefix):
                begun = _time(folder.stat().st_ctime)
                items += (
                    f"<Upload><Key>{escape(quote(key))}</Key><UploadId>{folder.name}</UploadId>"
                    f"<Initiated>{begun}</Initiated></Upload>"
                )
        self._say(
            200, f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{items}", "ListMultipartUploadsResult"
        )

    def _put(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            folder = self.objects.home / "uploads" / query["uploadId"]
            if not folder.is_dir():
                return self._refuse(404, "NoSuchUpload")
            (folder / f"{int(query['partNumber']):05d}").write_bytes(body)
            return self._say(200, "", etag=f'"{hashlib.md5(body).hexdigest()}"')
        if "/" not in key:
            self.objects.path(key).mkdir(exist_ok=True)
            return self._say(200, "")
        self._publish(key, [body])

    def _publish(self, key: str, chunks: list[bytes]) -> None:
        handle, name = tempfile.mkstemp(dir=self.objects.home)
        with os.fdopen(handle, "wb") as file:
            file.writelines(chunks)
        os.chmod(name, 0o644)
        if not self.objects.publish(Path(name), key, new="If-None-Match" in self.headers):
            return self._refuse(412, "PreconditionFailed")
        told = os.stat(self.objects.path(key))
        text = "" if self.command == "PUT" else f"<CompleteMultipartUploadResult><ETag>{escape(_etag(told))}</ETag>"
        self._say(200, text, "CompleteMultipartUploadResult" if text else "", etag=_etag(told))

    def _post(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            folder = Path(tempfile.mkdtemp(dir=self.objects.home / "uploads"))
            (folder / "key").write_text(key)
            text = f"<InitiateMultipartUploadResult><UploadId>{folder.name}</UploadId>"
            return self._say(200, text, "InitiateMultipartUploadResult")
        if "uploadId" not in query:  # a batch of deletes, which some stores do not know
            return self._refuse(501, "NotImplemented")
        folder = self.objects.home / "uploads" / query["uploadId"]
        if not folder.is_dir():
            return self._refuse(404, "NoSuchUpload")
        numbers = [int(one.text or "") for one in ElementTree.fromstring(body).iter() if one.tag.endswith("PartNumber")]
        self._publish(key, [(folder / f"{number:05d}").read_bytes() for number in numbers])
        shutil.rmtree(folder)

    def _delete(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            shutil.rmtree(self.objects.home / "uploads" / query["uploadId"], ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError):
                self.objects.path(key).unlink()
        self._say(204, "")

    def _refuse(self, status: int, code: str) -> None:
        self._say(status, f"<Error><Code>{code}</Code>", "Error")

    def _say(self, status: int, text: str, closing: str = "", *, etag: str | None = None) -> None:
        data = f"{text}</{closing}>".encode() if closing else text.encode()
        self.send_response(status)
        if etag is not None:
            self.send_header("ETag", etag)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    home, port, latency_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    objects = _Objects(home, itertools.count(int(time.time()) - 86_400 * 365), threading.Lock(), {})
    handler = functools.partial(type("Handler", (_Handler,), {"objects": objects, "latency_s": latency_s}))
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
