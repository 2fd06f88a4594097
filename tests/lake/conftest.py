"""Stores for the tests of ``lakeckpt.lake``: local folders, memory, and S3 as moto's server speaks it.

The server is started once per session on a free port of the loopback device, and stopped at its end.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.open import open_storage
from lakeckpt.testing.faulty_storage import FaultyStorage

CANARY = "canary-5ecr3t-value"


@dataclass(frozen=True)
class S3:
    """A bucket on moto's server; ``options`` open it through fsspec, ``client`` is boto3's."""

    endpoint: str
    bucket: str
    client: Any

    @property
    def options(self) -> dict[str, Any]:
        return self.options_at(self.endpoint)

    def options_at(self, endpoint: str) -> dict[str, Any]:
        """The same bucket by another way, as through a proxy."""
        place = {"endpoint_url": endpoint, "region_name": "us-east-1"}
        return {"key": "test-key", "secret": CANARY, "client_kwargs": place}

    def keys(self) -> list[str]:
        return [item["Key"] for item in self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])]


def one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """S3 decides atomically whether a conditional write wins; moto looks first and writes then."""
    lock = threading.Lock()

    @functools.wraps(method)
    def locked(*args: Any, **named: Any) -> Any:
        with lock:
            return method(*args, **named)

    return locked


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", one_at_a_time(S3Response.put_object))
        server.start()
        try:
            host, port = server.get_host_and_port()
            yield f"http://{host}:{port}"
        finally:
            server.stop()


@pytest.fixture
def s3(moto_endpoint: str) -> Iterator[S3]:
    client = boto3.client(
        "s3",
        endpoint_url=moto_endpoint,
        region_name="us-east-1",
        aws_access_key_id="test-key",
        aws_secret_access_key=CANARY,
    )
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    yield S3(endpoint=moto_endpoint, bucket=bucket, client=client)
    client.close()


@pytest.fixture(params=["local", "s3", "faulty-local"])
def make_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Opens a new storage object on the same, at first empty, place at each call; one kind of store per test run."""
    kind = request.param
    counter = itertools.count()
    name = f"ru n-ü-{uuid.uuid4().hex[:8]}-{next(counter)}"
    if kind == "s3":
        bucket: S3 = request.getfixturevalue("s3")
        return lambda: open_storage(f"s3://{bucket.bucket}/{name}/run", storage_options=bucket.options)
    if kind == "faulty-local":
        return lambda: FaultyStorage(open_storage(tmp_path / name / "run"))
    return lambda: open_storage(tmp_path / name / "run")
