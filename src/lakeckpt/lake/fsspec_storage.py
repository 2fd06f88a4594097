"""How do the five methods of `Storage` hold over any fsspec filesystem, above all over S3?

Listings never come from a cache. Small objects are put in one request, large ones as a multipart upload that becomes an
object only by its last request; filesystems that show a file while it is written get it under a temporary name first.
``put_new`` is a conditional put (If-None-Match on S3), trusted only once the store has refused a second one to the same
key: some stores ignore the condition. Where the answer to it was lost, the object is read back.

What a filesystem does asynchronously (those of object stores do) gets the time of one of our calls, whatever its client
repeats within it; others take the time that they take.

Credentials stay in the filesystem's own objects: not in ``repr``, names or messages. The filesystem is made when first
used, once in each process (its threads do not survive a fork); fsspec runs them.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import itertools
import json
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import fsspec
import fsspec.asyn

from lakeckpt.errors import (
    ConfigError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    StorageError,
    StorageTimeout,
)
from lakeckpt.lake.chunks import CallersError, guarded, take_up_to, unwrapping
from lakeckpt.lake.credentials import Secrets
from lakeckpt.lake.deadlines import Deadlines
from lakeckpt.lake.folders import TEMPORARY_PREFIX, TEMPORARY_SUFFIX
from lakeckpt.lake.fsspec_listing import entries_below, etag_of, info_of
from lakeckpt.lake.storage import (
    Buffer,
    ObjectInfo,
    check_key,
    check_prefix,
    check_range,
    no_conditional_put,
    redact_uri,
    split_uri,
)

__all__ = ["FsspecStorage"]

SINGLE_PUT_BYTES = 32 * 1024 * 1024
MAX_ATTEMPTS = 3
_UPLOADS = frozenset({"s3", "s3a", "gs", "gcs"})
_CONDITIONAL = frozenset({*_UPLOADS, "az", "abfs", "abfss"})
_MEMORY_LOCK = threading.Lock()


class FsspecStorage:
    """A `Storage` under a URL that fsspec knows; ``storage_options`` go to its filesystem as they are.

    A call ends by ``deadlines.bound_s(bytes that it moves)``, or in `StorageTimeout`.
    """

    __slots__ = (
        "_conditional",
        "_deadlines",
        "_filesystem",
        "_hidden",
        "_options",
        "_others",
        "_scheme",
        "_uri",
        "name",
    )

    def __init__(
        self, uri: str, *, storage_options: Mapping[str, Any] | None = None, deadlines: Deadlines | None = None
    ) -> None:
        self._deadlines = Deadlines() if deadlines is None else deadlines
        self._uri = uri.rstrip("/")
        self._scheme = split_uri(uri)[0]
        self._options = dict(storage_options or {})
        # Any of them could be a secret: what is text goes to other processes as credentials do, objects as they are.
        told = {name: value for name, value in self._options.items() if _is_plain(value)}
        self._others = {name: value for name, value in self._options.items() if name not in told}
        hidden = {"options": json.dumps(told)} if told else {}
        if redact_uri(self._uri) != self._uri:
            hidden["uri"] = self._uri
        self._hidden = Secrets(hidden)
        self._filesystem: tuple[int, Any, str] | None = None
        self._conditional = False
        self.name = redact_uri(self._uri)

    def __repr__(self) -> str:
        return f"FsspecStorage({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.name, self._others, self._hidden, self._deadlines))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        folder = check_prefix(prefix)
        with self._explaining("list", folder):
            filesystem, root = self._open()
            place = f"{root}/{folder}" if folder else root
            try:
                filesystem.invalidate_cache()
                entries = entries_below(filesystem, place or "/", call=self._call, scheme=self._scheme)
            except FileNotFoundError:
                return []
            below = f"{root}/"
            entries = {name: self._sized(name, one) for name, one in entries.items() if name.startswith(below)}
            found = [info_of(one, name[len(below) :]) for name, one in entries.items()]
        return sorted((info for info in found if info is not None), key=lambda info: info.path)

    def _sized(self, name: str, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """An entry of a listing with its size, which some stores (web servers) only tell of each file."""
        if entry.get("type", "file") != "file" or entry.get("size") is not None:
            return entry
        told: Mapping[str, Any] = {**entry, **self._call("info", name)}
        if told.get("size") is None:
            raise StorageError(f"{self.name} does not say how large {name!r} is: copy the table to another store")
        return told

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        check_key(path)
        if not check_range(path, start, stop):
            return b""
        with self._explaining("read", path):
            data = self._read(path, start, stop)
            # Looked at afterwards: what has the ETag now had it then, unless it was put back in between.
            if etag is not None and (now := etag_of(self._told(path))) not in (None, etag):
                raise ObjectChanged(f"{path!r} in {self.name} has the ETag {now}, not {etag}: it was written again")
            return data

    def _read(self, path: str, start: int, stop: int | None) -> bytes:
        name = f"{self._open()[1]}/{path}"
        if start == 0 and stop is None:
            return bytes(self._call("cat_file", name))
        try:
            moved = 0 if stop is None else stop - start
            return bytes(self._call("cat_file", name, start=start, end=stop, size_bytes=moved))
        except TimeoutError:
            raise
        except Exception:
            if start >= int(self._told(path)["size"]):  # stores refuse a range that begins at the end
                return b""
            raise

    def put(self, path: str, chunks: Iterable[Buffer]) -> int:
        check_key(path)
        with unwrapping(), self._explaining("write", path):
            head, rest, size = take_up_to(guarded(chunks), SINGLE_PUT_BYTES)
            if rest is not None:
                return self._upload(path, itertools.chain(head, rest))
            self._pipe(path, b"".join(head))
            return size

    def put_new(self, path: str, data: bytes) -> None:
        check_key(path)
        self._require_conditional_put()
        failure: Exception | None = None
        for _ in range(MAX_ATTEMPTS):
            try:
                self._create(path, data)
                return
            except Exception as error:
                failure = error
            with contextlib.suppress(ObjectMissing):
                if self.read(path, 0, len(data) + 1) == data:
                    return  # the answer was lost, or the client repeated what had succeeded
                raise ObjectExists(f"there is an object at {path!r} in {self.name} already")
            if isinstance(failure, PermissionError | TypeError | ValueError):
                break
        with self._explaining("write", path):
            assert failure is not None
            raise failure

    def delete(self, path: str) -> None:
        check_key(path)
        with self._explaining("delete", path), contextlib.suppress(FileNotFoundError):
            self._call("rm_file", f"{self._open()[1]}/{path}")

    # -- puts ------------------------------------------------------------------------------------------------------

    def _pipe(self, path: str, data: bytes) -> None:
        target = f"{self._open()[1]}/{path}"
        if self._scheme in _UPLOADS or self._scheme in _CONDITIONAL or self._scheme == "memory":
            self._call("pipe_file", target, data, size_bytes=len(data))
            return
        with self._moved_into_place(path) as temporary:
            self._call("pipe_file", temporary, data, size_bytes=len(data))

    def _upload(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Write an object larger than one request, visible only once it is whole."""
        filesystem, root = self._open()
        if self._scheme in _UPLOADS:
            return self._stream(filesystem.open(f"{root}/{path}", "wb", autocommit=False), chunks)
        if self._scheme == "memory" or self._scheme in _CONDITIONAL:
            data = b"".join(chunks)
            self._call("pipe_file", f"{root}/{path}", data, size_bytes=len(data))
            return len(data)
        size = 0
        with self._moved_into_place(path) as temporary, filesystem.open(temporary, "wb") as file:
            for chunk in chunks:
                size += file.write(chunk)
        return size

    def _stream(self, file: Any, chunks: Iterable[Buffer]) -> int:
        """Write the chunks and commit; on any failure the upload is discarded and never becomes an object."""
        size = 0
        try:
            for chunk in chunks:
                size += file.write(chunk)
            file.close()
            file.commit()
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise
        return size

    @contextlib.contextmanager
    def _moved_into_place(self, path: str) -> Iterator[str]:
        filesystem, root = self._open()
        folder, _, _ = f"{root}/{path}".rpartition("/")
        temporary = f"{folder}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        filesystem.makedirs(folder, exist_ok=True)
        try:
            yield temporary
            filesystem.mv(temporary, f"{root}/{path}")
        except BaseException:
            with contextlib.suppress(Exception):
                filesystem.rm_file(temporary)
            raise

    def _create(self, path: str, data: bytes) -> None:
        filesystem, root = self._open()
        if self._scheme == "memory":
            with _MEMORY_LOCK:
                filesystem.pipe_file(f"{root}/{path}", data, mode="create")
        else:
            self._call("pipe_file", f"{root}/{path}", data, mode="create", size_bytes=len(data))

    @property
    def is_of_this_process(self) -> bool:
        """Whether what lies here is seen by this process alone."""
        return self._scheme == "memory"

    def _require_conditional_put(self) -> None:
        """Make sure, once, that the store refuses to put where an object is."""
        if self._conditional:
            return
        with self._explaining("open", ""):
            filesystem, _ = self._open()
            pipe = getattr(filesystem, "_pipe_file", filesystem.pipe_file)
            known = self._scheme == "memory" or self._scheme in _CONDITIONAL
            if not known or "mode" not in inspect.signature(pipe).parameters:
                raise no_conditional_put(self.name, "fsspec has no conditional put for it")
        if self._scheme != "memory":
            self._prove_conditional_put()
        self._conditional = True

    def _prove_conditional_put(self) -> None:
        probe = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        try:
            with self._explaining("write", probe):
                self._create(probe, b"1")
            try:
                self._create(probe, b"2")
            except FileExistsError:
                return
            raise no_conditional_put(self.name, "it replaced an object that a conditional put must not touch")
        except StorageError as error:
            if "NotImplemented" in str(error):
                raise no_conditional_put(self.name, "it does not implement conditional puts") from error
            raise
        finally:
            with contextlib.suppress(StorageError):
                self.delete(probe)

    # -- the filesystem --------------------------------------------------------------------------------------------

    def _open(self) -> tuple[Any, str]:
        """The filesystem of this process, and the root's path in it, without a slash at its end."""
        opened, process = self._filesystem, os.getpid()
        if (
            opened is None or opened[0] != process
        ):  # without a lock, which a fork could leave locked; twice does no harm
            options = {**self._options, "use_listings_cache": False}
            try:
                filesystem, root = fsspec.core.url_to_fs(self._uri, **options)
            except (ImportError, ValueError, TypeError) as error:
                raise ConfigError(f"cannot open {self.name}: {self._redacted(error)}") from None
            self._filesystem = opened = (process, filesystem, root.rstrip("/"))
        return opened[1:]

    def _call(self, method: str, *arguments: Any, size_bytes: int = 0, **named: Any) -> Any:
        """A method of the filesystem, ended by the deadline where fsspec runs it beside this thread."""
        filesystem, _ = self._open()
        work, mirror = getattr(filesystem, f"_{method}", None), vars(filesystem).get(method)
        if work is None or getattr(mirror, "__wrapped__", None) != work:  # not fsspec's own way to a coroutine
            return getattr(filesystem, method)(*arguments, **named)
        bound_s = self._deadlines.bound_s(size_bytes)
        return fsspec.asyn.sync(filesystem.loop, work, *arguments, timeout=bound_s, **named)

    def _told(self, path: str) -> Mapping[str, Any]:
        """What the filesystem says of an object now."""
        filesystem, root = self._open()
        filesystem.invalidate_cache()
        told: Mapping[str, Any] = self._call("info", f"{root}/{path}")
        return told

    @contextlib.contextmanager
    def _explaining(self, verb: str, path: str) -> Iterator[None]:
        """Turn whatever the filesystem's client raises into ours, without the credentials it may show."""
        where = f"{path!r} in {self.name}" if path else self.name
        try:
            yield
        except (StorageError, ConfigError, CallersError):
            raise
        except FileNotFoundError as error:
            if verb == "read":
                raise ObjectMissing(f"there is no object {where}") from None
            wrapped = StorageError(f"cannot {verb} {where}: its bucket or folder is not there")
            wrapped.errno = error.errno or errno.ENOENT
            raise wrapped from None
        except TimeoutError as error:
            told = self._redacted(error) or f"no answer in {self._deadlines.total_s:g} s"
            late = StorageTimeout(f"cannot {verb} {where}: {type(error).__name__}: {told}")
            late.errno = errno.ETIMEDOUT
            raise late from None
        except Exception as error:
            wrapped = StorageError(f"cannot {verb} {where}: {type(error).__name__}: {self._redacted(error)}")
            wrapped.errno = getattr(error, "errno", None) or errno.EREMOTEIO
            raise wrapped from None

    def _redacted(self, error: BaseException) -> str:
        text = " ".join(str(error).split())[:500]
        for secret in sorted(_secrets(self._options), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text.replace(self._uri, self.name)


def _rebuild(name: str, others: dict[str, Any], hidden: Secrets, deadlines: Deadlines) -> FsspecStorage:
    values = hidden.take() if hidden else {}
    options = {**json.loads(values.get("options", "{}")), **others}
    return FsspecStorage(values.get("uri", name), storage_options=options, deadlines=deadlines)


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _secrets(value: Any) -> set[str]:
    """All texts among the options that could be credentials: whatever is not obviously harmless."""
    if isinstance(value, Mapping):
        return set().union(
            *(_secrets(item) for key, item in value.items() if key not in ("endpoint_url", "region_name"))
        )
    if isinstance(value, list | tuple | set):
        return set().union(*(_secrets(item) for item in value))
    return {value} if isinstance(value, str) and len(value) >= 4 else set()
