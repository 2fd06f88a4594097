"""Credentials reach the store, by every way of starting a process, and nothing that is written, said or sent."""

from __future__ import annotations

import base64
import io
import logging
import multiprocessing
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from moto.core import authorization

from lakeckpt import CheckpointManager, LakeDataset, LakeLoader, open_table
from lakeckpt.errors import ConfigError, StorageError
from lakeckpt.lake import credentials
from lakeckpt.lake.credentials import Secrets
from lakeckpt.lake.http import HttpClient
from lakeckpt.lake.s3_options import S3Options
from lakeckpt.lake.storage import open_storage, redact_uri
from lakeckpt.testing.fault_proxy import FaultProxy, HttpFault, Where
from tests.lake.conftest import S3
from tests.patience import PATIENCE_S

ROWS = 64


def written(s3: S3) -> str:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"x": np.arange(ROWS)}), buffer, row_group_size=8)
    s3.client.put_object(Bucket=s3.bucket, Key="lake/a.parquet", Body=buffer.getvalue())
    return f"s3://{s3.bucket}/lake"


@pytest.fixture
def strict(s3: S3) -> Iterator[dict[str, Any]]:
    """Options with the only key that the server takes: it verifies every signature, while this lasts."""
    iam = boto3.client(
        "iam",
        endpoint_url=s3.endpoint,
        region_name="us-east-1",
        aws_access_key_id="test-key",
        aws_secret_access_key="any",
    )
    iam.create_user(UserName=s3.bucket)
    policy = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'
    iam.put_user_policy(UserName=s3.bucket, PolicyName="all", PolicyDocument=policy)
    key = iam.create_access_key(UserName=s3.bucket)["AccessKey"]
    iam.close()
    before = authorization.settings.INITIAL_NO_AUTH_ACTION_COUNT
    authorization.settings.INITIAL_NO_AUTH_ACTION_COUNT = 0
    try:
        yield {**s3.options, "key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}
    finally:
        authorization.settings.INITIAL_NO_AUTH_ACTION_COUNT = before


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak), "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_workers_read_a_store_that_verifies_signatures(s3: S3, strict: dict[str, Any], method: str) -> None:
    uri = written_strictly(s3, strict)
    with pytest.raises(StorageError, match="refuses the credentials"):
        open_table(uri, storage_options={**strict, "secret": "another-secret"})
    dataset = LakeDataset(open_table(uri, storage_options=strict), batch_size=8)
    loader = LakeLoader(dataset, num_workers=2, multiprocessing_context=method)
    assert sorted(x for batch in loader for x in batch["x"].tolist()) == list(range(ROWS))


def written_strictly(s3: S3, strict: dict[str, Any]) -> str:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"x": np.arange(ROWS)}), buffer, row_group_size=8)
    open_storage(f"s3://{s3.bucket}/lake", storage_options=strict).put("a.parquet", [buffer.getvalue()])
    return f"s3://{s3.bucket}/lake"


