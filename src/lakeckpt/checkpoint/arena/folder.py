"""Where do arenas lie, and which of them are left of a run?  A folder of the user's own, in memory or on a disk.

By default it is ``/dev/shm/lakeckpt-<user id>``: host memory that outlives processes. Another path gives arenas that
lie in files, for nodes that are short of memory. The folder is 0700 and the user's, each arena 0600 with a name that
nobody can guess; nothing is opened through a link, and whatever does not look so is refused. An arena's memory is
allocated when it is made: a page that is missing later would end the process.

Which arena belongs to which run and rank, each says itself. It removes only what it is told to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaLayout
from lakeckpt.checkpoint.arena.room import available_bytes
from lakeckpt.errors import ArenaDamaged, ArenaError, ArenaTooLarge

__all__ = ["ArenaFolder", "ArenaInfo"]

_SUFFIX = ".arena"
_SHM = "/dev/shm"
_SPARED = 0.02
"""The part of a file system's room that is left free."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Says nothing about what was to be opened: this process, or the system, can open no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaInfo:
    """An arena that was found: whose it is, what it takes, whether its trainer lives, its complete steps, newest first.

    ``problem``: why it cannot be read, where it cannot; all but the name and the size are unknown then.
    """

    name: str
    size_bytes: int
    identity: ArenaIdentity | None = None
    is_filled: bool = False
    steps: tuple[int, ...] = ()
    problem: str | None = None


