"""What do runs keep on this node, who uses it, and what does nobody need any more?  Arenas, and the files of agents.

A run keeps arenas while its trainers live, and where one died with a cut that is not in storage: a job that is started
again goes on from there. Where none is, they stay until they are reclaimed here. Nothing is reclaimed that a trainer
fills, or of a run whose agent lives. Both are asked by locks that end with their holders, and the locks are held while
it is removed, so that nobody begins to use it meanwhile.

What was reclaimed cannot be gone on from any more: this is for the user to order. Imports without torch.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Literal

from lakeckpt.checkpoint.agent.place import AgentPlace
from lakeckpt.checkpoint.arena.folder import ArenaFolder, ArenaInfo
from lakeckpt.errors import ArenaDamaged, ArenaInUse

__all__ = ["KeptArena", "KeptRun", "Use", "kept_in", "reclaim"]

Use = Literal["filled", "kept by its agent", "left", "damaged"]
"""Who needs an arena: its trainer; an agent, to persist it or for a trainer that died; nobody; nobody can use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptArena:
    """An arena and who needs it."""

    info: ArenaInfo
    use: Use

    @property
    def is_left(self) -> bool:
        """Whether it can be reclaimed."""
        return self.use in ("left", "damaged")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """What a run keeps in a folder of arenas.

    ``digest``: `digest_of_run`, as 32 hexadecimal digits; None for arenas that cannot be read. ``agent``: the process
    of its agent, 0 where one is about to begin or to end, None where none lives. ``files``: how many are left of an
    agent that has ended.
    """

    digest: str | None
    agent: int | None
    arenas: tuple[KeptArena, ...]
    files: int

    @property
    def left(self) -> tuple[KeptArena, ...]:
        """The arenas that can be reclaimed."""
        return tuple(one for one in self.arenas if one.is_left)


def kept_in(folder: ArenaFolder) -> list[KeptRun]:
    """What is kept in ``folder``, by run. `ArenaError` where the folder is not this user's alone."""
    arenas: dict[str | None, list[ArenaInfo]] = {}
    for info in folder.found():
        arenas.setdefault(None if info.identity is None else info.identity.run.hex(), []).append(info)
    files = _files_by_run(folder.path)
    found = []
    for digest in sorted({*arenas, *files}, key=lambda one: (one is None, one or "")):
        agent = None if digest is None else AgentPlace(folder.path, digest).agent()
        uses = tuple(KeptArena(info=one, use=_use(one, agent)) for one in arenas.get(digest, []))
        in_use = agent is not None or any(one.use == "filled" for one in uses)
        found.append(
            KeptRun(digest=digest, agent=agent, arenas=uses, files=0 if in_use else files.get(digest or "", 0))
        )
    return found


def reclaim(folder: ArenaFolder, kept: KeptRun) -> list[ArenaInfo]:
    """Remove what is left of a run: the arenas that are gone now. What has come into use meanwhile stays."""
    if kept.digest is None:
        return _removed(folder, kept)
    place = AgentPlace(folder.path, kept.digest)
    lock = place.take()
    if lock is None:
        return []  # an agent has begun
    try:
        found = _removed(folder, kept)
        if kept.files and len(found) == len(kept.arenas):
            place.remove()
        return found
    finally:
        os.close(lock)


def _use(info: ArenaInfo, agent: int | None) -> Use:
    if info.problem is not None:
        return "damaged"
    if info.is_filled:
        return "filled"
    return "left" if agent is None else "kept by its agent"


def _removed(folder: ArenaFolder, kept: KeptRun) -> list[ArenaInfo]:
    return [one.info for one in kept.left if _is_removed(folder, one.info.name)]


def _is_removed(folder: ArenaFolder, name: str) -> bool:
    """Remove an arena, unless a trainer has begun to fill it."""
    try:
        with folder.open(name, writes=True) as arena:  # nobody else can fill it from now on
            arena.empty()
            folder.remove(name)
    except ArenaInUse:
        return False
    except ArenaDamaged:
        folder.remove(name)
    except FileNotFoundError:
        pass
    return True


def _files_by_run(folder: str) -> dict[str, int]:
    """How many files agents have there, by the run that each serves or served."""
    found: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            digest, _, kind = name.partition(".")
            if len(digest) == 32 and kind in ("socket", "lock", "log"):
                found[digest] = found.get(digest, 0) + 1
    return found
