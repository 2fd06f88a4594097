"""How is a format's own client told of a store and its credentials, and what do its failures mean?

deltalake and hudi open a table's metadata by themselves, and stand on object_store: it is told, under its names, what
the caller said of the store (of S3 under any name that `S3Options` knows) and what botocore finds in the environment
and its configuration files, as our own store has it; with bounds on how long it may try. Of other stores, texts go as
they are. Values are never shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import botocore.exceptions
import botocore.session

from lakeckpt.errors import ConfigError, StorageError, TableError
from lakeckpt.lake.credentials import silent
from lakeckpt.lake.s3_options import S3Options
from lakeckpt.lake.storage import split_uri

__all__ = ["asking", "is_of_the_store", "object_store_options"]

_BOUNDS = {"timeout": "60s", "connect_timeout": "10s", "max_retries": "4", "retry_timeout": "120s"}
_AMAZON = (".amazonaws.com", ".amazonaws.com.cn")


def object_store_options(uri: str, storage_options: Mapping[str, Any] | None) -> dict[str, str]:
    """The options of object_store for what ``storage_options`` say of the store of ``uri``; {} for local files.

    They hold credentials. `ConfigError` where S3 options are unknown or no credentials are found.
    """
    scheme, _ = split_uri(uri)
    if scheme == "file":
        return {}
    if scheme not in ("s3", "s3a"):
        return _BOUNDS | {name: value for name, value in (storage_options or {}).items() if isinstance(value, str)}
    given = S3Options.of(storage_options)
    found = _BOUNDS | _flags(given)
    try:
        session = botocore.session.Session(profile=given.profile)
        found |= _place(session, given) | _credentials(session, given)
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"cannot open an S3 bucket: {given.secrets.scrub(str(error))}") from None
    return found


@contextmanager
def asking(explained: Callable[[BaseException, str], Exception]) -> Iterator[None]:
    """Turn what a client raises into ``explained(error, its text in one line)``; our own errors go through."""
    try:
        yield
    except (TableError, ConfigError, StorageError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt; panics of Rust are no `Exception` either
        failure = explained(error, " ".join(str(error).split())[:500])
    else:
        return
    raise failure from None


def is_of_the_store(error: BaseException, text: str) -> bool:
    """Whether it is the store that failed, and not what lies in it."""
    return isinstance(error, OSError) or "Generic S3 error" in text or "error sending request" in text


def _flags(given: S3Options) -> dict[str, str]:
    found: dict[str, str] = {}
    if given.requester_pays:
        found["aws_request_payer"] = "true"
    if given.virtual_hosts is not None:
        found["aws_virtual_hosted_style_request"] = str(given.virtual_hosts).lower()
    if given.verify is False:
        found["allow_invalid_certificates"] = "true"
    if given.proxy is not None:
        found["proxy_url"] = given.proxy
    return found


def _place(session: Any, given: S3Options) -> dict[str, str]:
    region = given.region or session.get_config_variable("region") or "us-east-1"
    endpoint = given.endpoint
    if endpoint is None:
        # Making a client is what tells; it takes a while.
        client = session.create_client("s3", region_name=region, aws_access_key_id="-", aws_secret_access_key="-")
        endpoint = str(client.meta.endpoint_url)
        client.close()
        if endpoint.endswith(_AMAZON):
            return {"aws_region": region}
    plain = str(endpoint.startswith("http://")).lower()
    return {"aws_region": region, "aws_endpoint": endpoint, "aws_allow_http": plain}


def _credentials(session: Any, given: S3Options) -> dict[str, str]:
    if given.anonymous:
        return {"aws_skip_signature": "true"}
    if given.secrets:
        taken = given.secrets.take()
        key, secret, token = taken["key"], taken["secret"], taken.get("token")
    else:
        with silent():
            there = session.get_credentials()
            if there is None:
                raise ConfigError(
                    "no credentials were found for an S3 bucket: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a "
                    "profile; or pass key and secret, or anon=True, as storage_options"
                )
            frozen = there.get_frozen_credentials()
            key, secret, token = frozen.access_key, frozen.secret_key, frozen.token
    found = {"aws_access_key_id": str(key), "aws_secret_access_key": str(secret)}
    return found | ({} if token is None else {"aws_session_token": str(token)})
