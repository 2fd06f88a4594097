"""This module makes, finds, opens and removes the arenas in a folder of the user's own, in memory or on a disk.

By default the folder is ``/dev/shm/lakeckpt-<user id>``: host memory that outlives processes. Another path gives arenas
that lie in files, for nodes that are short of memory. The folder is 0700 and the user's, each arena 0600. Nothing is
opened through a link, and a folder or file that does not look so is refused.

A rank of a run has one arena in a folder for each number of ranks, ``<digest of the run>.<rank>-of-<ranks>.arena``. An
arena with copies of what a rank of another node has captured ends in ``.copy.arena``, or in ``.documents.arena``. The
memory of an arena is allocated when it is made: a page that is missing later would end the process. The file gets its
name when the arena is whole (``O_TMPFILE``), so that a process that is killed meanwhile leaves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lakeckpt.checkpoint.arena.arena import Arena
from lakeckpt.checkpoint.arena.layout import ArenaIdentity, ArenaLayout
from lakeckpt.errors import ArenaDamaged, ArenaError
from lakeckpt.reading.memory import available_bytes
from lakeckpt.recovery.facts import CutId

__all__ = ["ArenaFolder", "ArenaInfo"]

_SUFFIX = ".arena"
_SHM = "/dev/shm"
_SPARED = 0.02
"""The part of a file system's room that is left free."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""These errors do not concern the file: this process, or the system, can open no more files."""
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaInfo:
    """An arena that was found: whose it is, its size, whether its trainer lives, the steps of its complete generations,
    and their cuts with digests, the newest first. A cut may have been captured twice. ``listed``: the digests of the
    lists of shares that cuts name.

    ``problem``: why it cannot be read; then all but the name and the size are unknown.
    """

    name: str
    size_bytes: int
    identity: ArenaIdentity | None = None
    is_filled: bool = False
    steps: tuple[int, ...] = ()
    cuts: Mapping[CutId, bytes] = field(default_factory=dict)
    listed: Mapping[CutId, bytes] = field(default_factory=dict)
    divided: frozenset[CutId] = frozenset()
    problem: str | None = None


