"""How is a folder below a root reached, so that no key and no link leads out of it, and a new one is durable?

Component by component: each is opened relative to the descriptor of the one before, never following a link. The first
time that this process writes into a folder, and whenever it had to make it, the folder's entry in its parent is synced:
another process may have made it and died before it came to that. Never reads or writes the content of a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NoReturn

from lakeckpt.errors import StorageError
from lakeckpt.lake.storage.base import ObjectInfo, is_temporary
from lakeckpt.lake.storage.oscalls import OsCalls

__all__ = ["Folders", "TryAnew"]

MAX_REMEMBERED = 4096
_NOT_A_FOLDER = frozenset({errno.ENOTDIR, errno.ELOOP})


class TryAnew(Exception):
    """An attempt to write failed in a way that another one may not; ``chunks_used``: it has taken the caller's data."""

    def __init__(self, error: OSError, *, chunks_used: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.chunks_used = chunks_used


class Folders:
    """The folders below one root, as open descriptors."""

    __slots__ = ("_calls", "_durable", "_follow", "root")

    def __init__(self, root: str, *, follow_file_links: bool, calls: OsCalls) -> None:
        self.root = root
        self._follow = follow_file_links
        self._calls = calls
        self._durable: set[tuple[str, ...]] = set()

    @contextlib.contextmanager
    def inside(self, parts: tuple[str, ...], *, make: bool = False) -> Iterator[int]:
        """The descriptor of the folder ``parts``; ``FileNotFoundError`` where there is none and ``make`` is false."""
        descriptor = self._open_root(make)
        try:
            for depth in range(1, len(parts) + 1):
                below = self._open_below(descriptor, parts[:depth], make)
                self._calls.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            self._calls.close(descriptor)

    def open_object(self, name: str, folder: int, path: str) -> int:
        """The descriptor of a regular file, opened to read."""
        try:
            descriptor = self._calls.open_file(name, folder, self._follow)
        except OSError as error:
            if error.errno == errno.ELOOP:
                self.refuse_link(path)
            raise
        if not stat.S_ISREG(self._calls.fstat(descriptor).st_mode):
            self._calls.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "not a regular file")
        return descriptor

    def remove_empty(self, parts: tuple[str, ...]) -> None:
        """Remove the folder ``parts`` and those above it, below the root, as far as they are empty."""
        for depth in range(len(parts), 0, -1):
            self._durable.discard(parts[:depth])
            with self.inside(parts[: depth - 1]) as parent:
                try:
                    self._calls.rmdir(parts[depth - 1], parent)
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                        return
                    raise

    def visit(self, folder: int, name: str, path: str, found: list[ObjectInfo]) -> None:
        """Append what ``name`` in ``folder`` is, or holds at any depth."""
        if is_temporary(name):
            return
        status = self._calls.lstat(name, folder)
        if stat.S_ISLNK(status.st_mode):
            if not self._follow:
                self.refuse_link(path)
            try:
                status = self._calls.stat(name, folder)
            except FileNotFoundError:
                raise StorageError(
                    f"{path!r} in {self.root} is a symbolic link to nothing: mend or remove it"
                ) from None
            if stat.S_ISDIR(status.st_mode):
                self.refuse_link(path)
        if stat.S_ISDIR(status.st_mode):
            below = self._calls.open_folder(name, folder)
            try:
                self.walk(below, path, found)
            finally:
                self._calls.close(below)
        elif stat.S_ISREG(status.st_mode):
            found.append(ObjectInfo(path=path, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns))

    def walk(self, folder: int, path: str, found: list[ObjectInfo]) -> None:
        """Append all objects of a folder, at any depth; those deleted meanwhile are left out."""
        for name in self._calls.names(folder):
            with contextlib.suppress(FileNotFoundError):
                self.visit(folder, name, f"{path}/{name}" if path else name, found)

    def clear_temporaries(self, folder: int) -> int:
        """Remove the temporary files, at any depth, that no living writer holds locked; their number."""
        removed = 0
        for name in self._calls.names(folder):
            with contextlib.suppress(FileNotFoundError):
                mode = self._calls.lstat(name, folder).st_mode
                if stat.S_ISDIR(mode):
                    below = self._calls.open_folder(name, folder)
                    try:
                        removed += self.clear_temporaries(below)
                    finally:
                        self._calls.close(below)
                elif stat.S_ISREG(mode) and is_temporary(name):
                    removed += self._clear_temporary(name, folder)
        return removed

    def refuse_link(self, path: str) -> NoReturn:
        raise StorageError(
            f"{path!r} in {self.root} is a symbolic link, which could lead out of it: "
            "put the file or folder itself there, or open the place that it points to"
        )

    def _clear_temporary(self, name: str, folder: int) -> int:
        descriptor = self._calls.open_file(name, folder, False)
        try:
            self._calls.lock(descriptor)
        except OSError:
            return 0  # its writer lives (or this file system has no locks)
        else:
            self._calls.unlink(name, folder)
            return 1
        finally:
            self._calls.close(descriptor)

    def _open_root(self, make: bool) -> int:
        if make and () not in self._durable:
            self._make_root()
        try:
            return self._calls.open_root(self.root)
        except FileNotFoundError:
            if not make:
                raise
            self._make_root()
            return self._calls.open_root(self.root)

    def _make_root(self) -> None:
        """Make the root and the folders above it that are missing, each durable in its parent."""
        missing: list[str] = []
        path = self.root
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._calls.mkdir_path(path)
            self._sync_path(os.path.dirname(path))
        if not missing:  # perhaps made a moment ago by another process; where we may not look, it is not our making
            with contextlib.suppress(PermissionError):
                self._sync_path(os.path.dirname(self.root))
        self._durable.add(())

    def _sync_path(self, path: str) -> None:
        descriptor = self._calls.open_root(path)
        try:
            self._calls.fsync(descriptor)
        finally:
            self._calls.close(descriptor)

    def _open_below(self, parent: int, parts: tuple[str, ...], make: bool) -> int:
        part, made = parts[-1], False
        try:
            descriptor = self._calls.open_folder(part, parent)
        except FileNotFoundError:
            if not make:
                raise
            descriptor, made = self._make(part, parent), True
        except OSError as error:
            if error.errno not in _NOT_A_FOLDER:
                raise
            if stat.S_ISLNK(self._calls.lstat(part, parent).st_mode):
                self.refuse_link("/".join(parts))
            if not make:  # below a file there is nothing
                raise FileNotFoundError(errno.ENOENT, "a file lies where the path has a folder") from error
            raise
        if make and (made or parts not in self._durable):
            self._sync_entry(descriptor, parent, parts, made)
        return descriptor

    def _make(self, part: str, parent: int) -> int:
        try:
            with contextlib.suppress(FileExistsError):
                self._calls.mkdir(part, parent)
            return self._calls.open_folder(part, parent)
        except FileNotFoundError as error:  # removed again by someone who found it empty
            raise TryAnew(error, chunks_used=False) from error

    def _sync_entry(self, descriptor: int, parent: int, parts: tuple[str, ...], made: bool) -> None:
        """Make a folder's entry durable; after a failure, one that we made is removed, to be made anew."""
        try:
            self._calls.fsync(parent)
        except OSError as error:
            self._calls.close(descriptor)
            if not made:
                raise
            with contextlib.suppress(OSError):
                self._calls.rmdir(parts[-1], parent)
            raise TryAnew(error, chunks_used=False) from error
        except BaseException:
            self._calls.close(descriptor)
            raise
        if len(self._durable) >= MAX_REMEMBERED:
            self._durable.clear()
        self._durable.add(parts)
