"""This module holds the places of runs that go away: a local folder, and a prefix of S3, which moto serves.

`take_away` and `bring_back` of a place say what a job sees: a folder that is renamed or emptied (as an unmounted share
looks), objects that are at another prefix or nowhere, and a store that refuses connections or hangs. The module starts
the threads of a proxy for a store that refuses or hangs; `open_place` ends them.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.exceptions import ClientError

from tests.faults.fault_proxy import FaultProxy, HttpFault, Where

__all__ = ["ATTEMPT_S", "REFUSALS", "S3", "Local", "open_place"]

ATTEMPT_S = 15.0
"""The longest attempt at a request, which may begin when the time of the request is nearly over."""
REFUSALS = ("refuse", "hang")
"""How a store goes away that stands behind a proxy: it refuses connections and breaks those that are open, or it
answers nothing."""


class Local:
    """A run in a folder, which lies beside its place while it is away."""

    options: Mapping[str, Any] = {}

    def __init__(self, folder: Path) -> None:
        self.uri, self._kept = str(folder / "run"), folder / "kept"

    def take_away(self, how: str) -> None:
        Path(self.uri).rename(self._kept)
        if how == "emptied":
            Path(self.uri).mkdir()

    def bring_back(self) -> None:
        if Path(self.uri).exists():
            Path(self.uri).rmdir()  # it fails if something was written there
        self._kept.rename(self.uri)


class S3:
    """A run in a bucket of moto's server; while it is away, the objects are at another prefix, or nowhere."""

    def __init__(self, endpoint: str) -> None:
        place = {"endpoint_url": endpoint, "region_name": "us-east-1"}
        self.options: Mapping[str, Any] = {"key": "k", "secret": "s-s-s-s", "client_kwargs": place}
        self._client = boto3.client("s3", **place, aws_access_key_id="k", aws_secret_access_key="s")
        self._bucket = f"away-{uuid.uuid4().hex[:12]}"
        self._client.create_bucket(Bucket=self._bucket)
        self.uri = f"s3://{self._bucket}/run"
        self._kept: dict[str, bytes] = {}

    def take_away(self, how: str) -> None:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix="run/")
        for key in [one["Key"] for page in pages for one in page.get("Contents", [])]:
            with contextlib.suppress(ClientError):  # the job has removed it meanwhile
                if how == "renamed":
                    self._client.copy_object(Bucket=self._bucket, Key=f"kept-{key}", CopySource=f"{self._bucket}/{key}")
                    self._kept[key] = b""
                else:
                    self._kept[key] = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
                self._client.delete_object(Bucket=self._bucket, Key=key)

    def bring_back(self) -> None:
        for key, data in self._kept.items():
            if data:
                self._client.put_object(Bucket=self._bucket, Key=key, Body=data)
            else:
                self._client.copy_object(Bucket=self._bucket, Key=key, CopySource=f"{self._bucket}/kept-{key}")


class Proxied(S3):
    """A run in a bucket that jobs reach by a proxy, which refuses or hangs. ``total_s``: of the store's requests."""

    def __init__(self, endpoint: str, total_s: float) -> None:
        super().__init__(endpoint)
        self._server, self._proxy = endpoint, FaultProxy(endpoint)
        self._port = urlsplit(self._proxy.url).port or 0
        self._held: socket.socket | None = None
        client = {**self.options["client_kwargs"], "endpoint_url": self._proxy.url}
        times = {"total_s": total_s, "attempt_s": min(ATTEMPT_S, total_s)}
        self.options = {**self.options, **times, "client_kwargs": client}

    def take_away(self, how: str) -> None:
        if how == "hang":
            self._proxy.faults = [Where(lambda request: True, HttpFault.STALL)]
            return
        self._proxy.close()
        self._held = socket.socket()  # nobody listens, and nobody else gets the port
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", self._port))

    def bring_back(self) -> None:
        self._proxy.faults = []
        if self._held is not None:
            self._held.close()
            self._held, self._proxy = None, FaultProxy(self._server, port=self._port)

    def close(self) -> None:
        """End the proxy."""
        if self._held is not None:
            self._held.close()
        self._proxy.close()


@contextlib.contextmanager
def open_place(kind: str, how: str, folder: Path, endpoint: str, total_s: float = 60.0) -> Iterator[Local | S3]:
    """Yield a place of a ``kind``, "local" or "s3", which is to go away as ``how`` says."""
    if kind == "local":
        yield Local(folder)
    elif how not in REFUSALS:
        yield S3(endpoint)
    else:
        with contextlib.closing(Proxied(endpoint, total_s)) as place:
            yield place
