"""This module takes the checksums of complete generations, behind their captures.

The agent calls it, so that no thread of the trainer takes a checksum. `checked` takes those of a generation that is
held, to be persisted. `look_over` takes those of the newest generation and locks nothing: captures never wait for it.
It stops as soon as a capture begins the generation anew, or the agent has something else to do. Both take over the
checksums of leaves that the capture has skipped (`lakeckpt.checkpoint.capture.kept`). Checksums notice what happens to
the memory after they were taken; a generation without checksums is restored as it lies. The module starts no threads
but those of `lakeckpt.checkpoint.format.digests`. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lakeckpt.checkpoint.arena.arena import Arena, HeldGeneration
from lakeckpt.checkpoint.arena.contents import Contents
from lakeckpt.checkpoint.format.digests import DIGEST_BYTES, LEAF_BYTES, PIECE_BYTES, leaf_digests, leaves_of_all

__all__ = ["checked", "look_over"]


def checked(contents: Contents) -> Contents:
    """Return the contents with checksums. If nobody has taken them, they are taken now, on several threads."""
    if contents.checksums is not None:
        return contents
    held = contents.held
    assert isinstance(held, HeldGeneration), "a share on another node has its checksums"
    known, data, count = held.known_leaves(), held.data, held.arena.layout.num_leaves
    runs = _runs([number for number in range(count) if number not in known])
    taken = leaves_of_all([data[first * LEAF_BYTES : stop * LEAF_BYTES] for first, stop in runs])
    for (first, stop), some in zip(runs, taken, strict=True):
        known |= {number: some[(number - first) * DIGEST_BYTES :][:DIGEST_BYTES] for number in range(first, stop)}
    leaves = b"".join(known[number] for number in range(count))
    held.put_checksums(leaves)
    return replace(contents, checksums=leaves)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return sorted numbers as ranges (first, stop)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        first = found.pop()[0] if found and found[-1][1] == number else number
        found.append((first, number + 1))
    return found


def look_over(arena: Arena, goes_on: Callable[[], bool]) -> None:
    """Take the checksums of the newest generation of ``arena``, if nobody has, on this thread, while it ``goes_on``."""
    newest = arena.newest()
    if newest is None or newest.checksums() is not None:
        return
    data, leaves, taken = newest.data, list[bytes](), 0
    known = newest.known_leaves()
    if not newest.is_there:
        return
    for at in range(0, max(len(data), 1), LEAF_BYTES):
        if (leaf := known.get(at // LEAF_BYTES)) is None:
            if taken % PIECE_BYTES == 0 and not goes_on():
                return
            leaf = leaf_digests(data[at : at + LEAF_BYTES], LEAF_BYTES)
            taken += LEAF_BYTES
        leaves.append(leaf)
        if not newest.is_there:
            return
    newest.put_checksums(b"".join(leaves))
