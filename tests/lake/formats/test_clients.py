"""What a format's own client is told of a store: what our own store has, under whatever names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from lakeckpt import open_table
from lakeckpt.errors import ConfigError
from lakeckpt.lake.formats.clients import object_store_options
from lakeckpt.lake.formats.iceberg.io import storage_options_of
from lakeckpt.lake.storage.object_store import ObjectStorage
from tests.lake.conftest import CANARY, S3


def test_local_places_need_nothing_and_other_stores_get_the_texts() -> None:
    assert object_store_options("/lake/t", {"key": "x"}) == {}
    told = object_store_options("gs://b/t", {"service_account_path": "p", "nested": {"a": 1}})
    assert told["service_account_path"] == "p" and "nested" not in told and told["timeout"] == "60s"


@pytest.mark.parametrize(
    "given",
    [
        {"key": "K", "secret": "S", "client_kwargs": {"endpoint_url": "http://h:1", "region_name": "r"}},
        {"AWS_ACCESS_KEY_ID": "K", "AWS_SECRET_ACCESS_KEY": "S", "AWS_ENDPOINT": "http://h:1", "AWS_REGION": "r"},
        {"s3.access-key-id": "K", "s3.secret-access-key": "S", "s3.endpoint": "http://h:1", "s3.region": "r"},
    ],
)
def test_options_by_every_librarys_names_are_told_by_object_stores(given: dict[str, Any]) -> None:
    told = object_store_options("s3://b/t", given)
    assert {name: value for name, value in told.items() if name.startswith("aws_")} == {
        "aws_access_key_id": "K",
        "aws_secret_access_key": "S",
        "aws_endpoint": "http://h:1",
        "aws_region": "r",
    }
    assert told["allow_http"] == "true"


def test_everything_that_is_said_of_a_store_is_told() -> None:
    given = {"anon": True, "region": "eu-north-1", "requester_pays": True, "verify": False, "proxy": "http://p:1"}
    told = object_store_options("s3a://b/t", {**given, "force_virtual_addressing": True})
    assert told["aws_skip_signature"] == told["aws_request_payer"] == told["allow_invalid_certificates"] == "true"
    assert (told["aws_region"], told["proxy_url"]) == ("eu-north-1", "http://p:1")
    assert told["aws_virtual_hosted_style_request"] == "true" and "aws_endpoint" not in told
    with pytest.raises(ConfigError, match="'secrt' is not valid") as caught:
        open_table("s3://b/t", storage_options={"secrt": CANARY})
    assert CANARY not in str(caught.value)


def test_credentials_of_the_environment_and_of_profiles_open_a_table(
    tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(str(tmp_path / "t"), pa.table({"id": [1, 2, 3]}))
    for path in (tmp_path / "t").rglob("*.*"):
        s3.client.put_object(Bucket=s3.bucket, Key=str(path.relative_to(tmp_path)), Body=path.read_bytes())
    place = f"s3://{s3.bucket}/t"
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "credentials").write_text(f"[lake]\naws_access_key_id = test-key\naws_secret_access_key = {CANARY}\n")
    assert open_table(place, storage_options={"profile": "lake"}).num_rows == 3
    with pytest.raises(ConfigError, match="profile"):
        open_table(place, storage_options={"profile": "other"})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    table = open_table(place)
    assert table.num_rows == 3 and CANARY not in repr(table)


def test_properties_of_a_catalog_are_passed_on_by_the_names_of_our_options() -> None:
    given = {"client.region": "a", "client.access-key-id": "K", "client.secret-access-key": "S", "s3.region": "r"}
    more = {
        "s3.force-virtual-addressing": "true",
        "s3.anonymous": "False",
        "s3.connect-timeout": 5,
        "adls.sas-token": "x",
    }
    told = storage_options_of({**given, **more}, "s3a://b/t")
    assert told == {
        "region": "r",
        "access_key_id": "K",
        "secret_access_key": "S",
        "force_virtual_addressing": True,
        "anonymous": False,
    }
    ObjectStorage("s3://b/t", storage_options=told)
    azure = {"adls.account-name": "a", "adls.sas-token": "sv=1&sig=x"}
    assert storage_options_of(azure, "abfss://c@a/t") == {"account_name": "a", "sas_token": "sv=1&sig=x"}
    assert storage_options_of(given, "/lake/t") is storage_options_of({}, "gs://b/t") is None


@pytest.mark.parametrize(
    "name", ["s3.signer", "s3.role-arn", "client.role-arn", "gcs.oauth2.token", "adls.connection-string"]
)
def test_properties_that_only_pyicebergs_clients_know_are_refused_by_name(name: str) -> None:
    place = {"gcs": "gs://b/t", "adls": "abfss://c@a/t"}.get(name.partition(".")[0], "s3://b/t")
    with pytest.raises(ConfigError, match=f"the catalog sets '{name}'") as caught:
        storage_options_of({name: CANARY}, place)
    assert CANARY not in str(caught.value)
