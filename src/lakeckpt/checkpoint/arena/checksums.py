"""This module takes the checksums of complete generations, behind their captures.

The agent calls it, so that no thread of the trainer takes a checksum. `checked` takes those of a generation that is
held, to be persisted. `look_over` takes those of the newest generation and locks nothing: captures never wait for it.
It stops as soon as a capture begins the generation anew, or the agent has something else to do. Checksums notice
what happens to the memory after they were taken; a generation without checksums is restored as it lies. The module
starts no threads but those of `lakeckpt.checkpoint.format.digests`. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lakeckpt.checkpoint.arena.arena import Arena, HeldGeneration
from lakeckpt.checkpoint.arena.contents import Contents
from lakeckpt.checkpoint.format.digests import LEAF_BYTES, PIECE_BYTES, leaf_digests, leaves_of_all

__all__ = ["checked", "look_over"]


def checked(contents: Contents) -> Contents:
    """Return the contents with checksums. If nobody has taken them, they are taken now, on several threads."""
    if contents.checksums is not None:
        return contents
    held = contents.held
    assert isinstance(held, HeldGeneration), "a share on another node has its checksums"
    (leaves,) = leaves_of_all([held.data])
    held.put_checksums(leaves)
    return replace(contents, checksums=leaves)


def look_over(arena: Arena, goes_on: Callable[[], bool]) -> None:
    """Take the checksums of the newest generation of ``arena``, if nobody has, on this thread, while it ``goes_on``."""
    newest = arena.newest()
    if newest is None or newest.checksums() is not None:
        return
    data, leaves = newest.data, []
    for at in range(0, max(len(data), 1), PIECE_BYTES):
        if not goes_on():
            return
        leaves.append(leaf_digests(data[at : at + PIECE_BYTES], LEAF_BYTES))
        if not newest.is_there:
            return
    newest.put_checksums(b"".join(leaves))
