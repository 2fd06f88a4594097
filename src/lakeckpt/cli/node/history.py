"""This module keeps the checks of a node in the run, ``nodes/<node>``, and reads those of the other nodes.

Each node writes its own document only. The module imports without torch, and starts no threads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from urllib.parse import quote

from lakeckpt.cli.node.report import NodeCheck, NodeHistory, NodeReport
from lakeckpt.errors import ObjectMissing, StorageError, WireError
from lakeckpt.lake.storage.base import Storage

__all__ = ["NODES", "keep", "others", "own_history"]

NODES = "nodes"
_CLOCK_S = 2.0


def own_history(storage: Storage, node: str) -> NodeHistory:
    """Return the history of a node; an empty one if there is none or it cannot be read. Raises `StorageError`."""
    with contextlib.suppress(ObjectMissing, WireError):
        return NodeHistory.from_bytes(storage.read(_path(node)))
    return NodeHistory(reports=())


def others(storage: Storage, node: str) -> list[NodeReport]:
    """Return the newest report of each other node that was not to be avoided. Documents that cannot be read are
    skipped. Raises `StorageError` if the run cannot be listed."""
    found = []
    for info in storage.list(NODES):
        if info.path == _path(node):
            continue
        with contextlib.suppress(StorageError, WireError):
            reports = [one for one in NodeHistory.from_bytes(storage.read(info.path)).reports if not one.is_named]
            found += reports[-1:]
    return found


def keep(storage: Storage, history: NodeHistory, reports: Sequence[NodeReport]) -> NodeCheck:
    """Put the history of a node, with its newest reports. Returns the check of the clock against the store's."""
    path, before = _path(reports[0].node), time.time()
    storage.put(path, [history.with_newest(reports).to_bytes()])
    after = time.time()
    stamp = next((one.mtime_ns for one in storage.list(path)), None)
    if stamp is None:
        return NodeCheck(name="clock", text="the store tells no time")
    # The store stamps between the two times, in whole seconds if it is an object store.
    off = max(before - 1 - stamp / 1e9, stamp / 1e9 - after, 0.0)
    if off > _CLOCK_S:
        return NodeCheck(name="clock", text=f"{off:.0f} s off the store's: set it by NTP, or stores refuse requests")
    return NodeCheck(name="clock", text="as the store's")


def _path(node: str) -> str:
    return f"{NODES}/{quote(node, safe='')}"
