"""A REST catalog for tests: as much of Iceberg's REST protocol as loading tables and committing to them takes.

In front of another catalog, whose tables it serves on a free port of the loopback device; ``config`` is told with every
table, as credentials that a catalog vends are. https://github.com/apache/iceberg/blob/main/open-api/rest-catalog-open-api.yaml
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.table import CommitTableRequest


@contextmanager
def serving(behind: Catalog, config: Mapping[str, str]) -> Iterator[str]:
    """Serve until the block ends; gives the URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path.split("?")[0] == "/v1/config":
                self._answer(200, {"defaults": {}, "overrides": {}})
            else:
                self._table(None)

        def do_POST(self) -> None:
            self._table(self.rfile.read(int(self.headers["Content-Length"])))

        def _table(self, body: bytes | None) -> None:
            _, _, _, namespace, _, name = self.path.split("?")[0].split("/")
            try:
                table = behind.load_table((namespace, name))
                if body is not None:
                    asked = CommitTableRequest.model_validate_json(body)
                    behind.commit_table(table, asked.requirements, asked.updates)
                    table = behind.load_table((namespace, name))
            except NoSuchTableError as error:
                self._answer(404, {"error": {"message": str(error), "type": "NoSuchTableException", "code": 404}})
                return
            except CommitFailedException as error:
                self._answer(409, {"error": {"message": str(error), "type": "CommitFailedException", "code": 409}})
                return
            metadata = json.loads(table.metadata.model_dump_json())
            told = {"metadata-location": table.metadata_location, "metadata": metadata}
            self._answer(200, {**told, "config": dict(config)})

        def _answer(self, status: int, told: dict[str, Any]) -> None:
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