class ArenaFolder:
    """The arenas in the folder ``path``, which is made when the first arena is; None: of this user, in host memory."""

    __slots__ = ("path",)

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = os.path.abspath(f"{_SHM}/lakeckpt-{os.geteuid()}" if path is None else os.fspath(path))

    def __repr__(self) -> str:
        return f"ArenaFolder({self.path!r})"

    def make(self) -> None:
        """Make the folder, if it is not there. Raises `ArenaError` if it cannot hold arenas."""
        with self._opened(make=True):
            pass

    def name_of(self, identity: ArenaIdentity) -> str:
        """Return the name of the arena of a rank of a run."""
        kind = "" if identity.kind == "own" else f".{identity.kind}"
        return f"{identity.run.hex()}.{identity.rank}-of-{identity.world}{kind}{_SUFFIX}"

    def create(self, layout: ArenaLayout) -> Arena:
        """Make an arena in the place of the one that its rank has, and open it to be filled.

        Raises `ArenaError` if no room is free, another process fills that arena, or the file system cannot hold
        arenas. Nothing new is left if it fails, nor if the process is killed meanwhile.
        """
        name = self.name_of(layout.identity)
        self.remove(name)
        with self._opened(make=True) as folder:
            self._check_room(folder, layout)
            descriptor = self._nameless(folder)
            try:
                self._fill(descriptor, layout)
            except BaseException:
                os.close(descriptor)
                raise
            arena = Arena(descriptor, name, writes=True)
            try:
                os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=folder, follow_symlinks=True)
            except BaseException:
                arena.close()
                raise
            return arena

    def open(self, name: str, *, writes: bool = False) -> Arena:
        """Open an arena that `found` named. Raises `ArenaDamaged`, `ArenaError`; ``FileNotFoundError`` if it is
        gone."""
        with self._opened() as folder:
            return Arena(self._file(name, folder), name, writes=writes)

    def found(self) -> list[ArenaInfo]:
        """Return all arenas here by name, also those that cannot be read. Raises `ArenaError` if this process can
        open no more files, or map no more memory: then nothing is known of any arena."""
        try:
            with self._opened() as folder:
                names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIX))
                return [info for name in names if (info := self._info(name, folder)) is not None]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ArenaError(f"the arenas in {self.path!r} cannot be looked at: {error.strerror}") from error

    def room_bytes(self, run: bytes) -> int:
        """Return how many bytes the arenas that ranks of the run with this digest fill may take here: those that they
        take already, and those that are free. Raises `ArenaError`."""
        taken = sum(
            info.size_bytes
            for info in self.found()
            if info.identity is not None and (info.identity.run, info.identity.kind) == (run, "own")
        )
        with self._opened(make=True) as folder:
            return taken + self._free_bytes(folder)

    def remove(self, name: str) -> None:
        """Remove an arena, if it is there. Generations that somebody holds, to persist them, stay until released.

        Raises `ArenaError` if another process fills it, or it cannot be looked at.
        """
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            try:
                with Arena(self._file(name, folder), name, writes=True) as arena:
                    arena.empty()  # others may have it mapped for long
                    os.unlink(name, dir_fd=folder)
            except ArenaDamaged:
                os.unlink(name, dir_fd=folder)

    # --- the folder and its files

    @contextlib.contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        """Open the folder while the block runs. Raises ``FileNotFoundError`` if it is not there, unless it is to be
        made, and `ArenaError`."""
        unmade: str | None = None  # not the error: that would keep the frames of all callers, and what they hold
        if make:
            try:
                os.mkdir(self.path, 0o700)
            except OSError as error:
                unmade = error.strerror  # opening shows what is wrong with what is there
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENOENT and not make:
                raise
            why = unmade if unmade is not None and error.errno == errno.ENOENT else error.strerror
            if error.errno in _SHORT:
                raise ArenaError(f"the folder of arenas {self.path!r} cannot be opened: {why}") from error
            raise ArenaError(f"arenas cannot lie in {self.path!r}: {why}. Give another folder") from error
        try:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ArenaError(
                    f"arenas hold a model and cannot lie in {self.path!r}, which is user {status.st_uid}'s with mode "
                    f"{stat.S_IMODE(status.st_mode):04o}: it must be this user's alone (0700). Remove it, or give "
                    "another folder"
                )
            yield folder
        finally:
            os.close(folder)

    def _file(self, name: str, folder: int) -> int:
        if os.path.basename(name) != name or not name.endswith(_SUFFIX):
            raise ArenaError(f"{name!r} is not the name of an arena")
        # Also to read, it is opened to be written to: an exclusive lock needs that.
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            kind = ArenaError if error.errno in _SHORT else ArenaDamaged
            raise kind(f"the arena {name!r} in {self.path!r} cannot be opened: {error.strerror}") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(descriptor)
            raise ArenaDamaged(f"the arena {name!r} in {self.path!r} is not a file of this user's alone: remove it")
        return descriptor

    def _info(self, name: str, folder: int) -> ArenaInfo | None:
        try:
            size_bytes = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
            with Arena(self._file(name, folder), name, writes=False) as arena:
                return ArenaInfo(
                    name=name,
                    size_bytes=size_bytes,
                    identity=arena.layout.identity,
                    is_filled=arena.is_filled,
                    steps=tuple(record.cut.step for record in arena.complete()),
                    cuts=arena.cuts(),
                    listed={record.cut: record.shares for record in reversed(arena.complete())},
                    divided=frozenset(record.cut for record in arena.complete() if record.divided),
                )
        except FileNotFoundError:
            return None
        except ArenaDamaged as error:
            return ArenaInfo(name=name, size_bytes=size_bytes, problem=str(error))

    # --- making an arena

    def refuse_without_room(self, layout: ArenaLayout, room_bytes: int, *, ranks: int = 1) -> None:
        """Raise `ArenaError` if the arenas of so many ``ranks``, all of this ``layout``, take more than
        ``room_bytes``."""
        size_bytes = ranks * layout.size_bytes
        if size_bytes > room_bytes:
            whose = f"the arenas of the {ranks} ranks of this node take" if ranks > 1 else "an arena takes"
            raise ArenaError(
                f"{whose} {size_bytes / 2**30:.2f} GiB, {layout.generations} generations of "
                f"{layout.data_bytes / 2**30:.2f} GiB{' each' if ranks > 1 else ''}, and "
                f"{max(room_bytes, 0) / 2**30:.2f} GiB are free in {self.path!r}: give a folder on a disk, or make "
                "room: `lakeckpt doctor` lists what ended jobs have left there"
            )

    def _free_bytes(self, folder: int) -> int:
        status = os.fstatvfs(folder)
        free = status.f_bavail * status.f_frsize - int(_SPARED * status.f_blocks * status.f_frsize)
        return min(free, available_bytes()) if self.path.startswith(_SHM + "/") else free

    def _check_room(self, folder: int, layout: ArenaLayout) -> None:
        self.refuse_without_room(layout, self._free_bytes(folder))

    def _nameless(self, folder: int) -> int:
        """Open a new file without a name in the folder: it is gone when it is closed, unless it gets a name."""
        try:
            return os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
            raise ArenaError(
                f"arenas cannot lie in {self.path!r}: its file system has no files without a name (O_TMPFILE). Give a "
                "folder in memory (tmpfs) or on a local disk (ext4, xfs, btrfs)"
            ) from error

    def _fill(self, descriptor: int, layout: ArenaLayout) -> None:
        try:
            os.posix_fallocate(descriptor, 0, layout.size_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise ArenaError(
                f"an arena of {layout.size_bytes / 2**30:.2f} GiB does not fit into {self.path!r}: {error.strerror}"
            ) from error
        block = layout.to_bytes()
        written = os.pwrite(descriptor, block, 0)
        assert written == len(block), "a few bytes into allocated memory"
