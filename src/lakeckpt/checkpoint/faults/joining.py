"""This module joins the looks of all nodes of a job through its run, when the job stands still.

Each node notices the stall by itself and puts its looks into the run. Then it asks for the looks of the others until
all are there, or `JOIN_S` are over. Nodes that gave none in time are missing in the result, and the verdict names their
ranks.
The module imports without torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from lakeckpt.checkpoint.faults.records import looks_of, put_looks
from lakeckpt.errors import StorageError
from lakeckpt.lake.storage.base import Storage
from lakeckpt.watch.looks import RankLook
from lakeckpt.watch.stalls import NodeLooks

__all__ = ["JOIN_S", "join_looks"]

JOIN_S = 9.0
"""For how long the other nodes are asked: with the last request, ten seconds."""
_ASK_S = 0.5


def join_looks(
    storage: Storage, attempt: int, looks: NodeLooks, *, world: int, pause: Callable[[float], object]
) -> Collection[NodeLooks]:
    """Give the ``looks`` of this node to the others of an attempt of ``world`` ranks; return those of all nodes that
    gave theirs in time. If the storage fails, these are fewer. ``pause(seconds)`` waits, and is true if the trainer of
    this agent has ended meanwhile."""
    if len(looks.here) == world:
        return (looks,)
    until_s, found = time.monotonic() + JOIN_S, {looks.here: looks}
    with contextlib.suppress(StorageError):
        put_looks(storage, attempt, replace(looks, first=tuple(map(_short, looks.first))))
        while True:
            for one in looks_of(storage, attempt, known={ranks[0] for ranks in found}):
                if abs(one.step - looks.step) <= 1:  # else it is of an earlier stall
                    found.setdefault(one.here, one)
            if sum(map(len, found)) >= world or time.monotonic() > until_s or pause(_ASK_S):
                break
    return tuple(found.values())


def _short(look: RankLook) -> RankLook:
    """Return what a verdict needs of the first look: a node reads those of all others, and stacks take it long."""
    return replace(look, threads=(), taken=(), children=(), recorded=())
