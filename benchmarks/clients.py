"""Which client should read from S3?  ``python -m benchmarks.clients [--json FILE]``

The same reads of the same objects by each of the clients that were candidates, in one run, interleaved: from nginx in
front of a folder (``s3_server``), so that the server is not what is measured. Every read names the ETag it expects,
where the client can say so. Then what a client does when the server falls silent, by its own defaults, and whether a
secret that it was given can be read in its pickle or its ``repr``.
"""

from __future__ import annotations

import multiprocessing
import pickle
import resource
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import boto3
import botocore.config
import numpy as np
import obstore
import obstore.store
import pyarrow.fs
import s3fs

from benchmarks.measure import Measured, report
from benchmarks.s3_server import NginxS3
from lakeckpt.lake.storage.open import open_storage
from tests.faults.fault_proxy import FaultProxy, HttpFault, Where

SECRET = "canary-5ecr3t"
SMALL, SMALL_READS, SMALL_BYTES = 200, 2000, 16 << 10
LARGE_BYTES, SPAN_BYTES = 256 << 20, 8 << 20
LATENCY_S = 0.020
REPETITIONS = 5
SILENCE_S = 100.0

Read = Callable[[str, int, int, str], bytes]


class Client(NamedTuple):
    """``read(key, start, stop, etag)`` of the bucket ``b``; ``holder`` is what would be sent to a worker."""

    read: Read
    holder: Any


def ours(url: str) -> Client:
    options = {"key": "k", "secret": SECRET, "endpoint_url": url, "region": "us-east-1"}
    storage = open_storage("s3://b", storage_options=options)
    return Client(lambda key, start, stop, etag: storage.read(key, start, stop, etag=etag), storage)


def by_obstore(url: str) -> Client:
    store = obstore.store.S3Store(
        "b",
        access_key_id="k",
        secret_access_key=SECRET,
        endpoint=url,
        region="us-east-1",
        client_options={"allow_http": True},
    )

    def read(key: str, start: int, stop: int, etag: str) -> bytes:
        found = obstore.get(store, key, options={"range": (start, stop), "if_match": f'"{etag}"'})
        return bytes(found.bytes())

    return Client(read, store)


def by_pyarrow(url: str) -> Client:
    filesystem = pyarrow.fs.S3FileSystem(
        access_key="k", secret_key=SECRET, endpoint_override=url.removeprefix("http://"), scheme="http",
        region="us-east-1",
    )  # fmt: skip

    def read(key: str, start: int, stop: int, etag: str) -> bytes:
        with filesystem.open_input_file(f"b/{key}") as file:  # a HEAD for each; there is no If-Match
            return bytes(file.read_at(stop - start, start))

    return Client(read, filesystem)


def by_s3fs(url: str) -> Client:
    filesystem = s3fs.S3FileSystem(
        key="k", secret=SECRET, client_kwargs={"endpoint_url": url, "region_name": "us-east-1"},
        skip_instance_cache=True,
    )  # fmt: skip
    return Client(lambda key, start, stop, etag: filesystem.cat_file(f"b/{key}", start=start, end=stop), filesystem)


def by_boto3(url: str) -> Client:
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key=SECRET,
        config=botocore.config.Config(max_pool_connections=64),
    )  # fmt: skip

    def read(key: str, start: int, stop: int, etag: str) -> bytes:
        found = client.get_object(Bucket="b", Key=key, Range=f"bytes={start}-{stop - 1}", IfMatch=f'"{etag}"')
        return bytes(found["Body"].read())

    return Client(read, client)


CLIENTS: Mapping[str, Callable[[str], Client]] = {
    "lakeckpt": ours,
    "obstore": by_obstore,
    "pyarrow.fs": by_pyarrow,
    "s3fs": by_s3fs,
    "boto3": by_boto3,
}


def small(client: Client, etags: Mapping[str, str], pool: ThreadPoolExecutor) -> None:
    """Tails of files, as footers are read."""
    jobs = [pool.submit(client.read, f"small/{n % SMALL}", 0, SMALL_BYTES, etags[f"small/{n % SMALL}"])
            for n in range(SMALL_READS)]  # fmt: skip
    assert all(len(job.result()) == SMALL_BYTES for job in jobs)


