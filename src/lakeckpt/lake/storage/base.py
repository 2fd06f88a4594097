"""This module defines the five methods of a place where objects lie.

The Protocol `Storage` has them: list, read, put, put only where nothing is, delete. Everything above (tables,
checkpoints, ledgers) is written against it; local folders, object stores, fsspec and the faulty stores of the tests
implement it. `lakeckpt.lake.storage.open` chooses the implementation by the URL.

Paths are POSIX keys relative to the storage's root and confined to it: `check_key` refuses whatever could leave it.
This module never does I/O of its own, and never shows credentials: `describe` gives a name that is safe to print.
"""

from __future__ import annotations

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
_UNCONFINED = frozenset({"", ".", ".."})


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a listing says of one object.

    ``path`` is relative to the root of the storage, ``size_bytes`` its length. ``etag`` is the store's own identity of
    the content, where it has one; ``mtime_ns`` (nanoseconds since 1970) is a hint, never an identity.
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

    Keys are as `check_key` says. All methods may be called from several threads and processes at once, and instances
    can be pickled. Buffers stay the caller's: none is kept or changed after a call has returned. Every failure is a
    `StorageError` (with ``errno`` where the system gave one), never a client library's own class.
    """

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """All objects in the folder ``prefix``, at any depth, or else the one object of that name; sorted by path.

        ``""`` is everything. Files only; objects that are not yet complete are hidden; never from a cache. Nothing
        there: ``[]``.
        """
        ...

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        """Bytes ``[start, stop)`` of an object, fewer where it ends before. `ObjectMissing` where there is none.

        All bytes are of one version of the object. With ``etag``, as a listing gave it, they are of that one, or
        `ObjectChanged` is raised; a store whose listings have no ETags has nothing to compare.
        """
        ...

    def put(self, path: str, chunks: Sequence[Buffer]) -> int:
        """Write a whole object and return its size in bytes; replaces what was there.

        When it returns, the object is durable; until then, it is not there at all or as it was before. Folders are
        made. The store may go through ``chunks`` several times.
        """
        ...

    def put_new(self, path: str, data: bytes) -> None:
        """Write a whole object only where there is none: exactly one of several racing callers returns.

        The others get `ObjectExists`; `ConditionalPutUnsupported` where the store cannot promise that. Durable when it
        returns. Where the answer of the store was lost, the object is read back: it was ours if its bytes are, so
        ``data`` should hold something unique to the caller.
        """
        ...

    def delete(self, path: str) -> None:
        """Remove an object; it is no error if there is none."""
        ...


def check_range(path: str, start: int, stop: int | None) -> bool:
    """Whether bytes [start, stop) of an object may hold any. `StorageError` where a bound is negative."""
    if start < 0 or (stop is not None and stop < 0):
        raise StorageError(f"cannot read bytes [{start}, {stop}) of {path!r}: bounds must not be negative")
    return stop is None or start < stop


def no_conditional_put(name: str, why: str) -> ConditionalPutUnsupported:
    """The error for a store that replaces what a conditional put must not touch, or that nobody can ask not to."""
    return ConditionalPutUnsupported(
        f"{name} cannot put an object only where there is none ({why}), so two writers could both commit: keep the "
        "run on S3 (or a store that honours If-None-Match), or on a local or shared file system"
    )


def check_key(path: str) -> tuple[str, ...]:
    """Split a key into its parts, or raise `StorageError` where it could mean something outside of the root.

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
    """A folder's key without a slash at its end; ``""`` for the root. `StorageError` as for `check_key`."""
    folder = prefix.removesuffix("/") if prefix else ""
    if folder:
        check_key(folder)
    elif prefix:
        raise StorageError(f"the storage prefix {prefix!r} is not confined to its root")
    return folder


def split_uri(uri: str) -> tuple[str, str]:
    """Tell ``(scheme, rest)`` of a place; the scheme is ``"file"`` for local paths, whose rest is the plain path.

    >>> split_uri("s3://bucket/a b"), split_uri("/data/x"), split_uri("file:///data/x%20y")
    (('s3', 'bucket/a b'), ('file', '/data/x'), ('file', '/data/x y'))

    `ConfigError` for chained URLs and for ``file://`` URLs of another host.
    """
    if _CHAIN.match(uri):
        first = redact_uri(uri.partition("::")[0])
        raise ConfigError(
            f"the URL '{first}::…' is chained: that caches or rewrites what a store says, open it directly"
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
    """The place without what may be secret in it: user and password, query and fragment."""
    match = _SCHEME.match(uri)
    if match is None or match.group(1).lower() in ("file", "local"):
        return uri
    rest = uri[match.end() :]
    authority = _AUTHORITY_END.split(rest, maxsplit=1)[0]
    port = authority.rpartition(":")[2]
    if "@" not in authority and ":" in authority and not port.isdecimal() and not port.endswith("]"):
        # Secrets have slashes in them that were not escaped: all up to the last @ is one, or all after the colon.
        rest = rest.rpartition("@")[2] if "@" in rest else authority.partition(":")[0] + ":***"
    place = re.split("[?#]", rest, maxsplit=1)[0]
    host, slash, path = place.partition("/")
    return f"{match.group(1).lower()}://{host.rpartition('@')[2]}{slash}{path}"


def describe(storage: Storage) -> str:
    """A name of the storage that holds no credentials, for messages and reports."""
    name = getattr(storage, "name", None)
    return name if isinstance(name, str) else type(storage).__name__


def clear_leftovers(storage: Storage) -> int:
    """Remove the temporary files that dead writers left in a folder; return how many were removed.

    Files of living writers stay. In an object store nothing is removed: a lifecycle rule of the bucket ends uploads.
    """
    clear = getattr(storage, "clear_leftovers", None)
    return int(clear()) if callable(clear) else 0


def delete_all(storage: Storage, paths: Sequence[str]) -> None:
    """Remove many objects: with one request for up to 1,000 where the store has such, else one by one."""
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
    """Whether the last part of a path is the name of an object that is still being written."""
    name = path.rpartition("/")[2]
    return name.startswith(_TEMPORARY_PREFIX) and name.endswith(_TEMPORARY_SUFFIX)