def test_a_job_shows_its_secrets_nowhere(
    s3: S3,
    tmp_path: Path,
    moto_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    planted = {name: f"canary/{name}+5ecr3t=" for name in ("key", "secret", "token")}
    caplog.set_level(logging.DEBUG)
    seen: list[bytes] = []
    dump = multiprocessing.reduction.dump
    dumps = multiprocessing.reduction.ForkingPickler.dumps

    def watched_dump(thing: Any, file: Any, protocol: Any = None) -> None:
        own = io.BytesIO()
        dump(thing, own, protocol)
        seen.append(own.getvalue())
        file.write(own.getvalue())

    def watched_dumps(thing: Any, protocol: Any = None) -> Any:
        data = dumps(thing, protocol)
        seen.append(bytes(data))
        return data

    monkeypatch.setattr(multiprocessing.reduction, "dump", watched_dump)
    monkeypatch.setattr(multiprocessing.reduction.ForkingPickler, "dumps", watched_dumps)
    uri, raised = written(s3), []
    with FaultProxy(moto_endpoint, faults=[Where(lambda r: r.n % 5 == 0, HttpFault.ERROR)]) as proxy:
        options = {**planted, "endpoint_url": proxy.url, "region": "us-east-1", "pause_s": 0.01}
        model = torch.nn.Linear(2, 2)
        for workers in (1, 0):
            loader = LakeLoader(
                LakeDataset(open_table(uri, storage_options=options), batch_size=8),
                num_workers=workers,
                multiprocessing_context="forkserver" if workers else None,
            )
            state = {"model": model, "reader": loader}
            with CheckpointManager(f"s3://{s3.bucket}/run", state, storage_options=options) as manager:
                done = manager.restore()
                for batch in loader:
                    manager.step(batch)
                    if manager.steps_done == done + 4:
                        break
                seen += [repr(thing).encode() for thing in (manager, loader, loader.dataset, loader.state_dict())]
        proxy.faults = [Where(lambda r: True, HttpFault.SLOW_DOWN)]
        storage = open_storage(uri, storage_options={**options, "max_attempts": 2})
        calls: list[Callable[[], object]] = [
            storage.list,
            lambda: storage.read("x"),
            lambda: storage.put("x", [b"1"]),
            lambda: storage.put_new("x", b"1"),
            lambda: storage.delete("x"),
            lambda: open_storage(uri, storage_options={**options, "secrt": planted["secret"]}),
        ]
        for call in calls:
            with pytest.raises((StorageError, ConfigError)) as caught:
                call()
            raised.append("".join(traceback.format_exception(caught.value)))
        seen += [pickle.dumps(storage), repr(storage).encode(), repr(storage._options).encode()]
    seen += [text.encode() for text in raised] + [caplog.text.encode()]
    seen += [text.encode() for text in capfd.readouterr()]
    seen += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    seen += [s3.client.get_object(Bucket=s3.bucket, Key=key)["Body"].read() for key in s3.keys()]  # noqa: SIM118
    assert len(proxy.injected) > 10
    assert any(b"S3Storage" in data or b"lake.s3" in data for data in seen)  # a worker did get the storage
    assert [data for data in seen if any(value.encode() in data for value in planted.values())] == []


def test_secrets_are_found_in_memory_by_ticket_and_by_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Secrets({"key": "the-key", "secret": "the-secret"})
    data = pickle.dumps(made)
    assert b"the-key" not in data
    assert b"the-secret" not in data
    assert pickle.loads(data) is made
    monkeypatch.setattr(credentials, "_KEPT", {})
    again = pickle.loads(data)  # as another process would: by way of /proc
    assert again is not made
    assert again.take() == {"key": "the-key", "secret": "the-secret"}
    monkeypatch.setattr(credentials, "_KEPT", {})
    lost = pickle.loads(data.replace(str(made._ticket).encode(), b"0" * 32))
    with pytest.raises(ConfigError, match=r"key, secret.* do not travel in a pickle"):
        lost.take()
    assert repr(made) == repr(lost) == "Secrets(key, secret)"


def test_texts_of_clients_are_scrubbed() -> None:
    made = Secrets({"secret": "a+b/c=d", "token": "t" * 20})
    assert made.scrub("x a+b/c=d a%2Bb%2Fc%3Dd " + "t" * 20) == "x *** *** ***"


@pytest.mark.parametrize(
    "given",
    [
        {"key": "K", "secret": "S", "token": "T", "endpoint_url": "http://h:1", "client_kwargs": {"region_name": "r"}},
        {"AWS_ACCESS_KEY_ID": "K", "AWS_SECRET_ACCESS_KEY": "S", "AWS_SESSION_TOKEN": "T", "AWS_REGION": "r",
         "AWS_ENDPOINT_URL": "http://h:1", "AWS_ALLOW_HTTP": "true"},
        {"access_key": "K", "secret_key": "S", "session_token": "T", "endpoint_override": "h:1", "scheme": "http",
         "region": "r"},
        {"s3.access-key-id": "K", "s3.secret-access-key": "S", "s3.session-token": "T", "s3.endpoint": "http://h:1",
         "s3.region": "r"},
        {"aws_access_key_id": "K", "aws_secret_access_key": "S", "aws_session_token": "T", "region_name": "r",
         "endpoint": "http://h:1/", "use_listings_cache": True},
    ],
)  # fmt: skip
def test_options_are_taken_by_every_librarys_names(given: dict[str, Any]) -> None:
    options = S3Options.of(given)
    assert options.secrets.take() == {"key": "K", "secret": "S", "token": "T"}
    assert (options.endpoint, options.region) == ("http://h:1", "r")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"secrt": "S"}, r"no storage option 'secrt' for S3; near it are 'secret'"),
        ({"client_kwargs": {"region_nam": "r"}}, r"'region_nam' for S3; near it are 'region_name'"),
        ({"key": "K"}, "belong together; given: key"),
        ({"region": "a", "region_name": "b"}, "says otherwise than another name"),
        ({"key": 1, "secret": "S"}, "'key' must be a text, not int"),
        ({"anon": "perhaps"}, "must be true or false"),
        ({"attempt_s": -1}, "attempt_s must be a number above 0"),
        ({"s3_additional_kwargs": {"Tagging": "x"}}, "has Tagging; known are"),
        ({"sse_customer_key": "S"}, "SSE-C"),
        ({"endpoint_url": "http://u:pass@h:1"}, r"^the storage option 'endpoint' has a user or a password in its URL"),
        ({"proxy": "http://u:pass@h:1"}, r"^the storage option 'proxy' has a user or a password in its URL"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        S3Options.of(given)
    assert "u:pass" not in str(raised.value)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://lake/a:b@c/d?x=1#y", "s3://lake/a:b@c/d"),
        ("S3://key:pass@lake/t", "s3://lake/t"),
        ("s3://key:pa/ss+1@lake/t", "s3://lake/t"),
        ("s3://key:pa?s/s#1@lake/t", "s3://lake/t"),
        ("s3://key:pa/ss/t", "s3://key:***"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        ("http://[::1]/a@b", "http://[::1]/a@b"),
        ("/folder/a:b@c?d", "/folder/a:b@c?d"),
    ],
)
def test_places_are_shown_without_what_is_secret_in_them(uri: str, shown: str) -> None:
    assert redact_uri(uri) == shown


