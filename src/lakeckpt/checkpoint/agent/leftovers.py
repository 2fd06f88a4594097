"""This module lists what runs keep on this node, and removes what nobody uses: arenas, and logs of agents.

A run keeps arenas while its trainers live, and where a trainer died with a cut that is not in storage: a job that is
started again goes on from there. Locks that the kernel releases with their holders show whether a trainer fills an
arena and whether the agent of its rank lives. They are held while something is removed, so that nobody begins to use
it meanwhile. A job cannot go on from memory that was removed, so only the user removes it. Imports without torch.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Literal

from lakeckpt.checkpoint.agent.logs import agents_of, log_path, logs_in, unused
from lakeckpt.checkpoint.arena.folder import ArenaFolder, ArenaInfo
from lakeckpt.errors import ArenaError

__all__ = ["KeptArena", "KeptRun", "Use", "kept_in", "reclaim"]

Use = Literal["filled", "kept by its agent", "left", "damaged"]
"""Who needs an arena: its trainer; an agent, to persist it; nobody; nobody can use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptArena:
    """An arena and who needs it. ``agents``: the processes of the agents of its rank."""

    info: ArenaInfo
    use: Use
    agents: tuple[int, ...] = ()

    @property
    def is_left(self) -> bool:
        """Whether it can be reclaimed."""
        return self.use in ("left", "damaged")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """What a run keeps in a folder of arenas.

    ``digest``: `digest_of_run`, as 32 hexadecimal digits; None for arenas that cannot be read. ``logs``: the ranks
    whose agents have left a log and have ended.
    """

    digest: str | None
    arenas: tuple[KeptArena, ...]
    logs: tuple[int, ...] = ()

    @property
    def left(self) -> tuple[KeptArena, ...]:
        """The arenas that can be reclaimed."""
        return tuple(one for one in self.arenas if one.is_left)


def kept_in(folder: ArenaFolder) -> list[KeptRun]:
    """Return what is kept in ``folder``, by run. Raises `ArenaError` where the folder is not this user's alone."""
    arenas: dict[str | None, list[KeptArena]] = {}
    for info in folder.found():
        one = _kept(folder, info)
        arenas.setdefault(None if info.identity is None else info.identity.run.hex(), []).append(one)
    logs = logs_in(folder.path)
    return [
        KeptRun(
            digest=digest,
            arenas=tuple(arenas.get(digest, ())),
            logs=()
            if digest is None
            else tuple(rank for rank in logs.get(digest, ()) if _is_over(folder, digest, rank)),
        )
        for digest in sorted({*arenas, *logs}, key=lambda one: (one is None, one or ""))
    ]


def reclaim(folder: ArenaFolder, kept: KeptRun) -> list[ArenaInfo]:
    """Remove what is left of a run, and return the arenas that are gone now. Arenas that are in use again stay."""
    gone = [one.info for one in kept.left if _is_removed(folder, one.info)]
    for rank in kept.logs:
        path = log_path(folder.path, kept.digest or "", rank)
        with unused(path) as free, contextlib.suppress(FileNotFoundError):
            if free:
                os.unlink(path)
    return gone


def _kept(folder: ArenaFolder, info: ArenaInfo) -> KeptArena:
    if info.identity is None:
        return KeptArena(info=info, use="damaged")
    path = log_path(folder.path, info.identity.run.hex(), info.identity.rank)
    with unused(path) as free:
        use: Use = "filled" if info.is_filled else "left" if free else "kept by its agent"
    return KeptArena(info=info, use=use, agents=tuple(agents_of(path)))


def _is_over(folder: ArenaFolder, digest: str, rank: int) -> bool:
    with unused(log_path(folder.path, digest, rank)) as free:
        return free


def _is_removed(folder: ArenaFolder, info: ArenaInfo) -> bool:
    """Remove an arena, unless a trainer has begun to fill it, or an agent to read it."""
    with contextlib.ExitStack() as stack:
        if info.identity is not None:
            path = log_path(folder.path, info.identity.run.hex(), info.identity.rank)
            if not stack.enter_context(unused(path)):
                return False
        try:
            folder.remove(info.name)
        except ArenaError:
            return False
        return True