class ArenaFolder:
    """The arenas in the folder ``path``, which is made when the first arena is; None: of this user, in host memory."""

    __slots__ = ("path",)

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = os.path.abspath(f"{_SHM}/lakeckpt-{os.geteuid()}" if path is None else os.fspath(path))

    def __repr__(self) -> str:
        return f"ArenaFolder({self.path!r})"

    def make(self) -> None:
        """Have the folder. `ArenaError` where what is there cannot hold arenas."""
        os.close(self._opened(make=True))

    def create(self, layout: ArenaLayout) -> Arena:
        """Make an arena, and open it to be filled. `ArenaTooLarge`, `ArenaError`; nothing is left where it fails, nor
        where the process is killed meanwhile, unless the file system has no files without a name."""
        folder = self._opened(make=True)
        name = secrets.token_hex(16) + _SUFFIX
        try:
            self._check_room(folder, layout)
            if (made := self._made_nameless(folder, name, layout)) is not None:
                return made
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # it is no damaged one: see `_told`
                self._fill(descriptor, layout)
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                return Arena(descriptor, name, writes=True)
            except BaseException:
                os.unlink(name, dir_fd=folder)
                raise
        finally:
            os.close(folder)

    def has_room(self, layout: ArenaLayout, *, instead_of: Sequence[str]) -> bool:
        """Whether an arena fits when those that are named are removed, as far as can be told beforehand: what somebody
        holds of them stays."""
        folder = self._opened(make=True)
        try:
            self._check_room(folder, layout, freed_bytes=sum(self._idle_bytes(name) for name in set(instead_of)))
        except ArenaTooLarge:
            return False
        finally:
            os.close(folder)
        return True

    def open(self, name: str, *, writes: bool = False) -> Arena:
        """Open an arena that `found` named. `ArenaDamaged`, `ArenaError`; ``FileNotFoundError`` where it is gone."""
        folder = self._opened(make=False)
        try:
            return Arena(self._file(name, folder, writes=writes), name, writes=writes)
        finally:
            os.close(folder)

    def found(self) -> list[ArenaInfo]:
        """All arenas here, those that cannot be read among them, by name. Not those that are being made. `ArenaError`
        where this process can open no more files, or map no more memory: nothing is known of any then."""
        try:
            folder = self._opened(make=False)
        except FileNotFoundError:
            return []
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIX))
            return [info for name in names if (info := self._told(name, folder)) is not None]
        except OSError as error:
            raise ArenaError(f"the arenas in {self.path!r} cannot be looked at: {error.strerror}") from error
        finally:
            os.close(folder)

    def remove(self, name: str) -> None:
        """Remove an arena; what somebody holds of it, to persist it, is free when he lets go. None there: nothing."""
        with contextlib.suppress(ArenaError, FileNotFoundError), self.open(name, writes=True) as arena:
            arena.empty()  # others may have it mapped for long
        with contextlib.suppress(FileNotFoundError):
            folder = self._opened(make=False)
            try:
                os.unlink(name, dir_fd=folder)
            finally:
                os.close(folder)

    def _idle_bytes(self, name: str) -> int:
        with contextlib.suppress(ArenaError, FileNotFoundError), self.open(name) as arena:
            return arena.idle_bytes
        return 0

    # --- the folder and its files

    def _opened(self, *, make: bool) -> int:
        unmade: str | None = None  # not the error: that would keep the frames of all callers, and what they hold
        if make:
            try:
                os.mkdir(self.path, 0o700)
            except OSError as error:
                unmade = error.strerror  # what is wrong with what is there, opening it tells
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENOENT and not make:
                raise
            why = unmade if unmade is not None and error.errno == errno.ENOENT else error.strerror
            if error.errno in _SHORT:
                raise ArenaError(f"the folder of arenas {self.path!r} cannot be opened: {why}") from error
            raise ArenaError(f"arenas cannot lie in {self.path!r}: {why}. Give another folder") from error
        told = os.fstat(folder)
        if told.st_uid != os.geteuid() or stat.S_IMODE(told.st_mode) & 0o077:
            os.close(folder)
            raise ArenaError(
                f"arenas hold a model and cannot lie in {self.path!r}, which is user {told.st_uid}'s with mode "
                f"{stat.S_IMODE(told.st_mode):04o}: it must be this user's alone (0700). Remove it, or give another"
            )
        return folder

    def _file(self, name: str, folder: int, *, writes: bool) -> int:
        if os.path.basename(name) != name or not name.endswith(_SUFFIX):
            raise ArenaError(f"{name!r} is not the name of an arena")
        # Also to read, it is opened to be written to: a lock for oneself needs that.
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            kind = ArenaError if error.errno in _SHORT else ArenaDamaged
            raise kind(f"the arena {name!r} in {self.path!r} cannot be opened: {error.strerror}") from error
        told = os.fstat(descriptor)
        if not stat.S_ISREG(told.st_mode) or told.st_uid != os.geteuid() or stat.S_IMODE(told.st_mode) & 0o077:
            os.close(descriptor)
            raise ArenaDamaged(f"the arena {name!r} in {self.path!r} is not a file of this user's alone: remove it")
        return descriptor

    def _told(self, name: str, folder: int) -> ArenaInfo | None:
        try:
            size_bytes = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
            with Arena(self._file(name, folder, writes=False), name, writes=False) as arena:
                steps = tuple(record.step for record in arena.complete())
                return ArenaInfo(
                    name=name,
                    size_bytes=size_bytes,
                    identity=arena.layout.identity,
                    is_filled=arena.is_filled,
                    steps=steps,
                )
        except FileNotFoundError:
            return None
        except ArenaDamaged as error:
            if self._is_being_made(name, folder):
                return None
            return ArenaInfo(name=name, size_bytes=size_bytes, problem=str(error))

    def _is_being_made(self, name: str, folder: int) -> bool:
        try:
            descriptor = self._file(name, folder, writes=False)
        except (ArenaError, FileNotFoundError):
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    # --- making one

    def _check_room(self, folder: int, layout: ArenaLayout, *, freed_bytes: int = 0) -> None:
        told = os.fstatvfs(folder)
        free = told.f_bavail * told.f_frsize - int(_SPARED * told.f_blocks * told.f_frsize)
        if self.path.startswith(_SHM + "/"):
            free = min(free, available_bytes())
        if layout.size_bytes > free + freed_bytes:
            raise ArenaTooLarge(
                f"an arena of {layout.generations} generations of {layout.data_bytes / 2**30:.2f} GiB takes "
                f"{layout.size_bytes / 2**30:.2f} GiB, and {max(free, 0) / 2**30:.2f} GiB are free in {self.path!r}: "
                "give a folder on a disk, capture less, or make room"
            )

    def _made_nameless(self, folder: int, name: str, layout: ArenaLayout) -> Arena | None:
        """An arena that is given its name when it is one, and its trainer fills it; None where that cannot be."""
        descriptor = _nameless(folder)
        if descriptor is None:
            return None
        try:
            self._fill(descriptor, layout)
        except BaseException:
            os.close(descriptor)
            raise
        arena = Arena(descriptor, name, writes=True)
        try:
            os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=folder, follow_symlinks=True)
        except OSError:
            arena.close()
            return None
        except BaseException:
            arena.close()
            raise
        return arena

    def _fill(self, descriptor: int, layout: ArenaLayout) -> None:
        try:
            os.posix_fallocate(descriptor, 0, layout.size_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
                raise
            raise ArenaTooLarge(
                f"an arena of {layout.size_bytes / 2**30:.2f} GiB does not fit into {self.path!r}: {error.strerror}"
            ) from error
        block = layout.to_bytes()
        written = os.pwrite(descriptor, block, 0)
        assert written == len(block), "a few bytes into allocated memory"


def _nameless(folder: int) -> int | None:
    """A new file in ``folder`` that goes when it is closed, unless it is given a name; None where there are none."""
    try:
        return os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            return None
        raise
