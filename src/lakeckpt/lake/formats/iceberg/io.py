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
_BOOLEANS = {"true": True, "false": False}
_PREFIXES = {"s3": ("client.", "s3."), "abfs": ("adls.",), "gs": ("gcs.",)}
"""How the properties of a store begin. If a name has several prefixes, the last one counts."""
_S3 = "access-key-id secret-access-key session-token profile-name endpoint region anonymous force-virtual-addressing"
_AZURE = "account-name account-key sas-token tenant-id client-id client-secret"
_PASSED_ON = frozenset(f"{_S3} {_AZURE}".split())
_REFUSED = frozenset({"signer", "role-arn", "proxy-uri", "connection-string", "oauth2.token"})


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

    `ConfigError` if the properties ask for what only pyiceberg's own clients do: then pass ``storage_options``.
    """
    found: dict[str, Any] = {}
    for prefix in _PREFIXES.get(split_uri(plain_location(location))[0], ()):
        given = {name.removeprefix(prefix): value for name, value in properties.items() if name.startswith(prefix)}
        for name, value in given.items():
            if value and name in _REFUSED:
                raise ConfigError(
                    f"the catalog sets {prefix + name!r}, which cannot be passed on: give open_table storage_options= "
                    "for the store that the data files lie in"
                )
            if value and name in _PASSED_ON:
                found[name.replace("-", "_")] = _BOOLEANS.get(str(value).lower(), value)
    return found or None


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
