"""Which options of an S3 store may be given, under which names?

A user has ``storage_options`` for some other library already. So the names of s3fs (``key``, ``client_kwargs``, …),
of boto3 (``aws_access_key_id``), of object_store as obstore and deltalake have it (``AWS_ACCESS_KEY_ID``, in either
case), of pyarrow.fs (``endpoint_override``) and of pyiceberg (``s3.endpoint``) are all taken, and mean the same. A name
that is none of these is refused, with the names that are near; so are two names of one thing that disagree. What only
tunes the other library (block sizes, caches, its own retries) is taken and has no effect.

Nothing here shows a value: credentials leave as `Secrets`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lakeckpt.errors import ConfigError
from lakeckpt.lake.credentials import Secrets
from lakeckpt.lake.deadlines import Deadlines

__all__ = ["S3Options"]

_NAMES: dict[str, tuple[str, ...]] = {
    "key": ("access_key_id", "aws_access_key_id", "access_key", "s3.access-key-id", "client.access-key-id", "username"),
    "secret": (
        "secret_access_key",
        "aws_secret_access_key",
        "secret_key",
        "s3.secret-access-key",
        "client.secret-access-key",
        "password",
    ),
    "token": ("session_token", "aws_session_token", "aws_token", "s3.session-token", "client.session-token"),
    "sse_customer_key": ("sse_customer_key_base64", "aws_sse_customer_key_base64"),
    "endpoint": (
        "endpoint_url",
        "endpoint_override",
        "aws_endpoint",
        "aws_endpoint_url",
        "aws_endpoint_url_s3",
        "s3.endpoint",
    ),
    "region": (
        "region_name",
        "aws_region",
        "default_region",
        "aws_default_region",
        "s3.region",
        "client.region",
    ),
    "profile": ("profile_name", "aws_profile", "client.profile-name"),
    "anonymous": ("anon", "skip_signature", "aws_skip_signature", "s3.anonymous"),
    "scheme": ("s3.scheme",),
    "virtual_hosts": (
        "force_virtual_addressing",
        "virtual_hosted_style_request",
        "aws_virtual_hosted_style_request",
        "s3.force-virtual-addressing",
    ),
    "use_ssl": (),
    "allow_http": ("aws_allow_http",),
    "verify": (),
    "ca_bundle": ("aws_ca_bundle", "tls_ca_file_path"),
    "proxy": ("proxy_url", "proxy_options", "s3.proxy-uri"),
    "requester_pays": ("request_payer", "aws_request_payer"),
    "put_headers": (),
    **dict.fromkeys(("total_s", "attempt_s", "slowest_bytes_per_s", "max_attempts", "pause_s"), ()),
    "longest_pause_s": (),
}
_NO_EFFECT = frozenset(
    {
        "allow_unsafe_rename",
        "aws_conditional_put",
        "aws_s3_allow_unsafe_rename",
        "background_writes",
        "cache_regions",
        "conditional_put",
        "connect_timeout",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "listings_expiry_time",
        "max_concurrency",
        "max_paths",
        "max_pool_connections",
        "read_timeout",
        "request_checksum_calculation",
        "request_timeout",
        "response_checksum_validation",
        "retries",
        "retry_strategy",
        "s3.connect-timeout",
        "s3.request-timeout",
        "s3.signer",
        "signature_version",
        "skip_instance_cache",
        "tcp_keepalive",
        "use_listings_cache",
    }
)
_SECRET = ("key", "secret", "token", "sse_customer_key")
_HEADERS = {
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "BucketKeyEnabled": "x-amz-server-side-encryption-bucket-key-enabled",
    "ACL": "x-amz-acl",
    "StorageClass": "x-amz-storage-class",
    "ExpectedBucketOwner": "x-amz-expected-bucket-owner",
}
_CANONICAL = {alias: name for name, aliases in _NAMES.items() for alias in (name, *aliases)}


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """What was said of a store; None or empty: left to the environment and botocore's configuration files.

    ``secrets`` may hold ``key``, ``secret`` and ``token``. ``put_headers`` are sent with every object written.
    """

    secrets: Secrets = field(default_factory=lambda: Secrets({}))
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False
    virtual_hosts: bool | None = None
    verify: bool | str | None = None
    proxy: str | None = None
    requester_pays: bool = False
    put_headers: tuple[tuple[str, str], ...] = ()
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        given = set(self.secrets.names)
        if given & {"key", "secret", "token"} and not {"key", "secret"} <= given:
            raise ConfigError(f"an S3 key and its secret belong together; given: {', '.join(sorted(given))}")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError("an S3 endpoint is a URL that begins with https:// or http://")
        for name, url in (("endpoint", self.endpoint), ("proxy", self.proxy)):
            if url is not None and "@" in url:
                raise ConfigError(
                    f"the storage option {name!r} has a user or a password in its URL, which would be seen: give the "
                    "S3 key and secret as options of their own, and a proxy that wants a password by HTTPS_PROXY or "
                    "HTTP_PROXY in the environment"
                )

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> S3Options:
        """The options that ``storage_options`` name. `ConfigError` that names what is unknown, never a value."""
        found: dict[str, Any] = {}
        for name, value in _flat(given or {}):
            if value is None or name.lower() in _NO_EFFECT:
                continue
            canonical = _CANONICAL.get(name.lower())
            if canonical is None:
                raise ConfigError(_unknown(name))
            if found.setdefault(canonical, value) != value:
                raise ConfigError(f"the storage option {name!r} says otherwise than another name of the same option")
        hidden = {name: _text(name, found.pop(name)) for name in _SECRET if name in found}
        if "sse_customer_key" in hidden:
            raise ConfigError("S3 objects encrypted with a customer's own key (SSE-C) are not supported: use SSE-KMS")
        limits = {one.name: found.pop(one.name) for one in fields(Deadlines) if one.name in found}
        options = cls(
            secrets=Secrets(hidden),
            region=_text("region", found.pop("region", None)),
            profile=_text("profile", found.pop("profile", None)),
            anonymous=_flag("anonymous", found.pop("anonymous", False)),
            requester_pays=_flag("requester_pays", found.pop("requester_pays", False), yes=("requester",)),
            put_headers=tuple(sorted(found.pop("put_headers", {}).items())),
            deadlines=Deadlines(**limits),
            proxy=_text("proxy", found.pop("proxy", None)),
        )
        if "virtual_hosts" in found:
            options = replace(options, virtual_hosts=_flag("virtual_hosts", found.pop("virtual_hosts")))
        return replace(options, endpoint=_endpoint(found), verify=_verify(found))


def _flat(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options of one level, those that s3fs nests among them."""
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"storage options are named by text, not by {type(name).__name__}")
        if name in ("client_kwargs", "config_kwargs", "client_options") and isinstance(value, Mapping):
            yield from _flat(value)
        elif name == "s3" and isinstance(value, Mapping):
            styles = {"virtual": True, "path": False}
            for inner, text in value.items():
                if inner == "addressing_style" and text in styles:
                    yield "virtual_hosts", styles[text]
                elif inner != "addressing_style":
                    raise ConfigError(f"the storage option 's3' has {inner!r}, which is not known: leave it out")
        elif name == "s3_additional_kwargs" and isinstance(value, Mapping):
            unknown = sorted(str(key) for key in value if key not in _HEADERS)
            if unknown:
                known = ", ".join(sorted(_HEADERS))
                raise ConfigError(f"s3_additional_kwargs has {', '.join(unknown)}; known are {known}")
            yield "put_headers", {_HEADERS[key]: str(item) for key, item in value.items()}
        elif name == "proxies" and isinstance(value, Mapping):
            yield from (("proxy", item) for item in list(value.values())[:1])
        else:
            yield name, value


