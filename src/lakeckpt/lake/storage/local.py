"""This module stores objects in a folder of a local or shared disk.

An object is written to a temporary file beside its place and synced. `LocalStorage.put` renames the file into place;
`LocalStorage.put_new` links it there, which fails if a file is there. Then the folder is synced. The first time that a
process writes into a folder, it syncs the folder's entry in the parent as well, also if another process made the
folder: that process may have died before it came to that. A failed ``fsync`` is never repeated, because the kernel may
have dropped the dirty pages and would report success: the call raises, and another call writes a new file.

Every path is compared with its ``realpath``, so that no linked folder leads out of the root, and no file is opened
through a link. This notices accidents; it is no defence against a process that swaps folders meanwhile. Files are 0600.
A writer locks its temporary file while it lives, so that `LocalStorage.clear_leftovers` removes those of dead writers
only. The module starts no threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from lakeckpt.counters import store_counters
from lakeckpt.errors import ConditionalPutUnsupported, ObjectExists, ObjectMissing, StorageError
from lakeckpt.lake.storage.base import (
    Buffer,
    ObjectInfo,
    check_key,
    check_prefix,
    check_range,
    is_temporary,
    temporary_name,
)
from lakeckpt.lake.storage.direct import Blocks

__all__ = ["LocalStorage"]

_MOST_DURABLE = 4096
_FOLDER_TRIES = 4
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK})
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO does not block
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalStorage:
    """A `Storage` in a folder of a local (or mounted) file system.

    The folder need not exist: the first put makes it. ``follow_file_links`` lets reads and listings follow a symbolic
    link that is itself the object (never a linked folder). It is meant for tables, which people assemble from links.
    """

    __slots__ = ("_durable", "_expected", "_follow", "_root", "_was_there", "name")

    def __init__(self, root: str | os.PathLike[str], *, follow_file_links: bool = False) -> None:
        self.name = os.path.abspath(os.fspath(root))
        """The absolute path of the root."""
        self._root = os.path.realpath(self.name)
        self._follow = follow_file_links
        self._durable: set[str] = set()
        """Folders whose entry in their parent this process has synced."""
        self._expected: str | None = None
        self._was_there = False

    def __repr__(self) -> str:
        return f"LocalStorage({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.name, self._follow))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        path = check_prefix(prefix)
        with contextlib.suppress(ObjectMissing), self._explaining("list", path):
            found = self._visit(self._place(path), path) if path else self._walk(self._root, "")
            return sorted(found, key=lambda info: info.path)
        return []

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        check_key(path)
        check_range(path, start, stop)
        with self._explaining("read", path), self._opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            data = _read_range(descriptor, start, size if stop is None else min(stop, size))
        store_counters("local").read(len(data))
        return data

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Read the bytes of an object from ``start`` on into ``buffer``, and return how many there were.

        They are fewer than ``buffer`` holds if the object ends before. Raises as `read`. A `Storage` need not have
        this method.
        """
        check_key(path)
        with self._explaining("read", path), self._opened(path) as descriptor:
            at = 0
            while at < len(buffer) and (count := os.preadv(descriptor, [buffer[at:]], start + at)):
                at += count
        store_counters("local").read(at)
        return at

    def put(self, path: str, chunks: Sequence[Buffer]) -> int:
        check_key(path)
        with self._explaining("write", path):
            place = self._place(path)
            with self._written(place, chunks) as (temporary, size):
                os.rename(temporary, place)
            _sync_folder(os.path.dirname(place))
        return size

    def put_new(self, path: str, data: bytes) -> None:
        check_key(path)
        with self._explaining("write", path):
            place = self._place(path)
            if not os.path.lexists(place) and self._linked(place, data):
                _sync_folder(os.path.dirname(place))
                return
        if self.read(path, 0, len(data) + 1) != data:
            raise ObjectExists(f"there is an object at {path!r} in {self.name} already")
        self.put(path, [data])  # it is ours, but perhaps not durable: the same bytes replace it

    def delete(self, path: str) -> None:
        """Remove an object, and the folders (below the root) that are empty then."""
        check_key(path)
        with contextlib.suppress(ObjectMissing), self._explaining("delete", path):
            place = self._place(path)
            try:
                os.unlink(place)
            except IsADirectoryError:
                return  # a folder is no object
            self._remove_empty(os.path.dirname(place))

    # -- beside the Protocol ---------------------------------------------------------------------------------------

    def local_path(self, path: str) -> str:
        """Return the absolute path of an object, which lies inside of the root. `ObjectMissing` if there is none."""
        check_key(path)
        with self._explaining("read", path), self._opened(path):
            return os.path.join(self.name, path)

    def expect_folder(self, folder: str, *, is_known: bool = False) -> None:
        """Let puts fail from now on if ``folder`` is gone that this process has seen there.

        A folder that another machine has just made may be invisible here for some seconds, so it must be seen first.
        ``is_known``: another process has seen it, and whoever puts tries again for longer than that.
        """
        self._expected = os.path.join(self._root, folder)
        self._was_there = is_known or os.path.isdir(self._expected)

    def clear_leftovers(self) -> int:
        """Remove the temporary files of writers that died, and return how many they were."""
        removed = 0
        with self._explaining("clear", ""):
            for folder, _, names in os.walk(self._root):
                for name in filter(is_temporary, names):
                    with contextlib.suppress(FileNotFoundError):
                        removed += _remove_unlocked(os.path.join(folder, name))
        return removed

    # -- places ----------------------------------------------------------------------------------------------------

    def _place(self, path: str) -> str:
        """Return where an object lies. `StorageError` if a folder above it is a link."""
        place = os.path.join(self._root, path)
        folder = os.path.dirname(place)
        if folder != self._root and os.path.realpath(folder) != folder:
            self._refuse_link(os.path.dirname(path))
        return place

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        """Open a regular file to read."""
        place = self._place(path)
        try:
            descriptor = os.open(place, _READ if self._follow else _READ | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.ELOOP:
                self._refuse_link(path)
            raise
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file")
            yield descriptor
        finally:
            os.close(descriptor)

    def _walk(self, folder: str, path: str) -> Iterator[ObjectInfo]:
        """Yield all objects of a folder, at any depth, save those that are deleted meanwhile."""
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                yield from self._visit(os.path.join(folder, name), f"{path}/{name}" if path else name)

    def _visit(self, place: str, path: str) -> Iterator[ObjectInfo]:
        """Yield the object at ``place``, or the objects of the folder there."""
        if is_temporary(path):
            return
        status = os.lstat(place)
        if stat.S_ISLNK(status.st_mode):
            status = self._followed(place, path)
        if stat.S_ISDIR(status.st_mode):
            yield from self._walk(place, path)
        elif stat.S_ISREG(status.st_mode):
            yield ObjectInfo(path=path, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)

    def _followed(self, place: str, path: str) -> os.stat_result:
        if not self._follow:
            self._refuse_link(path)
        try:
            status = os.stat(place)
        except FileNotFoundError:
            raise StorageError(f"{path!r} in {self.name} is a symbolic link to nothing: mend or remove it") from None
        if stat.S_ISDIR(status.st_mode):
            self._refuse_link(path)
        return status

    def _refuse_link(self, path: str) -> NoReturn:
        raise StorageError(
            f"{path!r} in {self.name} is a symbolic link or lies behind one, which could lead out of it: "
            "put the file or folder itself there, or open the place that it points to"
        )

    # -- writing ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _written(self, place: str, chunks: Sequence[Buffer]) -> Iterator[tuple[str, int]]:
        """Write ``chunks`` to a synced temporary file, and yield its path and size. An exception removes the file."""
        temporary, descriptor = self._created(os.path.dirname(place))
        try:
            with contextlib.suppress(OSError):  # without locks, leftovers are just never cleared
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            blocks = Blocks(descriptor)
            size = sum(blocks.write(memoryview(chunk).cast("B")) for chunk in chunks)
            blocks.finish()
            os.fsync(descriptor)
            yield temporary, size
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(descriptor)

    def _created(self, folder: str) -> tuple[str, int]:
        """Create a temporary file in a folder, which is made. A folder that is removed meanwhile is made again."""
        temporary = os.path.join(folder, temporary_name(secrets.token_hex(8)))
        self._refuse_away()
        for _ in range(_FOLDER_TRIES - 1):
            with contextlib.suppress(FileNotFoundError):
                self._make_folder(folder)
                return temporary, os.open(temporary, _CREATE, 0o600)
            self._durable.clear()
        self._make_folder(folder)
        return temporary, os.open(temporary, _CREATE, 0o600)

    def _make_folder(self, folder: str) -> None:
        """Make a folder durably, with all folders above it up to the root, and above the root those that are missing.

        If its entry cannot be synced, a folder that was made is removed, so that the next call makes it anew.
        """
        if folder in self._durable:
            return
        if folder == self._root:
            self._refuse_away()
        parent = os.path.dirname(folder)
        if len(folder) > len(self._root) or not os.path.isdir(parent):
            self._make_folder(parent)
        made = _make_one(folder)
        try:
            _sync_folder(parent)
        except OSError as error:
            if made:
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            if made or not isinstance(error, PermissionError):  # this process makes nothing if it may not look
                raise
        if len(self._durable) >= _MOST_DURABLE:
            self._durable.clear()
        self._durable.add(folder)

    def _refuse_away(self) -> None:
        """Raise `StorageError` if the folder that is expected is gone."""
        if self._expected is None:
            return
        is_there = os.path.isdir(self._expected)
        if self._was_there and not is_there:
            error = StorageError(
                f"{self.name} is away: it was renamed, unmounted or removed, and {self._expected} is gone. Bring it "
                "back; it is not made anew"
            )
            error.errno = errno.ESTALE
            raise error
        self._was_there = is_there

    def _linked(self, place: str, data: bytes) -> bool:
        """Link a synced file with ``data`` into place; False if an object is there already."""
        with self._written(place, [data]) as (temporary, _):
            is_new = True
            try:
                os.link(temporary, place)
            except FileExistsError:
                is_new = False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise ConditionalPutUnsupported(
                    f"{self.name} lies on a file system without hard links ({error.strerror}), where two writers "
                    "could both commit: keep the run on another file system or on an object store"
                ) from error
            os.unlink(temporary)
        return is_new

    def _remove_empty(self, folder: str) -> None:
        """Remove a folder, and the folders above it below the root, while they are empty."""
        while folder != self._root:
            self._durable.discard(folder)
            try:
                os.rmdir(folder)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return
                raise
            folder = os.path.dirname(folder)

    # -- errors ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _explaining(self, verb: str, path: str) -> Iterator[None]:
        """Turn the system's errors into ours."""
        where = f"{path!r} in {self.name}" if path else self.name
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError) or (path and isinstance(error, NotADirectoryError))
            if is_missing and verb != "write":
                raise ObjectMissing(f"there is no object {where}") from error
            advice = ". Make room there; a run takes less with a smaller keep=" if error.errno in _FULL else ""
            failure = StorageError(f"cannot {verb} {where}: {error.strerror or error}{advice}")
            failure.errno = error.errno
            raise failure from error


def _make_one(folder: str) -> bool:
    """Make a folder, and return whether it was not there."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        return False
    return True


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_range(descriptor: int, start: int, stop: int) -> bytes:
    pieces: list[bytes] = []
    while start < stop and (piece := os.pread(descriptor, stop - start, start)):
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _remove_unlocked(place: str) -> int:
    """Remove a temporary file that no living writer holds locked; return 1, or 0 if one does."""
    if not stat.S_ISREG(os.lstat(place).st_mode):
        return 0
    descriptor = os.open(place, _READ | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(place)
    except BlockingIOError:
        return 0
    finally:
        os.close(descriptor)
    return 1


def _rebuild(root: str, follow_file_links: bool) -> LocalStorage:
    return LocalStorage(root, follow_file_links=follow_file_links)
