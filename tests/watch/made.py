"""Looks at ranks that tests make: what a watcher would see of a job of four ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lakeckpt.watch.looks import Collective, Frame, ProcessLook, RankLook, ThreadLook

IN_COLLECTIVE = Frame(function="wait", file="/site-packages/torch/distributed/distributed_c10d.py", line=9)
IN_SCRIPT = Frame(function="train", file="/home/me/train.py", line=40)


def looked(rank: int, **changes: Any) -> RankLook:
    """A rank that waits in a collective for the others."""
    thread = ThreadLook(is_main=True, frames=(IN_COLLECTIVE, IN_SCRIPT))
    process = ProcessLook(pid=100 + rank, name="python", state="S", waits="futex")
    look = RankLook(
        rank=rank, node="a", pid=100 + rank, phase="compute", beats=7, step=12, threads=(thread,), process=process
    )
    return replace(look, **changes)


def in_script(line: int = 7, *, owns_gil: bool = False) -> tuple[ThreadLook, ...]:
    """The stack of a rank that is in its script."""
    frame = Frame(function="fetch", file="/home/me/train.py", line=line)
    return (ThreadLook(is_main=True, owns_gil=owns_gil, frames=(frame, IN_SCRIPT)),)


def job(**odd: dict[str, Any]) -> dict[int, RankLook]:
    """Four ranks that wait in a collective, but for those named: ``_2={...}`` changes rank 2."""
    return {rank: looked(rank, **odd.get(f"_{rank}", {})) for rank in range(4)}


def entered(
    number: int, operation: str = "all_reduce", sizes: str = "[[8]]", *, done: bool = False
) -> tuple[Collective, ...]:
    """What the recorder of a rank says: it is in this collective of all ranks."""
    completed = number if done else number - 1
    collective = Collective(
        group="0", members=(0, 1, 2, 3), number=number, completed=completed, operation=operation, sizes=sizes
    )
    return (collective,)
