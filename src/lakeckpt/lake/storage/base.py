"""This module defines the Protocol `Storage`: the five methods of a place where objects lie.

Tables, checkpoints and ledgers are written against `Storage`. Local folders, object stores, filesystems of fsspec and
the faulty stores of the tests implement it. `lakeckpt.lake.storage.open` chooses the implementation by the URL.

Paths are POSIX keys relative to the storage's root. `check_key` refuses every key that could leave the root. The module
does no I/O, starts no threads and never shows credentials: `describe` returns a name that is safe to print.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from urllib.parse import unquote

from lakeckpt.errors import ConditionalPutUnsupported, ConfigError, StorageError

__all__ = [
    "Buffer",
    "ObjectInfo",
    "Storage",
    "check_key",
    "check_prefix",
    "check_range",
    "clear_leftovers",
    "delete_all",
    "describe",
    "expect_folder",
    "is_lasting",
    "is_temporary",
    "no_conditional_put",
    "redact_uri",
    "split_uri",
    "temporary_name",
]

Buffer = bytes | bytearray | memoryview
_TEMPORARY_PREFIX, _TEMPORARY_SUFFIX = ".lakeckpt-", ".tmp"
_AUTHORITY_END = re.compile("[/?#]")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*)://")
_CHAIN = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]*(::.*://|://.*::)")
MAX_KEY_BYTES = 4096
_LASTING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENODEV})
_UNCONFINED = frozenset({"", ".", ".."})


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object of a listing.

    ``path`` is relative to the root of the storage, and ``size_bytes`` is the object's length. ``etag`` is the store's
    own identity of the content, or None. ``mtime_ns`` (nanoseconds since 1970) is a hint, never an identity.
    """

    path: str
    size_bytes: int
    etag: str | None = None
    mtime_ns: int | None = None

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise StorageError(f"the store lists {self.path!r} with a size of {self.size_bytes} bytes")


@runtime_checkable
class Storage(Protocol):
    """A place for immutable objects, named by keys relative to one root.

    `check_key` defines the keys. Several threads and processes may call all methods at once, and instances can be
    pickled. Buffers stay the caller's: a storage keeps and changes none after a call has returned. Every failure is a
    `StorageError` (with ``errno`` if the system gave one), never a client library's own class.
    """

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return all objects in the folder ``prefix``, at any depth, or else the one object of that name.

        They are sorted by path; ``""`` lists the whole storage, and a folder that is not there is empty. Folders and
        objects that are not yet complete are not listed. The listing never comes from a cache.
        """
        ...

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        """Return bytes ``[start, stop)`` of an object, fewer if the object ends before.

        All bytes are of one version of the object: with ``etag``, which a listing gave, of this version. Raises
        `ObjectMissing` if there is no object, and `ObjectChanged` if it is of another version or was replaced
        meanwhile. A store whose listings have no ETags compares nothing.
        """
        ...

    def put(self, path: str, chunks: Sequence[Buffer]) -> int:
        """Write a whole object, or replace it, and return its size in bytes.

        When the call returns, the object is durable. Until then it is not there at all, or as it was before. Folders
        are made. The store may go through ``chunks`` several times.
        """
        ...

    def put_new(self, path: str, data: bytes) -> None:
        """Write a whole object only if there is none: exactly one of several racing callers returns.

        The others get `ObjectExists`. `ConditionalPutUnsupported` is raised if the store cannot promise this. The
        object is durable when the call returns. If the answer of the store was lost, the object is read back, and
        is ours if its bytes are. So ``data`` must hold something unique to the caller.
        """
        ...

    def delete(self, path: str) -> None:
        """Remove an object; it is no error if there is none."""
        ...


def is_lasting(error: BaseException) -> bool:
    """Return whether waiting does not mend the error of a write: the store is full or refuses this user, the bucket is
    not there, or the store can never commit."""
    if isinstance(error, ConditionalPutUnsupported):
        return True
    return isinstance(error, OSError) and error.errno in _LASTING


def check_range(path: str, start: int, stop: int | None) -> bool:
    """Return whether the range [start, stop) is not empty. Raises `StorageError` if a bound is negative."""
    if start < 0 or (stop is not None and stop < 0):
        raise StorageError(f"cannot read bytes [{start}, {stop}) of {path!r}: bounds must not be negative")
    return stop is None or start < stop


def no_conditional_put(name: str, why: str) -> ConditionalPutUnsupported:
    """Return the error for a store that has no conditional puts. ``why`` says how this was found."""
    return ConditionalPutUnsupported(
        f"{name} cannot put an object only if there is none ({why}), so two writers could both commit: keep the "
        "run on S3 (or a store that honours If-None-Match), or on a local or shared file system"
    )


def check_key(path: str) -> tuple[str, ...]:
    """Split a key into its parts, or raise `StorageError` if it could mean something outside of the root.

    Refused: absolute paths, empty parts, ``.`` and ``..``, backslashes, NUL, text that is not valid Unicode, and more
    than 4096 bytes.

    >>> check_key("log/0000000001.lkc")
    ('log', '0000000001.lkc')
    """
    if not isinstance(path, str):
        raise StorageError(f"a storage path must be a str, not {type(path).__name__}")
    try:
        size = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        raise StorageError(f"the storage path {path!a} is not valid Unicode: rename the file") from None
    if size > MAX_KEY_BYTES:
        raise StorageError(f"the storage path {path[:60]!r}… has {size} bytes; at most {MAX_KEY_BYTES} are allowed")
    if "\x00" in path or "\\" in path:
        raise StorageError(f"the storage path {path!r} holds a backslash or a NUL: rename the file")
    parts = tuple(path.split("/"))
    if not _UNCONFINED.isdisjoint(parts):
        raise StorageError(
            f"the storage path {path!r} is not confined to its root: it must be relative, "
            "without empty, '.' or '..' parts"
        )
    return parts


def check_prefix(prefix: str) -> str:
    """Return a folder's key without a slash at its end; ``""`` is the root. Raises as `check_key`."""
    folder = prefix.removesuffix("/") if prefix else ""
    if folder:
        check_key(folder)
    elif prefix:
        raise StorageError(f"the storage prefix {prefix!r} is not confined to its root")
    return folder


