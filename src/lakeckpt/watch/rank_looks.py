"""This module looks at the ranks of a node: at their pages, processes and stacks.

`look_at` gives what is seen of one rank now; its stacks take 0.1 to 0.2 s by py-spy, all else half a millisecond.
The module starts no threads.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace

from lakeckpt.watch.beat import Page
from lakeckpt.watch.facts import children_of, look_at_process
from lakeckpt.watch.looks import GpuLook, RankLook
from lakeckpt.watch.recorder import recorded_at, socket_path
from lakeckpt.watch.stacks import stacks_of
from lakeckpt.watch.system.gpus import gpu_of

__all__ = ["look_at", "look_at_page"]


def look_at_page(page: Page) -> RankLook:
    """Return what the page of a rank says."""
    return RankLook(
        rank=page.rank,
        node=socket.gethostname(),
        pid=page.pid,
        phase=page.doing,
        still_s=max(0.0, time.monotonic() - page.since_s),
        beats=page.beats,
        step=page.step,
        batches=page.batches,
        taken=page.taken,
        reads=page.reader if page.phase == "data" else "",
    )


def look_at(path: str, page: Page, gpus: Mapping[str, GpuLook]) -> RankLook:
    """Return what is seen of the rank whose ``page`` lies at ``path``: its process, children and stacks, too, and its
    GPU among the ``gpus`` of this node, if it lives."""
    look = look_at_page(page)
    if not page.lives:
        return replace(look, ended=time.time())
    return replace(
        look,
        process=look_at_process(page.pid),
        children=children_of(page.pid),
        threads=stacks_of(page.pid, path, page.stacks),
        recorded=recorded_at(socket_path(path), page.world),
        gpu=gpu_of(page.pid, gpus),
    )