def test_a_key_in_a_url_is_refused_unseen() -> None:
    with pytest.raises(ConfigError, match="options go beside it") as raised:
        open_storage("s3://AKIA5:c4n/ary+5@lake/t")
    assert "ary" not in str(raised.value) and "c4n" not in str(raised.value)


def test_a_proxy_of_the_environment_gets_its_password() -> None:
    seen: list[str | None] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Proxy-Authorization"])
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            client = HttpClient(
                clock=time.monotonic,
                stall_s=60,
                connections=1,
                proxy=f"http://user:pa%2Fss%40@127.0.0.1:{server.server_port}",
            )
            answer = client.exchange(
                "GET", "http://lake.test/x", headers={}, until=time.monotonic() + PATIENCE_S, most_bytes=9
            )
        finally:
            server.shutdown()
            serving.join()
    assert answer.content == b"ok"
    assert seen == ["Basic " + base64.b64encode(b"user:pa/ss@").decode()]
    with pytest.raises(ConfigError, match="is no URL like") as raised:
        HttpClient(clock=time.monotonic, stall_s=1, connections=1, proxy="http://user:pa/ss@127.0.0.1:9")
    assert "user" not in str(raised.value)


def test_credentials_of_the_environment_are_found(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
    with pytest.raises(ConfigError, match="no credentials were found for the bucket"):
        open_storage(f"s3://{s3.bucket}").put("x", [b"1"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    open_storage(f"s3://{s3.bucket}").put("x", [b"1"])
    assert s3.keys() == ["x"]
    with pytest.raises(StorageError, match="refuses the credentials"):  # the bucket is private
        open_storage(f"s3://{s3.bucket}", storage_options={"anon": True}).read("x")
    s3.client.put_object_acl(Bucket=s3.bucket, Key="x", ACL="public-read")
    assert open_storage(f"s3://{s3.bucket}", storage_options={"anon": True}).read("x", 0, 1) == b"1"
