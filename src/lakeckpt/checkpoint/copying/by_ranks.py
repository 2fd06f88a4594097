"""This module lets the ranks of a job copy another run to the place of theirs, before they restore it."""

from __future__ import annotations

from lakeckpt.checkpoint.copying.run_copy import RunCopy
from lakeckpt.lake.storage.base import Storage
from lakeckpt.tracking.exchange import Exchange
from lakeckpt.tracking.votes import Together

__all__ = ["copy_by_ranks"]

_MOST_COPYING = 16
"""So many ranks copy files: each of them reads all records of the checkpoint."""


def copy_by_ranks(source: Storage, target: Storage, exchange: Exchange) -> None:
    """Copy the newest checkpoint, collectively: rank 0 chooses it and commits, and the first ranks copy its files.
    Raises on all ranks what it raises on one."""
    made: list[RunCopy] = []
    rank, several, together = exchange.rank, min(exchange.world_size, _MOST_COPYING), Together(exchange)

    def choose() -> dict[str, str]:
        made.append(RunCopy(source, target))
        return {"slot": str(made[0].slot)}

    def write() -> None:
        if rank < several:
            one = made[0] if made else RunCopy(source, target, slot=slot)
            one.copy_files(rank=rank, world_size=several)

    slot = int(together.ask_rank_0(choose)["slot"])
    together.do(write)
    together.ask_rank_0(lambda: {"copied": str(made[0].commit())})
