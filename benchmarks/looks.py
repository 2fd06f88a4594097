"""How long do many nodes need to join their looks?  ``python -m benchmarks.looks --nodes 256 --delay-ms 50``

A job stands still. Each node puts what it sees of its ranks into the run, within ``--apart-s`` of the first one. One
node joins all looks by the code of the agent, and judges; the store, a dictionary, answers each of its requests after
``--delay-ms``. A second job has one node that says nothing: the verdict has to name its ranks. Ranks have stacks of 24
frames and the newest 64 steps, as real ones have. Exit status 1: a verdict took more than ten seconds, or was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure import show
from lakeckpt.checkpoint.faults.joining import join_looks
from lakeckpt.checkpoint.faults.records import put_looks
from lakeckpt.lake.storage.base import Buffer, ObjectInfo
from lakeckpt.lake.storage.local import LocalStorage
from lakeckpt.watch.looks import Frame, ProcessLook, RankLook, ThreadLook
from lakeckpt.watch.stalls import NodeLooks
from lakeckpt.watch.verdict import judge

_STEP = 900
_MOST_S = 10.0


class _SlowStorage(LocalStorage):
    """Holds objects in memory, each from a time on, and answers each request after a delay."""

    def __init__(self, delay_s: float) -> None:
        super().__init__("nowhere")
        self.delay_s, self.shown_s = 0.0, 0.0
        self._delay_s = delay_s
        self._objects: dict[str, tuple[float, bytes]] = {}

    def begin(self) -> None:
        """Objects that were put so far are shown ``shown_s`` after now; requests are slow from now on."""
        now_s = time.monotonic()
        self._objects = {path: (now_s + at_s, data) for path, (at_s, data) in self._objects.items()}
        self.delay_s, self.shown_s = self._delay_s, now_s

    def put(self, path: str, chunks: Sequence[Buffer]) -> int:
        time.sleep(self.delay_s)
        self._objects[path] = self.shown_s, b"".join(chunks)
        return len(self._objects[path][1])

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        time.sleep(self.delay_s)
        shown = ((path, len(data)) for path, (at_s, data) in self._objects.items() if at_s <= time.monotonic())
        return [ObjectInfo(path=path, size_bytes=size) for path, size in shown]

    def read(self, path: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> bytes:
        time.sleep(self.delay_s)
        return self._objects[path][1]


def _looks(node: int, ranks: int) -> NodeLooks:
    """The looks of a node whose ranks wait in a collective, but for rank 1, which waits for a socket."""
    here = tuple(range(node * ranks, (node + 1) * ranks))
    looks = tuple(_look(rank, node) for rank in here)
    return NodeLooks(here=here, step=_STEP, first=looks, second=looks)


def _look(rank: int, node: int) -> RankLook:
    wait = Frame(function="wait", file="/lib/python3/site-packages/torch/distributed/distributed_c10d.py", line=9)
    script = tuple(Frame(function=f"part_{number}", file="/home/me/train.py", line=number) for number in range(24))
    look = RankLook(
        rank=rank,
        node=f"node-{node}",
        pid=100 + rank,
        phase="backward",
        beats=7,
        step=_STEP,
        taken=tuple((step, step) for step in range(_STEP - 63, _STEP + 1)),
        process=ProcessLook(pid=100 + rank, name="python", state="S", waits="futex"),
        threads=(ThreadLook(is_main=True, frames=(wait, *script[1:])),),
    )
    if rank == 1:
        process = ProcessLook(pid=101, name="python", state="S", waits="socket", waits_on="10.0.0.7:443")
        return replace(look, process=process, threads=(ThreadLook(is_main=True, frames=script),))
    return look


def _joined(options: argparse.Namespace, missing: int | None) -> dict[str, Any]:
    """Join the looks of a job; of the node ``missing`` there are none."""
    world = options.nodes * options.ranks
    storage = _SlowStorage(options.delay_ms / 1000)
    for node in range(1, options.nodes):
        storage.shown_s = options.apart_s * node / options.nodes
        if node != missing:
            put_looks(storage, 0, _looks(node, options.ranks))
    own = _looks(0, options.ranks)
    storage.begin()
    begin_s, before_s = time.monotonic(), time.process_time()
    found = join_looks(storage, 0, own, world=world, pause=time.sleep)
    first, second = ({look.rank: look for one in found for look in getattr(one, at)} for at in ("first", "second"))
    verdict = judge(first, second, world=world, here={rank for one in found for rank in one.here})
    seconds, processor_s = time.monotonic() - begin_s, time.process_time() - before_s
    silent = () if missing is None else tuple(range(missing * options.ranks, (missing + 1) * options.ranks))
    assert verdict is not None
    return {
        "nodes": options.nodes,
        "silent": len(silent) // options.ranks,
        "joined": len(found),
        "seconds": seconds,
        "processor_s": processor_s,
        "reason": verdict.reason,
        "right": (verdict.ranks, verdict.kind) == ((silent, "network") if silent else ((1,), "socket")),
    }


def main() -> int:
    """Measure both jobs, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=8, help="ranks of a node (default: 8)")
    parser.add_argument("--delay-ms", type=float, default=50.0, help="what a request takes (default: 50)")
    parser.add_argument("--apart-s", type=float, default=1.0, help="between the first looks and the last (default: 1)")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    found = [_joined(options, missing) for missing in (None, options.nodes // 2)]
    show(
        f"looks of {options.nodes} nodes of {options.ranks} ranks, {options.delay_ms:g} ms a request",
        ("silent", "joined", "seconds", "of the processor", "right", "verdict"),
        [
            (
                str(one["silent"]),
                str(one["joined"]),
                f"{one['seconds']:.1f}",
                f"{one['processor_s']:.1f}",
                "yes" if one["right"] else "no",
                one["reason"][:48],
            )
            for one in found
        ],
    )
    if options.json is not None:
        measured = {"delay_ms": options.delay_ms, "ranks": options.ranks, "load": os.getloadavg()[0], "jobs": found}
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    return int(not all(one["right"] and one["seconds"] <= _MOST_S for one in found))


if __name__ == "__main__":
    sys.exit(main())
