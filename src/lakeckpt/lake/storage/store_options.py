"""This module translates ``storage_options`` into the configuration of obstore.

Users bring the names that they know from s3fs, boto3, deltalake or pyiceberg. `StoreOptions.of` maps the names of S3 to
those of obstore. All other names go to obstore, which knows many more and refuses the rest. Options of Google's and
Azure's stores go to obstore as they are. The module never shows a value of an option.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.retry import Deadlines

__all__ = ["Credentials", "StoreOptions"]

Credentials = Mapping[str, Any]
"""S3 keys by the names of obstore, and ``expires_at``, a datetime with a time zone or None."""

_ALIASES = {
    "access_key_id": ("key", "access_key", "username"),
    "secret_access_key": ("secret", "secret_key", "password"),
    "session_token": ("token",),
    "endpoint": ("endpoint_url", "endpoint_override", "endpoint_url_s3"),
    "region": ("region_name", "default_region"),
    "skip_signature": ("anon", "anonymous"),
    "request_payer": ("requester_pays",),
    "virtual_hosted_style_request": ("force_virtual_addressing",),
    "profile": ("profile_name",),
    "proxy_url": ("proxy", "proxy_uri"),
    "root_certificate": ("ca_bundle",),
}
_NAMES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
_PREFIXES = ("aws_", "s3.", "client.")
_NESTED = ("client_kwargs", "config_kwargs", "client_options")
_OF_THE_CLIENT = ("allow_http", "allow_invalid_certificates", "proxy_url", "user_agent")
_HIDDEN = ("key", "secret", "token", "password", "sas", "connection_string", "service_account")
_LEAST_SECRET = 4
_KEYS = ("access_key_id", "secret_access_key", "session_token")
_PROFILE_LIFETIME = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """The options of an object store.

    ``config`` and ``client`` have obstore's names. obstore calls ``provider`` before the credentials that it returned
    last expire. ``certificates`` is the path of those to trust. ``repr`` shows only this path and the deadlines.
    """

    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)
    provider: Callable[[], Credentials] | None = field(default=None, repr=False)
    certificates: str | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        if ("access_key_id" in self.config) != ("secret_access_key" in self.config):
            raise ConfigError("an S3 key and its secret belong together: give both, or neither")
        if self.provider is not None and not callable(self.provider):
            raise ConfigError("the storage option 'credential_provider' is a function without arguments")
        for name in ("endpoint", "proxy_url"):
            if "@" in str({**self.config, **self.client}.get(name, "")):
                raise ConfigError(
                    f"the storage option {name!r} has a user or a password in its URL, which would be seen: give keys "
                    "as options of their own, and a proxy that wants a password by HTTPS_PROXY in the environment"
                )

    @classmethod
    def of(cls, given: Mapping[str, Any] | None, *, scheme: str = "s3") -> StoreOptions:
        """Return the options that ``storage_options`` name. `ConfigError` if two of them contradict each other."""
        found: dict[str, Any] = {}
        for name, value in _flat(given or {}, is_s3=scheme == "s3"):
            if value is not None and found.setdefault(name, value) != value:
                raise ConfigError(f"the storage option {name!r} is given twice, by two names, with two values")
        limits = {one.name: found.pop(one.name) for one in fields(Deadlines) if one.name in found}
        provider, profile = found.pop("credential_provider", None), found.pop("profile", None)
        if scheme == "s3":
            profile = profile or _profile_of_environment(found, provider)
            if profile is not None and provider is None and "access_key_id" not in found:
                provider, region = _of_profile(str(profile))
                if region is not None:
                    found.setdefault("region", region)
            _add_endpoint(found)
        certificates = found.pop("root_certificate", None) or os.environ.get("AWS_CA_BUNDLE")
        client = {name: found.pop(name) for name in _OF_THE_CLIENT if name in found}
        if certificates is not None:
            client["root_certificate"] = _content_of(certificates)
        return cls(
            config=found, client=client, provider=provider, certificates=certificates, deadlines=Deadlines(**limits)
        )

    def scrub(self, text: str) -> str:
        """Return ``text`` with ``***`` in place of every secret among the options."""
        secrets = [str(v) for k, v in self.config.items() if any(part in k for part in _HIDDEN)]
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) >= _LEAST_SECRET:
                text = text.replace(secret, "***")
        return text

    def keys(self) -> Credentials:
        """Return the S3 keys that hold now; {} if the environment has them."""
        if self.provider is None:
            return {name: value for name, value in self.config.items() if name in _KEYS}
        found = dict(self.provider())
        return {**found, "session_token": found.pop("token", None)}

    def for_s3fs(self, keys: Credentials) -> dict[str, Any]:
        """Return the arguments of ``s3fs.S3FileSystem`` that asks with ``keys``."""
        config = self.config
        verify = False if self.client.get("allow_invalid_certificates") else self.certificates
        client = {"region_name": config.get("region"), "verify": verify}
        style = {"addressing_style": "virtual"} if config.get("virtual_hosted_style_request") else {}
        return {
            "key": keys.get("access_key_id"),
            "secret": keys.get("secret_access_key"),
            "token": keys.get("session_token"),
            "anon": bool(config.get("skip_signature", False)),
            "endpoint_url": config.get("endpoint"),
            "requester_pays": bool(config.get("request_payer", False)),
            "client_kwargs": {name: value for name, value in client.items() if value is not None},
            "config_kwargs": {"s3": style},
        }


def _of_profile(profile: str) -> tuple[Callable[[], Credentials], str | None]:
    """Return a provider of the credentials of a profile in AWS's configuration files, and the profile's region.

    botocore renews them (SSO, assumed roles).
    """
    try:
        import botocore.exceptions
        import botocore.session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise ConfigError(
            "AWS profiles are read by boto3, which is not installed: pip install 'lakeckpt[aws]', or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    try:
        session = botocore.session.Session(profile=profile)
        session.get_scoped_config()  # obstore's provider does not notice that there is no such profile
        return Boto3CredentialProvider(session, ttl=_PROFILE_LIFETIME), session.get_config_variable("region")
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"cannot use the AWS profile {profile!r}: {error}") from None
    except ValueError:
        raise ConfigError(f"the AWS profile {profile!r} has no credentials") from None


def _profile_of_environment(found: Mapping[str, Any], provider: object) -> str | None:
    """Return the profile to use if a user named none: obstore reads no configuration files by itself."""
    if provider is not None or "access_key_id" in found or found.get("skip_signature"):
        return None
    if named := os.environ.get("AWS_PROFILE"):
        return named
    if any(os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")):
        return None
    shared = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    try:
        with open(shared, encoding="utf-8") as file:
            return "default" if "[default]" in file.read() else None
    except OSError:
        return None


def _flat(given: Mapping[str, Any], *, is_s3: bool) -> Iterator[tuple[str, Any]]:
    """Yield options of one level with obstore's names."""
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"storage options are named by text, not by {type(name).__name__}")
        if name in _NESTED and isinstance(value, Mapping):
            yield from _flat(value, is_s3=is_s3)
        elif name == "s3" and isinstance(value, Mapping):
            yield "virtual_hosted_style_request", value.get("addressing_style") == "virtual"
        elif name == "verify":
            yield ("allow_invalid_certificates", not value) if isinstance(value, bool) else ("root_certificate", value)
        elif is_s3:
            plain = name.lower()
            for prefix in _PREFIXES:
                plain = plain.removeprefix(prefix)
            plain = plain.replace("-", "_")
            yield _NAMES.get(plain, plain), value
        else:
            yield name, value


def _add_endpoint(found: dict[str, Any]) -> None:
    """Complete a bare ``host:port``, and allow plain HTTP if the endpoint begins with http://."""
    environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = found.get("endpoint") or environment
    if endpoint is None:
        return
    if not isinstance(endpoint, str):
        raise ConfigError(f"the storage option 'endpoint' must be a text, not {type(endpoint).__name__}")
    if "://" not in endpoint:
        endpoint = f"{'http' if found.get('scheme') == 'http' else 'https'}://{endpoint}"
    found.pop("scheme", None)
    found["endpoint"] = endpoint.rstrip("/")
    found.setdefault("region", os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1")
    if endpoint.startswith("http://"):
        found["allow_http"] = True


def _content_of(certificates: Any) -> str:
    try:
        with open(certificates, encoding="utf-8") as file:
            return file.read()
    except (OSError, TypeError) as error:
        raise ConfigError(f"cannot read the certificates in the file {certificates!r}: {error}") from None
