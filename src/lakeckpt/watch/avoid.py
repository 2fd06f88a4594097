"""This module reads and writes the mark of a node to avoid: ``watch/avoid/<node>`` in the run.

The mark says who wrote it, when and why. `lakeckpt doctor --node --peers RUN` ends with 75 on such a node; a person who
has mended the node deletes the mark. The module imports without torch, and starts no threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from lakeckpt.errors import ObjectMissing
from lakeckpt.lake.storage.base import Storage
from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Avoid", "avoid_path", "put_avoid", "read_avoid"]

_KIND, _VERSION = "avoid", (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Avoid:
    """A node that new ranks should not come to."""

    node: str
    by: str
    """Who wrote the mark: the watch of a node, or a person."""
    at_s: float
    reason: str


def avoid_path(node: str) -> str:
    """Return the key of the mark of a node."""
    return f"watch/avoid/{quote(node, safe='')}"


def put_avoid(storage: Storage, mark: Avoid) -> None:
    """Mark a node. Raises `StorageError`."""
    storage.put(avoid_path(mark.node), [dumps(to_plain(mark), kind=_KIND, version=_VERSION)])


def read_avoid(storage: Storage, node: str) -> Avoid | None:
    """Return the mark of a node, or None. Raises `StorageError`, and `WireError` if the mark is damaged."""
    try:
        data = storage.read(avoid_path(node))
    except ObjectMissing:
        return None
    found: Avoid = from_plain(Avoid, loads(data, kind=_KIND, supported=_VERSION), "the mark of a node to avoid")
    return found
