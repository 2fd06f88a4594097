"""Where does an S3 request go, and who signs it?

botocore finds the credentials (options, environment, profiles, web identities, containers, instances) and renews them,
resolves the endpoint of a bucket, and signs. Its client is made once in each process, for the endpoint alone; requests
do not go through it, as that costs 2 ms each. Never shows a credential, and does not let botocore log one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import botocore.auth
import botocore.awsrequest
import botocore.config
import botocore.credentials
import botocore.exceptions
import botocore.loaders
import botocore.session
import botocore.utils

from lakeckpt.errors import ConfigError, StorageError
from lakeckpt.lake.credentials import silent
from lakeckpt.lake.s3_options import S3Options

__all__ = ["Signer"]

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@functools.lru_cache(maxsize=4)
def _loader(data_path: str | None) -> Any:
    """What botocore knows of S3 and its endpoints: read and parsed once in each process, not for each store."""
    return botocore.loaders.create_loader(data_path)


class Signer:
    """Signs requests to ``bucket``. Made in the process that uses it; threads may share it.

    ``place``: what another signer of the same bucket and options found. To find it is what takes time, and loads
    certificates, which a process that was forked while others computed digests had better not do.
    """

    __slots__ = ("_base", "_bucket", "_credentials", "_options", "_session", "region")

    def __init__(self, bucket: str, options: S3Options, place: tuple[str, str] | None = None) -> None:
        self._bucket, self._options = bucket, options
        try:
            self._session = botocore.session.Session(profile=options.profile)
            self._session.register_component("data_loader", _loader(self._session.get_config_variable("data_path")))
            self._credentials = self._found()
            self.region, self._base = self._resolved(options.region) if place is None else place
        except botocore.exceptions.BotoCoreError as error:
            raise ConfigError(f"cannot open the bucket {bucket!r}: {options.secrets.scrub(str(error))}") from None

    def move(self, region: str) -> bool:
        """Go to the region that the store says the bucket is in; False if that is where we were."""
        if region == self.region or self._options.endpoint is not None:
            return False
        self.region, self._base = self._resolved(region)
        return True

    @property
    def place(self) -> tuple[str, str]:
        """The region of the bucket, and the URL that all of its objects' URLs begin with."""
        return self.region, self._base

    @property
    def _host(self) -> str:
        """As it is signed: without the port that the scheme implies."""
        scheme, _, host = self._base.partition("://")
        return host.partition("/")[0].removesuffix(":443" if scheme == "https" else ":80")

    def url(self, key: str, query: Mapping[str, str] | None = None) -> str:
        """The URL of an object, or of the bucket itself (``key`` empty)."""
        path = quote(key, safe="/-_.~")
        text = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted((query or {}).items()))
        return f"{self._base}/{path}{'?' + text if text else ''}"

    def signed(self, method: str, url: str, headers: Mapping[str, str], sha256: str = EMPTY_SHA256) -> dict[str, str]:
        """The headers of a request with its signature among them."""
        every = dict(headers)
        if self._options.requester_pays:
            every["x-amz-request-payer"] = "requester"
        if self._credentials is None:
            return every
        every["Host"] = self._host
        request = botocore.awsrequest.AWSRequest(method=method, url=url, headers=every)
        with silent():
            try:
                frozen = self._credentials.get_frozen_credentials()
            except botocore.exceptions.BotoCoreError as error:
                raise StorageError(
                    f"the credentials for the bucket {self._bucket!r} could not be renewed ({type(error).__name__})"
                ) from None
            _Presummed(frozen, self.region, sha256).add_auth(request)
        return dict(request.headers.items())

    def proxy(self) -> str | None:
        """The HTTP proxy on the way: as said, else the environment's, where it is not to be bypassed."""
        if self._options.proxy is not None:
            return self._options.proxy
        proxies = botocore.utils.get_environ_proxies(self._base)
        found = proxies.get(self._base.partition(":")[0])
        return None if found is None else str(found)

    def verify(self) -> bool | str | None:
        """Whether certificates are verified, and by which bundle; None: by the system's."""
        if self._options.verify is not None:
            return self._options.verify
        bundle = self._session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
        return None if bundle is None else str(bundle)

    def _found(self) -> Any:
        options = self._options
        if options.anonymous:
            return None
        if options.secrets:
            taken = options.secrets.take()
            return botocore.credentials.Credentials(taken["key"], taken["secret"], taken.get("token"))
        with silent():
            found = self._session.get_credentials()
        if found is None:
            raise ConfigError(
                f"no credentials were found for the bucket {self._bucket!r}: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or a profile; or pass key and secret, or anon=True, as storage_options"
            )
        return found

    def _resolved(self, region: str | None) -> tuple[str, str]:
        """The region and the URL that all of the bucket's objects' URLs begin with."""
        options = self._options
        region = region or self._session.get_config_variable("region") or "us-east-1"
        style = {None: "auto", True: "virtual", False: "path"}[options.virtual_hosts]
        client = self._session.create_client(
            "s3",
            region_name=region,
            endpoint_url=options.endpoint,
            aws_access_key_id="-",
            aws_secret_access_key="-",
            config=botocore.config.Config(
                signature_version="s3v4", s3={"addressing_style": style, "us_east_1_regional_endpoint": "regional"}
            ),
        )
        try:
            url = client.generate_presigned_url("get_object", Params={"Bucket": self._bucket, "Key": "x"})
        finally:
            client.close()
        return region, url.partition("?")[0].removesuffix("/x")


class _Presummed(botocore.auth.S3SigV4Auth):  # type: ignore[misc]
    """Signs one request, with a digest of the body that is known already."""

    def __init__(self, credentials: Any, region: str, sha256: str) -> None:
        super().__init__(credentials, "s3", region)
        self._sha256 = sha256
        self._to_sign: Any = None

    def headers_to_sign(self, request: Any) -> Any:
        """botocore asks twice for a request."""
        if self._to_sign is None:
            self._to_sign = super().headers_to_sign(request)
        return self._to_sign

    def payload(self, request: Any) -> str:
        return self._sha256
