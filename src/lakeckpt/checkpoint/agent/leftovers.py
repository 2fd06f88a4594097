"""This module lists what runs keep on this node, and removes what nobody uses: arenas, and logs of agents.

An arena stays while its trainer lives. It also stays if the trainer died and its newest cut is not in storage, because
a restarted job can continue from that cut. Locks that the kernel releases with their holders show whether a trainer
fills an arena and whether the agent of its rank lives. They are held while something is removed, so that nobody begins
to use it meanwhile. Copies of what ranks of other nodes have captured stay while any agent of the run lives here. A job
cannot go on from memory that was removed, so only the user removes it. Imports without torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lakeckpt.checkpoint.agent.logs import agents_of, log_path, logs_in, unused
from lakeckpt.checkpoint.arena.folder import ArenaFolder, ArenaInfo
from lakeckpt.checkpoint.arena.layout import ArenaIdentity
from lakeckpt.errors import ArenaError

__all__ = ["KeptArena", "Use", "kept_in", "left_logs", "reclaim", "remove_log"]

Use = Literal["filled", "kept by its agent", "left", "damaged"]
"""The user of an arena: its trainer; an agent, to persist it; none; none is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptArena:
    """An arena and who needs it. ``agents``: the processes of the agents of its rank."""

    info: ArenaInfo
    use: Use
    agents: tuple[int, ...] = ()

    @property
    def is_left(self) -> bool:
        """True if it can be reclaimed."""
        return self.use in ("left", "damaged")


def kept_in(folder: ArenaFolder) -> list[KeptArena]:
    """Return the arenas in ``folder``, by name. Raises `ArenaError` if the folder is not this user's alone."""
    return [_kept(folder, info) for info in folder.found()]


def left_logs(folder: ArenaFolder) -> list[str]:
    """Return the paths of the logs in ``folder`` whose agents have ended."""
    return [path for path in logs_in(folder.path) if _is_over(path)]


def reclaim(folder: ArenaFolder, kept: Iterable[KeptArena]) -> set[str]:
    """Remove the arenas of ``kept`` that are left, and return the names of those that are gone now. Arenas that are in
    use again stay."""
    return {one.info.name for one in kept if one.is_left and _is_removed(folder, one.info)}


def remove_log(path: str) -> None:
    """Remove a log, unless an agent has begun to write to it again."""
    with unused(path) as free, contextlib.suppress(FileNotFoundError):
        if free:
            os.unlink(path)


def _kept(folder: ArenaFolder, info: ArenaInfo) -> KeptArena:
    if info.identity is None:
        return KeptArena(info=info, use="damaged")
    paths = _logs_of(folder, info.identity)
    free = all(map(_is_over, paths))
    use: Use = "filled" if info.is_filled else "left" if free else "kept by its agent"
    return KeptArena(info=info, use=use, agents=tuple(agent for path in paths for agent in agents_of(path)))


def _logs_of(folder: ArenaFolder, identity: ArenaIdentity) -> list[str]:
    """Return the logs of the agents that need an arena: of its rank; for copies, of all ranks of the run here."""
    if identity.kind == "own":
        return [log_path(folder.path, identity.run.hex(), identity.rank)]
    return [path for path in logs_in(folder.path) if os.path.basename(path).startswith(identity.run.hex())]


def _is_over(path: str) -> bool:
    with unused(path) as free:
        return free


def _is_removed(folder: ArenaFolder, info: ArenaInfo) -> bool:
    """Remove an arena, unless a trainer has begun to fill it, or an agent to read it."""
    with contextlib.ExitStack() as stack:
        for path in [] if info.identity is None else _logs_of(folder, info.identity):
            if not stack.enter_context(unused(path)):
                return False
        try:
            folder.remove(info.name)
        except ArenaError:
            return False
        return True
