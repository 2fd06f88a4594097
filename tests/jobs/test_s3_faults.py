"""A job on S3 loses and repeats no row, whatever happens to whichever of its requests, and wherever it is killed."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeckpt.errors import LakeckptError, RetentionWarning, SaveWarning
from tests.faults.fault_proxy import At, FaultProxy, HttpFault, Request, Where
from tests.jobs.s3_job import ROWS, counted, train
from tests.lake.conftest import moto_endpoint
from tests.patience import PATIENCE_S
from tests.tracking.processes import FORKS

__all__ = ["moto_endpoint"]

FAULTS = [HttpFault.LOST_ANSWER, HttpFault.ERROR, HttpFault.TRUNCATED, HttpFault.SHORT, HttpFault.RESET]


@dataclass
class Place:
    """A lake of 30 rows, and as many empty places for runs as are asked for."""

    endpoint: str
    bucket: str

    @property
    def lake(self) -> str:
        return f"s3://{self.bucket}/lake"

    def run(self) -> str:
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"

    def options(self, proxy: FaultProxy) -> dict[str, Any]:
        quick = {"attempt_s": 30.0, "total_s": PATIENCE_S, "pause_s": 0.01}
        return {"key": "k", "secret": "s-s-s-s", "region": "us-east-1", "endpoint": proxy.url, **quick}


@pytest.fixture(scope="module")
def place(moto_endpoint: str) -> Iterator[Place]:
    client = boto3.client(
        "s3", endpoint_url=moto_endpoint, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s"
    )
    bucket = f"job-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    for part in range(2):
        buffer = io.BytesIO()
        pq.write_table(pa.table({"x": np.arange(part * 15, part * 15 + 15)}), buffer, row_group_size=4)
        client.put_object(Bucket=bucket, Key=f"lake/{part}.parquet", Body=buffer.getvalue())
    yield Place(moto_endpoint, bucket)
    client.close()


def requests_of_a_job(place: Place) -> int:
    with FaultProxy(place.endpoint) as proxy:
        run = place.run()
        train(place.lake, run, place.options(proxy))
        count = len(proxy.requests)
        assert counted(run, place.options(proxy), place.lake) == [1] * ROWS
    return count


def attempt_that_dies(place: Place, run: str, n: int) -> None:
    """A process of its own, killed when its n-th request has come to the proxy."""
    started: list[Any] = []

    def kill(request: Request) -> None:
        if request.n == n:
            os.kill(started[0].pid, signal.SIGKILL)

    with FaultProxy(place.endpoint, on_request=kill) as proxy:
        started.append(FORKS.Process(target=train, args=(place.lake, run, place.options(proxy))))
        started[0].start()
        started[0].join()
        assert started[0].exitcode in (0, -signal.SIGKILL)


def met(proxy: FaultProxy, n: int) -> bool:
    """Whether something happened to the n-th request, if there was one: of two readings of a file at once, the second
    needs no request if the first is over."""
    return bool(proxy.injected) == (len(proxy.requests) >= n)


def faulted(place: Place, n: int, fault: HttpFault) -> None:
    """A job to whose n-th request something happens."""
    run = place.run()
    with FaultProxy(place.endpoint, faults=[At(n, fault)]) as proxy:
        train(place.lake, run, place.options(proxy))
        assert met(proxy, n), (n, fault)
        assert counted(run, place.options(proxy), place.lake) == [1] * ROWS, (n, fault)


def deserted(place: Place, n: int) -> None:
    """A job whose store goes away at the n-th request, for good; the next attempt finds it again."""
    run, ended = place.run(), False
    with FaultProxy(place.endpoint, faults=[Where(lambda request: request.n >= n, HttpFault.LOST_ANSWER)]) as proxy:
        with contextlib.suppress(LakeckptError), warnings.catch_warnings():
            warnings.simplefilter("ignore", RetentionWarning)  # what only clears up may fail, and the job succeed
            warnings.simplefilter("ignore", SaveWarning)  # a save by policy may fail, and the last one raises
            train(place.lake, run, {**place.options(proxy), "total_s": 0.001})
            ended = True
        assert met(proxy, n), n
    if ended:
        with FaultProxy(place.endpoint) as proxy:
            assert counted(run, place.options(proxy), place.lake) == [1] * ROWS, n
    finish(place, run, n)


def killed(place: Place, n: int) -> None:
    """A job that is killed at its n-th request."""
    run = place.run()
    attempt_that_dies(place, run, n)
    finish(place, run, n)


def finish(place: Place, run: str, n: int) -> None:
    with FaultProxy(place.endpoint) as proxy:
        train(place.lake, run, place.options(proxy))
        assert counted(run, place.options(proxy), place.lake) == [1] * ROWS, n


def test_a_fault_at_some_requests_of_a_job_costs_no_row(place: Place) -> None:
    count = requests_of_a_job(place)
    for n in (count // 5, count // 2, count - 5):
        faulted(place, n, HttpFault.LOST_ANSWER)
        deserted(place, n)


def test_a_job_that_is_killed_at_a_request_goes_on_where_it_was(place: Place) -> None:
    count = requests_of_a_job(place)
    run = place.run()
    for n in (count // 2, count // 3):
        attempt_that_dies(place, run, n)
    finish(place, run, n)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(3))
def test_a_fault_or_a_kill_at_every_request_of_a_job_costs_no_row(place: Place, part: int) -> None:
    """Every third request, so that several processes may share the work."""
    for n in range(1 + part, requests_of_a_job(place) + 1, 3):
        faulted(place, n, FAULTS[n % len(FAULTS)])
        (deserted if n % 2 else killed)(place, n)


@pytest.mark.parametrize("fault", [HttpFault.STALE])
def test_listings_of_the_past_end_in_the_right_rows_or_an_error(place: Place, fault: HttpFault) -> None:
    run = place.run()
    with FaultProxy(place.endpoint) as proxy:
        options = place.options(proxy)
        train(place.lake, run, options)
        proxy.faults = [Where(lambda r: "list-type" in r.query, fault)]
        with contextlib.suppress(LakeckptError):
            train(place.lake, run, options)
        proxy.faults = []
        train(place.lake, run, options)
        assert counted(run, options, place.lake) == [1] * ROWS