def large(client: Client, etags: Mapping[str, str], pool: ThreadPoolExecutor) -> None:
    """A large object, 16 spans of 8 MiB in flight."""
    jobs = [pool.submit(client.read, "large", at, at + SPAN_BYTES, etags["large"])
            for at in range(0, LARGE_BYTES, SPAN_BYTES)]  # fmt: skip
    assert sum(len(job.result()) for job in jobs) == LARGE_BYTES


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of this process's processor time."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    spent, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    return spent, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def silence(make: Callable[[str], Client], etag: str) -> str:
    """What a read comes to when the server takes a request and says nothing."""
    with NginxS3() as server, FaultProxy(server.url, faults=[Where(lambda request: True, HttpFault.STALL)]) as proxy:
        client, told = make(proxy.url), [f"nothing in {SILENCE_S:.0f} s"]

        def ask() -> None:
            begin = time.monotonic()
            try:
                client.read("small/0", 0, 10, etag)
            except Exception as error:
                told[0] = f"{type(error).__name__} after {time.monotonic() - begin:.0f} s"

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(SILENCE_S)
        return f"{told[0]}, {len(proxy.requests)} tries"


def forked(make: Callable[[str], Client]) -> str:
    """What a read by a client of its own comes to in a forked process."""
    context = multiprocessing.get_context("fork")
    with NginxS3() as server:
        storage = open_storage("s3://b", storage_options=server.options())
        storage.put("x", [b"0123456789"])
        (listed,) = storage.list()
        make(server.url).read("x", 0, 4, str(listed.etag))
        told = context.SimpleQueue()

        def ask() -> None:
            try:
                told.put("reads" if make(server.url).read("x", 0, 4, str(listed.etag)) == b"0123" else "reads amiss")
            except Exception as error:
                told.put(type(error).__name__)

        child = context.Process(target=ask)
        child.start()
        child.join(20)
        if child.exitcode is None:
            child.kill()
            child.join()
            return "hangs"
        return str(told.get()) if not told.empty() else f"dies ({child.exitcode})"


def shows(holder: Any) -> str:
    """Where the secret can be read."""
    places = ["repr"] if SECRET in repr(holder) else []
    try:
        places += ["pickle"] if SECRET.encode() in pickle.dumps(holder) else []
    except Exception:
        places += ["(does not pickle)"]
    return ", ".join(places) or "nowhere"


def seconds() -> tuple[list[Measured], list[tuple[str, ...]]]:
    """Both readings by every client, interleaved; what was measured, and the rows of the table."""
    data = np.random.default_rng(0).bytes(LARGE_BYTES)
    measured: list[Measured] = []
    rows: list[tuple[str, ...]] = []
    for title, work, latency_s in (
        (f"{SMALL_READS:,} reads of 16 KiB", small, 0.0),
        (f"{SMALL_READS:,} reads of 16 KiB, {LATENCY_S * 1e3:.0f} ms away", small, LATENCY_S),
        (f"{LARGE_BYTES >> 20} MiB in spans of 8", large, 0.0),
    ):
        with NginxS3(latency_s=latency_s) as server, ThreadPoolExecutor(64 if work is small else 16) as pool:
            storage = open_storage("s3://b", storage_options=server.options())
            for n in range(SMALL if work is small else 0):
                storage.put(f"small/{n}", [data[n : n + SMALL_BYTES]])
            if work is large:
                storage.put("large", [data])
            etags = {info.path: str(info.etag) for info in storage.list()}
            clients = {name: make(server.url) for name, make in CLIENTS.items()}
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in CLIENTS}
            for repetition in range(REPETITIONS + 1):
                for name, client in clients.items():
                    spent = timed(partial(work, client, etags, pool))
                    if repetition:  # the first one opens connections
                        found[name].append(spent)
        for name, times in found.items():
            walls, processor = zip(*times, strict=True)
            one = Measured(name=f"{title}: {name}", seconds=walls, peak_bytes=0, processor_seconds=processor)
            measured.append(one)
            spread = f"{min(one.seconds):.2f} … {max(one.seconds):.2f} s"
            rows.append((one.name, f"{one.median_s:.2f} s", spread, f"{one.processor_s:.2f} s"))
    return measured, rows


def main() -> None:
    # In processes of their own, because a child that uses an inherited client of obstore hangs. Parents were not
    # seen to hang: 1,001 forks over HTTP and TLS beside reads, by children that leave the client alone (tests/lake).
    in_fork = {}
    for name, make in CLIENTS.items():
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as one:
            in_fork[name] = one.submit(forked, make).result()
    measured, rows = seconds()
    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        silent = dict(zip(CLIENTS, pool.map(lambda make: silence(make, "x"), CLIENTS.values()), strict=True))
    for name, make in CLIENTS.items():
        secret = shows(make("http://127.0.0.1:1").holder)
        print(
            f"{name:10}  forked: {in_fork[name]}; a silent server: {silent[name]}; its secret can be read in: {secret}"
        )
    report("clients of S3", ("reading", "median", "spread", "processor"), rows, measured)


if __name__ == "__main__":
    main()
