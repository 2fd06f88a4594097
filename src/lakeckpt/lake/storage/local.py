"""How does an object become durable, and visible whole or not at all, in a local folder?

Write a temporary file beside the target, ``fsync`` it, ``rename`` it into place (`LocalStorage.put`) or ``link`` it
there (`LocalStorage.put_new`: ``link`` fails where a file is), ``fsync`` the folder; and ``fsync`` the parent of every
folder that is new. A failed ``fsync`` may have thrown the dirty pages away and will report success when repeated: the
data are written anew, to another file, never synced again.

Folders are reached by `Folders`, which never follows a link. Files are 0600. A temporary file is locked by its writer
while that lives, so that `LocalStorage.clear_leftovers` can tell what a dead one left. Starts no threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from lakeckpt.errors import ConditionalPutUnsupported, ObjectExists, ObjectMissing, StorageError
from lakeckpt.lake.storage.base import (
    Buffer,
    ObjectInfo,
    check_key,
    check_prefix,
    check_range,
    guarded,
    temporary_name,
    unwrapping,
)
from lakeckpt.lake.storage.direct import Blocks
from lakeckpt.lake.storage.folders import Folders, TryAnew
from lakeckpt.lake.storage.oscalls import OsCalls

__all__ = ["LocalStorage"]

MAX_ATTEMPTS = 4
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK})


class _Temporary:
    """A temporary file with a whole object, synced; ``name`` is None once it has been renamed away."""

    __slots__ = ("descriptor", "name", "size_bytes")

    def __init__(self, name: str, descriptor: int) -> None:
        self.name: str | None = name
        self.descriptor = descriptor
        self.size_bytes = 0


class LocalStorage:
    """A `Storage` in a folder of a local (or mounted) file system.

    The folder need not exist: it is made by the first put. ``follow_file_links`` lets reads and listings follow a
    symbolic link that is itself the object (never a linked folder): meant for tables, which people assemble from links.
    """

    __slots__ = ("_calls", "_folders", "_follow")

    def __init__(
        self, root: str | os.PathLike[str], *, follow_file_links: bool = False, calls: OsCalls | None = None
    ) -> None:
        self._follow = follow_file_links
        self._calls = OsCalls() if calls is None else calls
        root = os.path.abspath(os.fspath(root))
        self._folders = Folders(root, follow_file_links=follow_file_links, calls=self._calls)

    def __repr__(self) -> str:
        return f"LocalStorage({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.name, self._follow))

    @property
    def name(self) -> str:
        """The absolute path of the root."""
        return self._folders.root

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        path = check_prefix(prefix)
        parts = check_key(path) if path else ()
        found: list[ObjectInfo] = []
        with contextlib.suppress(ObjectMissing), self._explaining("list", path):
            with self._folders.inside(parts[:-1]) as folder:
                if parts:
                    self._folders.visit(folder, parts[-1], path, found)
                else:
                    self._folders.walk(folder, "", found)
        found.sort(key=lambda info: info.path)
        return found

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        parts = check_key(path)
        check_range(path, start, stop)
        with self._explaining("read", path), self._folders.inside(parts[:-1]) as folder:
            descriptor = self._folders.open_object(parts[-1], folder, path)
            try:
                size = self._calls.fstat(descriptor).st_size
                return self._read_range(descriptor, start, size if stop is None else min(stop, size))
            finally:
                self._calls.close(descriptor)

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Read the bytes of an object from ``start`` on into ``buffer``, and return how many there were: fewer than it
        has room for where the object ends before. Beyond what a `Storage` must have; errors as for `read`."""
        parts = check_key(path)
        with self._explaining("read", path), self._folders.inside(parts[:-1]) as folder:
            descriptor = self._folders.open_object(parts[-1], folder, path)
            try:
                at = 0
                while at < len(buffer):
                    count = self._calls.preadv(descriptor, buffer[at:], start + at)
                    if not count:
                        break
                    at += count
                return at
            finally:
                self._calls.close(descriptor)

    def put(self, path: str, chunks: Iterable[Buffer]) -> int:
        parts = check_key(path)
        repeatable = not isinstance(chunks, Iterator)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                with unwrapping(), self._explaining("write", path):
                    return self._put_once(parts, chunks)
            except TryAnew as failure:
                if attempt == MAX_ATTEMPTS or (failure.chunks_used and not repeatable):
                    self._give_up(path, attempt, failure)
        raise AssertionError("the loop returns or raises")

    def put_new(self, path: str, data: bytes) -> None:
        parts = check_key(path)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                with self._explaining("write", path):
                    if self._link_once(parts, data):
                        return
                    if self.read(path, 0, len(data) + 1) != data:
                        raise ObjectExists(f"there is an object at {path!r} in {self.name} already")
                    self._put_once(parts, [data])  # ours, but perhaps not durable: the same bytes replace it
                    return
            except TryAnew as failure:
                if attempt == MAX_ATTEMPTS:
                    self._give_up(path, attempt, failure)

    def delete(self, path: str) -> None:
        """Remove an object, and the folders (below the root) that are empty then."""
        parts = check_key(path)
        with contextlib.suppress(ObjectMissing, IsADirectoryError), self._explaining("delete", path):
            with self._folders.inside(parts[:-1]) as folder:
                try:
                    self._calls.unlink(parts[-1], folder)
                except IsADirectoryError:
                    return  # a folder is no object
            self._folders.remove_empty(parts[:-1])

    # -- beside the Protocol ---------------------------------------------------------------------------------------

    def local_path(self, path: str) -> str:
        """The absolute path of an object, once checked to lie inside of the root. `ObjectMissing` if there is none."""
        parts = check_key(path)
        with self._explaining("read", path), self._folders.inside(parts[:-1]) as folder:
            self._calls.close(self._folders.open_object(parts[-1], folder, path))
        return os.path.join(self.name, *parts)

    def clear_leftovers(self) -> int:
        """Remove the temporary files of writers that died; return how many."""
        with contextlib.suppress(ObjectMissing), self._explaining("clear", ""), self._folders.inside(()) as root:
            return self._folders.clear_temporaries(root)
        return 0

    # -- one attempt -----------------------------------------------------------------------------------------------

    def _put_once(self, parts: tuple[str, ...], chunks: Iterable[Buffer]) -> int:
        with self._folders.inside(parts[:-1], make=True) as folder, self._written(folder, chunks) as temporary:
            assert temporary.name is not None
            self._calls.rename(temporary.name, parts[-1], folder)
            temporary.name = None
            self._sync(folder)
            return temporary.size_bytes

    def _link_once(self, parts: tuple[str, ...], data: bytes) -> bool:
        """Link the data into place, durably; False where an object is already."""
        with self._folders.inside(parts[:-1], make=True) as folder:
            with contextlib.suppress(FileNotFoundError):
                self._calls.lstat(parts[-1], folder)
                return False
            with self._written(folder, [data]) as temporary:
                assert temporary.name is not None
                try:
                    self._calls.link(temporary.name, parts[-1], folder)
                except FileExistsError:
                    return False
                except OSError as error:
                    if error.errno in _NO_LINKS:
                        raise ConditionalPutUnsupported(
                            f"{self.name} lies on a file system without hard links ({error.strerror}), where two "
                            "writers could both commit: keep the run on another file system or on an object store"
                        ) from error
                    raise
            self._sync(folder)
            return True

    @contextlib.contextmanager
    def _written(self, folder: int, chunks: Iterable[Buffer]) -> Iterator[_Temporary]:
        """A synced temporary file with the chunks; removed at the end unless it was renamed."""
        name = temporary_name(self._calls.token())
        try:
            temporary = _Temporary(name, self._calls.create(name, folder))
        except FileNotFoundError as error:  # someone has just removed the empty folder
            raise TryAnew(error, chunks_used=False) from error
        try:
            with contextlib.suppress(OSError):  # without locks, leftovers are just never cleared
                self._calls.lock(temporary.descriptor)
            blocks = Blocks(temporary.descriptor, self._calls)
            try:
                for chunk in guarded(chunks):
                    temporary.size_bytes += blocks.write(chunk)
                blocks.finish()
            finally:
                blocks.close()
            self._sync(temporary.descriptor)
            yield temporary
        finally:
            try:
                if temporary.name is not None:
                    with contextlib.suppress(FileNotFoundError):
                        self._calls.unlink(temporary.name, folder)
            finally:
                self._calls.close(temporary.descriptor)

    def _sync(self, descriptor: int) -> None:
        try:
            self._calls.fsync(descriptor)
        except OSError as error:
            raise TryAnew(error, chunks_used=True) from error

    def _read_range(self, descriptor: int, start: int, stop: int) -> bytes:
        pieces: list[bytes] = []
        while start < stop:
            piece = self._calls.pread(descriptor, stop - start, start)
            if not piece:
                break
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # -- errors ----------------------------------------------------------------------------------------------------

    def _give_up(self, path: str, attempts: int, failure: TryAnew) -> NoReturn:
        error = StorageError(
            f"cannot write {path!r} in {self.name} durably: {failure.error.strerror or failure.error} "
            f"(attempts: {attempts}, each to a new file); check the disk"
        )
        error.errno = failure.error.errno
        raise error from failure.error

    @contextlib.contextmanager
    def _explaining(self, verb: str, path: str) -> Iterator[None]:
        """Turn the system's errors into ours."""
        where = f"{path!r} in {self.name}" if path else self.name
        try:
            yield
        except StorageError:
            raise
        except FileNotFoundError as error:
            raise ObjectMissing(f"there is no object {where}") from error
        except OSError as error:
            advice = ". Make room there; a run takes less with a smaller keep=" if error.errno in _FULL else ""
            wrapped = StorageError(f"cannot {verb} {where}: {error.strerror or error}{advice}")
            wrapped.errno = error.errno
            raise wrapped from error


def _rebuild(root: str, follow_file_links: bool) -> LocalStorage:
    return LocalStorage(root, follow_file_links=follow_file_links)
