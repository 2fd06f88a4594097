"""Which complete cuts of a rank lie in this node's memory?  Those in all arenas of its identity, whoever fills them.

A trainer may make its arena anew when its state grows, and leave the old one until the new one is of use: so arenas are
looked for, not named. It only reads, and removes arenas that nobody fills. Imports without torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from lakeckpt.checkpoint.arena.arena import Arena, Held
from lakeckpt.checkpoint.arena.folder import ArenaFolder
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.errors import ArenaError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.lake.storage.local import LocalStorage

__all__ = ["Generations", "digest_of_run", "identity_of"]


def digest_of_run(run: str, storage: Storage) -> bytes:
    """By what the arenas and the agent of the run in ``storage`` are known on a node: 16 bytes.

    Of its place, too, where ``storage`` has a ``name``: a copy of a run has the same id, and goes its own way. A run
    that was moved is another one here, and goes on from its newest checkpoint.
    """
    place = str(getattr(storage, "place", getattr(storage, "name", "")))
    if isinstance(storage, LocalStorage):
        place = os.path.realpath(place)
    return short_digest(run.encode(), os.fsencode(place))


def identity_of(digest: bytes, *, rank: int, world_size: int) -> ArenaIdentity:
    """Whose the arenas of ``rank`` of the run with this `digest_of_run` are."""
    return ArenaIdentity(run=digest, rank=rank, world=world_size)


class Generations:
    """The complete generations of ``identity`` in ``folder``. Used by one thread at a time."""

    def __init__(self, folder: ArenaFolder, identity: ArenaIdentity) -> None:
        self._folder, self._identity = folder, identity
        self._open: dict[str, Arena] = {}

    @contextlib.contextmanager
    def hold(self, step: int, attempt: str) -> Iterator[Held | None]:
        """The generation of ``step`` that ``attempt`` captured, kept from being written while the block runs; None
        where there is none. An earlier attempt may have left another one of the same step, and a state that outgrew its
        arena another one of the same attempt: that in the arena which is filled now is the newer one."""
        for arena in reversed(self._by_age()):
            with arena.hold(step, attempt=attempt) as held:
                if held is not None:
                    yield held
                    return
        yield None

    def steps(self, attempt: str | None = None) -> list[int]:
        """The steps of all complete generations of an attempt; None: of any, save what a later one forgot."""
        every = (record for arena in list(self._found().values()) for record in arena.complete())
        return sorted({record.step for record in every if attempt in (None, record.attempt)})

    def cuts(self, attempt: str) -> dict[int, bytes]:
        """Step → digest of the cut, of the generations of an attempt, as `hold` finds them."""
        every = (record for arena in self._by_age() for record in reversed(arena.complete()))
        return {record.step: record.cut for record in every if record.attempt == attempt}

    def holds_later(self, attempt: int) -> bool:
        """Whether an attempt that began later than ``attempt`` has captured into these arenas."""
        every = (record.attempt for arena in list(self._found().values()) for record in arena.complete())
        return any(one.isdecimal() and int(one) > attempt for one in every)

    def close(self) -> None:
        """Let go of the arenas."""
        for arena in self._open.values():
            arena.close()
        self._open.clear()

    def remove(self) -> None:
        """Remove those that nobody fills."""
        for name, arena in list(self._found().items()):
            if not arena.is_filled:
                self._folder.remove(name)
        self.close()

    def _by_age(self) -> list[Arena]:
        """The arenas, that which is filled now last."""
        return sorted(self._found().values(), key=lambda one: one.is_filled)

    def _found(self) -> dict[str, Arena]:
        there = {one.name for one in self._folder.found() if one.identity == self._identity}
        for name in self._open.keys() - there:
            self._open.pop(name).close()
        for name in sorted(there - self._open.keys()):
            with contextlib.suppress(ArenaError, FileNotFoundError):
                self._open[name] = self._folder.open(name)
        return self._open
