"""This module opens the storage that a path or a URL names.

`open_storage` opens the place of a run, which lies on a local or shared disk or in an object store. `open_for_table`
opens the place of a table, which may also lie in any filesystem of fsspec. The module writes nothing to the place, and
starts no threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lakeckpt.errors import ConfigError
from lakeckpt.lake.storage.base import Storage, redact_uri, split_uri
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.lake.storage.object_store import SCHEMES, ObjectStorage

__all__ = ["FILESYSTEM", "open_for_table", "open_storage", "with_filesystem"]

FILESYSTEM = "filesystem"
"""The name under which storage options carry the filesystem that a user gave."""


def open_storage(uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Open the storage at a local path, a ``file://`` URL or a URL of S3, Google's or Azure's store.

    ``storage_options`` for S3 may have the names of s3fs, boto3, object_store or pyiceberg (`docs/how-to/s3.md`); local
    folders take none. Raises `ConfigError` if the URL or an option cannot be used.
    """
    text = os.fspath(uri)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"a storage needs a path or a URL, not {uri!r}")
    scheme, rest = split_uri(text)
    if scheme == "file":
        if storage_options:
            raise ConfigError(f"storage_options were given, but {text!r} is a local folder: leave them out")
        return LocalStorage(os.path.expanduser(rest))
    if scheme in SCHEMES:
        return ObjectStorage(text, storage_options=storage_options)
    raise ConfigError(
        f"{redact_uri(text)!r}: runs lie on local or shared disks or in object stores ({', '.join(sorted(SCHEMES))}); "
        "fsspec's filesystems are for tables (open_table)"
    )


def open_for_table(uri: str, *, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Open the place of a table as `open_storage` does, or through fsspec.

    A filesystem that ``storage_options`` carry (`with_filesystem`) is used. For a URL that only fsspec knows, fsspec
    makes the filesystem with ``storage_options``.
    """
    options = dict(storage_options or {})
    filesystem = options.pop(FILESYSTEM, None)
    scheme = split_uri(uri)[0]
    if filesystem is None and (scheme == "file" or scheme in SCHEMES):
        return open_storage(uri, storage_options=storage_options)
    from lakeckpt.lake.storage.fsspec import FsspecStorage

    return FsspecStorage(_filesystem_of(uri, options) if filesystem is None else filesystem, uri)


def with_filesystem(storage_options: Mapping[str, Any] | None, filesystem: Any) -> Mapping[str, Any] | None:
    """Return options that carry ``filesystem``, unless it is None. Raises `ConfigError` if other options are given."""
    if filesystem is None:
        return storage_options
    if storage_options:
        raise ConfigError("filesystem= and storage_options= exclude each other: give the options to the filesystem")
    return {FILESYSTEM: filesystem}


def _filesystem_of(uri: str, options: Mapping[str, Any]) -> Any:
    import fsspec

    try:
        return fsspec.core.url_to_fs(uri, **{"use_listings_cache": False, **options})[0]
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot open {redact_uri(uri)!r} through fsspec: {type(error).__name__}") from None
