"""This module lets pyiceberg read metadata through our storages, and our storages use the credentials of a catalog.

`StorageIO` is pyiceberg's ``FileIO`` over `lakeckpt.lake.storage.base`; it opens tables without a catalog, and only
reads. `storage_options_of` returns the options of a storage for the FileIO properties of a catalog. `plain_location`
returns a location as `open_storage` takes it. Properties hold secrets: the module shows none of them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from pyiceberg.io import FileIO, InputFile, OutputFile

from lakeckpt.errors import ConfigError, ObjectMissing, TableError
from lakeckpt.lake.storage.base import Storage, split_uri
from lakeckpt.lake.table.listing import open_root

__all__ = ["StorageIO", "plain_location", "storage_options_of"]

_SLASHES = re.compile("/{2,}")
"""One slash, in a local path alone."""
_SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfss": "abfs", "wasb": "abfs", "wasbs": "abfs", "local": "file"}
_S3 = {
    "key": ("s3.access-key-id", "client.access-key-id"),
    "secret": ("s3.secret-access-key", "client.secret-access-key"),
    "token": ("s3.session-token", "client.session-token"),
    "profile": ("s3.profile-name", "client.profile-name"),
}
_S3_CLIENT = {"endpoint_url": ("s3.endpoint",), "region_name": ("s3.region", "client.region")}
_OTHERS = {
    "gs": {"token": ("gcs.oauth2.token",), "project": ("gcs.project-id",), "endpoint_url": ("gcs.service.host",)},
    "abfs": {
        "connection_string": ("adls.connection-string",),
        "account_name": ("adls.account-name",),
        "account_key": ("adls.account-key",),
        "sas_token": ("adls.sas-token",),
        "tenant_id": ("adls.tenant-id",),
        "client_id": ("adls.client-id",),
        "client_secret": ("adls.client-secret",),
    },
}
_UNKNOWN_TO_STORAGES = ("s3.signer", "s3.role-arn", "client.role-arn", "s3.proxy-uri")


def plain_location(location: str) -> str:
    """Return a location as Iceberg writes it (``s3a://…``, ``file:/…``, ``file:///…``) as our storages name it.

    Never unquoted: ``%2F`` in a location is part of the file's name.

    >>> plain_location("s3a://lake/t/a%2Fb"), plain_location("file:/lake/t"), plain_location("file:///lake/x%20y")
    ('s3://lake/t/a%2Fb', '/lake/t', '/lake/x%20y')
    """
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return _SLASHES.sub("/", location)
    if scheme.lower() == "file":
        if rest.startswith("//") and not rest.startswith("///"):
            rest = rest.removeprefix("//localhost")
            if rest.startswith("//"):
                raise ConfigError(f"the location {location!r} names a host: only this machine's files can be read")
        return _SLASHES.sub("/", f"/{rest}")
    return f"{_SAME.get(scheme.lower(), scheme.lower())}:{rest}" if rest.startswith("//") else location


def storage_options_of(properties: Mapping[str, Any], location: str) -> dict[str, Any] | None:
    """The options with which our storage reads ``location``, from a catalog's FileIO properties; None: the defaults.

    `ConfigError` where the properties ask for what only pyiceberg's own clients do: then pass ``storage_options``.
    """
    scheme = split_uri(plain_location(location))[0]
    if scheme in _OTHERS:
        return _chosen(properties, _OTHERS[scheme]) or None
    if scheme != "s3":
        return None
    for name in _UNKNOWN_TO_STORAGES:
        if properties.get(name):
            raise ConfigError(
                f"the catalog sets {name!r}, which cannot be passed on: give open_table storage_options= for the "
                "store that the data files lie in"
            )
    options: dict[str, Any] = _chosen(properties, _S3)
    client = _chosen(properties, _S3_CLIENT)
    if client:
        options["client_kwargs"] = client
    if str(properties.get("s3.anonymous", "")).lower() == "true":
        options["anon"] = True
    if str(properties.get("s3.force-virtual-addressing", "")).lower() == "true":
        options["config_kwargs"] = {"s3": {"addressing_style": "virtual"}}
    return options or None


def _chosen(properties: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    found = {
        ours: next((properties[name] for name in theirs if properties.get(name)), None)
        for ours, theirs in names.items()
    }
    return {name: value for name, value in found.items() if value is not None}


class StorageIO(FileIO):
    """Reads through our storages, opened with the given options. A location of any store may be asked for."""

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._options = storage_options
        self._storages: dict[str, Storage] = {}

    def __repr__(self) -> str:
        return "StorageIO()"

    def new_input(self, location: str) -> _StoredFile:
        folder, _, name = plain_location(location).rpartition("/")
        if folder not in self._storages:
            self._storages[folder] = open_root(folder or "/", self._options)
        return _StoredFile(location, self._storages[folder], name)

    def new_output(self, location: str) -> OutputFile:
        raise TableError(f"{location!r} cannot be written: the table was opened for reading, without its catalog")

    def delete(self, location: str | InputFile | OutputFile) -> None:
        raise TableError("the table was opened for reading, without its catalog: nothing can be deleted")


class _StoredFile(InputFile):
    """One object of a storage, as pyiceberg takes it."""

    def __init__(self, location: str, storage: Storage, name: str) -> None:
        super().__init__(location)
        self._storage, self._name = storage, name

    def __len__(self) -> int:
        for info in self._storage.list(self._name):
            if info.path == self._name:
                return info.size_bytes
        raise ObjectMissing(f"there is no {self.location!r}")

    def exists(self) -> bool:
        return any(info.path == self._name for info in self._storage.list(self._name))

    def open(self, seekable: bool = True) -> _Stream:
        return _Stream(self)

    def read(self, start: int, stop: int | None) -> bytes:
        return self._storage.read(self._name, start, stop)


class _Stream(io.RawIOBase):
    """An object of a storage as a file that can be sought in; each read is one ranged read."""

    def __init__(self, file: _StoredFile) -> None:
        super().__init__()
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readall(self) -> bytes:
        data = self._file.read(self._place, None)
        self._place += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(self._place, self._place + len(buffer)) if len(buffer) else b""
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place}.get(whence)
        self._place = max(0, offset + (len(self._file) if start is None else start))
        return self._place