def _unknown(name: str) -> str:
    known = [*_CANONICAL, "client_kwargs", "config_kwargs", "s3_additional_kwargs", "anon"]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"; near it are {', '.join(map(repr, near))}" if near else f"; known are {', '.join(sorted(_NAMES))}"
    return f"there is no storage option {name!r} for S3{hint}"


def _text(name: str, value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"the storage option {name!r} must be a text, not {type(value).__name__}")
    return value


def _flag(name: str, value: Any, *, yes: tuple[str, ...] = ()) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in ("true", "1", *yes):
        return True
    if text in ("false", "0"):
        return False
    raise ConfigError(f"the storage option {name!r} must be true or false, not {type(value).__name__}")


def _endpoint(found: dict[str, Any]) -> str | None:
    """The endpoint as a URL; a bare ``host:port``, as pyarrow has it, gets the scheme that was said."""
    scheme = _text("scheme", found.pop("scheme", None))
    insecure = not _flag("use_ssl", found.pop("use_ssl", True))
    found.pop("allow_http", None)
    text: str | None = _text("endpoint", found.pop("endpoint", None))
    if text is None or "://" in text:
        return None if text is None else text.rstrip("/")
    return f"{scheme or ('http' if insecure else 'https')}://{text}".rstrip("/")


def _verify(found: dict[str, Any]) -> bool | str | None:
    verify = found.pop("ca_bundle", None) or found.pop("verify", None)
    if verify is not None and not isinstance(verify, bool | str):
        raise ConfigError("the storage option 'verify' must be true, false or the path of a CA bundle")
    return verify