def split_uri(uri: str) -> tuple[str, str]:
    """Return the scheme of a place, and the rest. A local path has the scheme ``"file"``, and its rest is the path.

    >>> split_uri("s3://bucket/a b"), split_uri("/data/x"), split_uri("file:///data/x%20y")
    (('s3', 'bucket/a b'), ('file', '/data/x'), ('file', '/data/x y'))

    Raises `ConfigError` for chained URLs and for ``file://`` URLs of another host.
    """
    if _CHAIN.match(uri):
        first = redact_uri(uri.partition("::")[0])
        raise ConfigError(
            f"the URL '{first}::…' is chained, which caches or rewrites what the store returns: open it directly"
        )
    match = _SCHEME.match(uri)
    if match is None:
        return "file", uri
    scheme, rest = match.group(1).lower(), uri[match.end() :]
    if scheme not in ("file", "local"):
        return scheme, rest
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigError(f"the URL {uri!r} names a host; a local one looks like file:///folder/name")
    return "file", unquote("/" + path)


def redact_uri(uri: str) -> str:
    """Return the place without its parts that may be secret: user and password, query and fragment."""
    match = _SCHEME.match(uri)
    if match is None or match.group(1).lower() in ("file", "local"):
        return uri
    rest = uri[match.end() :]
    authority = _AUTHORITY_END.split(rest, maxsplit=1)[0]
    port = authority.rpartition(":")[2]
    if "@" not in authority and ":" in authority and not port.isdecimal() and not port.endswith("]"):
        # A secret has slashes that were not escaped: it reaches up to the last @, or from the colon to the end.
        rest = rest.rpartition("@")[2] if "@" in rest else authority.partition(":")[0] + ":***"
    place = re.split("[?#]", rest, maxsplit=1)[0]
    host, slash, path = place.partition("/")
    return f"{match.group(1).lower()}://{host.rpartition('@')[2]}{slash}{path}"


def describe(storage: Storage) -> str:
    """Return a name of the storage that holds no credentials, for messages and reports."""
    name = getattr(storage, "name", None)
    return name if isinstance(name, str) else type(storage).__name__


def clear_leftovers(storage: Storage) -> int:
    """Remove the temporary files that dead writers left in a local folder, and return how many they were.

    Files of living writers stay. In an object store, a lifecycle rule of the bucket removes unfinished uploads.
    """
    clear = getattr(storage, "clear_leftovers", None)
    return int(clear()) if callable(clear) else 0


def expect_folder(storage: Storage, folder: str, *, is_known: bool = False) -> None:
    """Let puts into a local folder fail from now on if ``folder`` in it is gone: the place was renamed or unmounted.

    A put would make the place anew, and what lies there would be hidden when the place comes back. Object stores have
    no folders: this does nothing there. ``is_known``: as in `LocalStorage.expect_folder`.
    """
    expect = getattr(storage, "expect_folder", None)
    if callable(expect):
        expect(folder, is_known=is_known)


def delete_all(storage: Storage, paths: Sequence[str]) -> None:
    """Remove many objects: up to 1,000 with one request if the storage can, else one by one."""
    together = getattr(storage, "delete_all", None)
    if callable(together):
        together(paths)
        return
    for path in paths:
        storage.delete(path)


# -- for implementations ----------------------------------------------------------------------------------------------


def temporary_name(token: str) -> str:
    """Return the name of an object that is still being written; ``token`` is chosen by no other writer."""
    return f"{_TEMPORARY_PREFIX}{token}{_TEMPORARY_SUFFIX}"


def is_temporary(path: str) -> bool:
    """Return whether the last part of a path is the name of an object that is still being written."""
    name = path.rpartition("/")[2]
    return name.startswith(_TEMPORARY_PREFIX) and name.endswith(_TEMPORARY_SUFFIX)
