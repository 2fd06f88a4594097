"""This module reads tables through any filesystem of fsspec.

A `FsspecStorage` lists and reads; it refuses to write, because fsspec knows neither conditional puts nor writes that
become visible whole, and a run needs both. Listings never come from a cache. fsspec's ``find`` skips folders that it
fails to list, so folders are walked here wherever a filesystem has no ``find`` of its own. The filesystem is made anew
in each process: most have threads of fsspec's, which do not survive a fork. This module starts no threads itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from lakeckpt.counters import store_counters
from lakeckpt.errors import ConfigError, ObjectChanged, ObjectMissing, StorageError
from lakeckpt.lake.storage.base import (
    Buffer,
    ObjectInfo,
    check_key,
    check_prefix,
    check_range,
    is_temporary,
    no_conditional_put,
    redact_uri,
)

__all__ = ["FsspecStorage"]

Entry = Mapping[str, Any]
"""The facts that a filesystem returns about a file or a folder."""


class FsspecStorage:
    """A `Storage` to read the folder ``place`` of ``filesystem``; ``place`` may be a URL of it."""

    __slots__ = ("_filesystem", "_process", "_root", "name")

    def __init__(self, filesystem: AbstractFileSystem, place: str, *, name: str | None = None) -> None:
        if not isinstance(filesystem, AbstractFileSystem):
            raise ConfigError(f"filesystem= is a filesystem of fsspec, not {type(filesystem).__name__}")
        self._filesystem, self._process = filesystem, os.getpid()
        self._root = str(filesystem._strip_protocol(place)).rstrip("/")
        self.name = redact_uri(place) if name is None else name

    def __repr__(self) -> str:
        return f"FsspecStorage({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._filesystem, self._root, self.name))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        folder = check_prefix(prefix)
        below = f"{self._root}/"
        with self._explaining("list", folder):
            self._open().invalidate_cache()
            try:
                entries = self._below(f"{self._root}/{folder}" if folder else self._root or "/")
            except FileNotFoundError:
                return []
            found = [self._info(one, name[len(below) :]) for name, one in entries.items() if name.startswith(below)]
        return sorted((info for info in found if info is not None), key=lambda info: info.path)

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        check_key(path)
        if not check_range(path, start, stop):
            return b""
        name = f"{self._root}/{path}"
        with self._explaining("read", path):
            filesystem = self._open()
            try:
                data = bytes(filesystem.cat_file(name, start=start, end=stop))
                store_counters("fsspec").read(len(data))
            except (FileNotFoundError, TimeoutError):
                raise
            except Exception:
                if start < int(self._now(name)["size"]):
                    raise
                return b""  # stores refuse a range that begins where an object ends
            # The ETag is compared after the read: an object that has it now had it then.
            if etag is not None and (now := _etag(self._now(name))) not in (None, etag):
                raise ObjectChanged(f"{path!r} in {self.name} has the ETag {now}, not {etag}: it was written again")
            return data

    def put(self, path: str, chunks: Sequence[Buffer]) -> int:
        raise self._read_only()

    def put_new(self, path: str, data: bytes) -> None:
        raise no_conditional_put(self.name, "fsspec cannot promise it")

    def delete(self, path: str) -> None:
        raise self._read_only()

    def _read_only(self) -> StorageError:
        return StorageError(f"{self.name} is a filesystem of fsspec, through which tables are only read")

    def _open(self) -> Any:
        if self._process != os.getpid():
            kind, old = type(self._filesystem), self._filesystem
            self._filesystem = kind(*old.storage_args, **old.storage_options)
            self._process = os.getpid()
        return self._filesystem

    def _now(self, name: str) -> Entry:
        self._open().invalidate_cache()
        entry: Entry = self._open().info(name)
        return entry

    def _below(self, place: str) -> dict[str, Entry]:
        """Return the files below ``place`` by name. `FileNotFoundError` if nothing is there."""
        filesystem = self._open()
        kind = type(filesystem)
        if isinstance(filesystem, AsyncFileSystem):
            has_find = kind._find is not AsyncFileSystem._find
        else:
            has_find = kind.find is not AbstractFileSystem.find
        if has_find:
            return dict(filesystem.find(place, detail=True))
        found: dict[str, Entry] = {}
        folders, seen = [place.rstrip("/")], set[str]()
        while folders:
            folder = folders.pop()
            seen.add(folder)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted since its parent was listed
                for entry in filesystem.ls(folder or "/", detail=True):
                    name = entry["name"].rstrip("/")
                    if entry.get("type") != "directory":
                        found[name] = entry
                    elif name not in seen and name.startswith(f"{folder}/"):
                        folders.append(name)
        if not found and (entry := filesystem.info(place)).get("type") == "file":
            found[entry["name"]] = entry
        return found

    def _info(self, entry: Entry, path: str) -> ObjectInfo | None:
        """Return the object of an entry; None for folders, their placeholders and unfinished objects."""
        if entry.get("type", "file") != "file" or not path or path.endswith("/") or is_temporary(path):
            return None
        if entry.get("size") is None:  # web servers know the sizes of single files only
            entry = {**entry, **self._now(f"{self._root}/{path}")}
        if entry.get("size") is None:
            raise StorageError(f"{self.name} does not know how large {path!r} is: copy the table to another store")
        return ObjectInfo(path=path, size_bytes=int(entry["size"]), etag=_etag(entry))

    @contextlib.contextmanager
    def _explaining(self, verb: str, path: str) -> Iterator[None]:
        """Turn what a filesystem raises into ours. Its text may hold secrets of any kind, so only its class is kept."""
        where = f"{path!r} in {self.name}" if path else self.name
        try:
            yield
        except (StorageError, ConfigError):
            raise
        except FileNotFoundError:
            failure: StorageError = ObjectMissing(f"there is no object {where}")
        except TimeoutError:
            failure = StorageError(f"cannot {verb} {where}: no answer in time")
            failure.errno = errno.ETIMEDOUT
        except Exception as error:
            reason = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
            failure = StorageError(f"cannot {verb} {where}: {type(error).__name__}{reason}")
            failure.errno = getattr(error, "errno", None) or errno.EREMOTEIO
        else:
            return
        raise failure from None


def _rebuild(filesystem: AbstractFileSystem, root: str, name: str) -> FsspecStorage:
    return FsspecStorage(filesystem, root, name=name)


def _etag(entry: Entry) -> str | None:
    return next((str(entry[key]).strip('"') for key in ("ETag", "etag") if entry.get(key)), None)
