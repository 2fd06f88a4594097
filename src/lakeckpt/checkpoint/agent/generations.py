"""This module finds the complete cuts of a rank in this node's memory.

A trainer may make its arena anew when its state grows. So `Generations` looks for the arena of its rank at each call,
and keeps it open while it is the same. It writes only checksums, and removes the arena if nobody fills it. Imports
without torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from lakeckpt.checkpoint.arena.arena import Arena, HeldGeneration
from lakeckpt.checkpoint.arena.checksums import look_over
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.errors import ArenaDamaged, ArenaError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.recovery.facts import CutId

__all__ = ["Generations", "digest_of_place", "digest_of_run", "identity_of"]

_HALF = 8


def digest_of_run(run: str, storage: Storage) -> bytes:
    """Return the digest (16 bytes) by which a node knows the arenas and the agents of the run in ``storage``.

    The first half is the digest of the run's place alone (`digest_of_place`): a restart whose run is away knows the
    place and not the run. The second half is of the run and its place, if ``storage`` has a ``name``: a copy of a
    run has the same id, and goes its own way. A run that was moved is another run here, and goes on from its newest
    checkpoint.
    """
    place = getattr(storage, "place", None)
    name = _name_of(storage) if place is None else str(place)
    return digest_of_place(storage) + short_digest(run.encode(), os.fsencode(name))[:_HALF]


def digest_of_place(storage: Storage) -> bytes:
    """Return the digest (8 bytes) of the place of ``storage``, whatever lies there now."""
    return short_digest(os.fsencode(_name_of(storage)))[:_HALF]


def _name_of(storage: Storage) -> str:
    name = str(getattr(storage, "name", ""))
    return os.path.realpath(name) if isinstance(storage, LocalStorage) else name


def identity_of(digest: bytes, *, rank: int, world_size: int) -> ArenaIdentity:
    """Return the identity of the arena of ``rank`` of the run with this `digest_of_run`."""
    return ArenaIdentity(run=digest, rank=rank, world=world_size)


class Generations:
    """The complete generations of ``identity`` in ``folder``. Used by one thread at a time.

    All methods raise `ArenaError` if this process can open no more files. An arena that is damaged, or another
    number of ranks has left, counts as none.
    """

    def __init__(self, folder: ArenaFolder, identity: ArenaIdentity) -> None:
        self._folder, self._identity = folder, identity
        self._name = folder.name_of(identity)
        self._open: Arena | None = None

    @contextlib.contextmanager
    def hold(self, cut: CutId) -> Iterator[HeldGeneration | None]:
        """Lock the generation of ``cut`` while the block runs; yield None if there is none."""
        arena = self._arena()
        if arena is None:
            yield None
            return
        with arena.hold(cut) as held:
            yield held

    def steps(self, attempt: int | None = None) -> list[int]:
        """Return the steps of the complete generations of an attempt; None: of all attempts."""
        return sorted({cut.step for cut in self.cuts() if attempt in (None, cut.attempt)})

    def cuts(self) -> dict[CutId, bytes]:
        """Return the cuts of the complete generations, with their digests, as `hold` finds them."""
        arena = self._arena()
        return {} if arena is None else arena.cuts()

    def look_over(self, goes_on: Callable[[], bool]) -> None:
        """Take the checksums of the newest generation, if nobody has: `lakeckpt.checkpoint.arena.checksums`."""
        arena = self._arena()
        if arena is not None:
            look_over(arena, goes_on)

    def close(self) -> None:
        """Close the arena. It is opened again when it is needed."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def remove(self) -> bool:
        """Remove the arena. Returns False if a trainer fills it."""
        if self._arena() is not None:
            try:
                self._folder.remove(self._name)
            except ArenaError:
                return False
            self.close()
        return True

    def _arena(self) -> Arena | None:
        if self._open is not None and not self._open.is_there:
            self.close()
        if self._open is None:
            with contextlib.suppress(ArenaDamaged, FileNotFoundError):
                self._open = self._folder.open(self._name)
        if self._open is not None and self._open.layout.identity != self._identity:
            self.close()
        return self._open
