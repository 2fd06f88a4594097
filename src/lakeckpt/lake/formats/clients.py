"""How are a store and its credentials told to a format's own client, which opens the table's metadata by itself?

The options that a caller gives for an fsspec filesystem go to object_store, on which deltalake stands, under its
names, with bounds on how long it may try. What object_store names itself (``aws_region``, …) goes to it as it is.
Credentials of the environment need no option: the client finds them there. Values are never shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lakeckpt.lake.storage import split_uri

__all__ = ["object_store_options"]

_NAMES = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "aws_endpoint",
    "region_name": "aws_region",
    "anon": "aws_skip_signature",
}
_BOUNDS = {"timeout": "60s", "connect_timeout": "10s", "max_retries": "4", "retry_timeout": "120s"}


def object_store_options(uri: str, storage_options: Mapping[str, Any] | None) -> dict[str, str]:
    """The options of object_store for what ``storage_options`` say of the store of ``uri``; {} for local files."""
    scheme, _ = split_uri(uri)
    if scheme == "file":
        return {}
    found = dict(_BOUNDS)
    for name, value in _flat(storage_options or {}):
        if isinstance(value, str | bool | int):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            found[_NAMES.get(name, name) if scheme in ("s3", "s3a") else name] = text
    if found.get("aws_endpoint", "").startswith("http://"):
        found["aws_allow_http"] = "true"
    return found


def _flat(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options of one level: s3fs nests those of botocore's client."""
    for name, value in options.items():
        if name == "client_kwargs" and isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, value
