"""This module finds which ranks capture the same share, while a job trains, and names the list of shares in captures.

From time to time (from the cuts 2, 4, 8, 16, … of the attempt on) each rank *states* a digest of the next two cuts that
it captures: of the places of its tensors, of up to 16 spots of 8 bytes of each tensor, and of its documents without
random states. Of two cuts, since ranks that exchange their states every few steps are alike only then. Rank 0 collects
these digests from the job's store, and publishes the list of shares (`lakeckpt.recovery.shares`); equal digests are of
replicas. Every later capture of the same tensors names the list. If a rank has captured other cuts than rank 0, the
list before stays, until the next time. Ranks that have drifted apart are told apart from then on. Tensors that differ
only between the spots are taken for equal.

A rank whose readers' places depend on the data has these alone, and is a replica of nobody.

The thread that trains calls `ShareFinder.begins` and `ShareFinder.look`, which ask the store, and never wait. The
copier calls `ShareFinder.named`. The module starts no threads. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from lakeckpt.checkpoint.arena.contents import TensorTable
from lakeckpt.checkpoint.format.digests import short_digest
from lakeckpt.checkpoint.format.parts import RANDOM
from lakeckpt.errors import LakeckptError, WireError
from lakeckpt.recovery.facts import CutId
from lakeckpt.recovery.shares import ShareList
from lakeckpt.tracking.obstacles import Notes

__all__ = ["ShareFinder", "statement"]

_SPOTS, _SPOT_BYTES = 16, 8
_RANKS_PER_S = 1000
"""So many ranks may ask the store in a second."""
_MOST_GAP = 64
"""A rank that waits for the list looks for it ever more rarely, down to each 64th cut."""
_MOST_PEEKS = 100
"""So many digests are collected at a cut: each takes two requests."""
_LIST = "shares"
_CUTS_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stated:
    """The digest of what this rank captured of two ``cuts`` (their steps), whose tensors lie as in ``table``."""

    cuts: bytes
    digest: bytes
    table: bytes


class ShareFinder:
    """Finds the list for ``rank`` of ``world_size``, by notes in the job's store. ``now`` is the time in seconds."""

    def __init__(self, notes: Notes, *, rank: int, world_size: int, now: Callable[[], float]) -> None:
        self._notes, self._rank, self._world_size, self._now = notes, rank, world_size, now
        self._cuts = 0
        self._due: int | None = None  # the next two captures from this step on are to be stated
        self._first: tuple[int, int, bytes] | None = None  # the same step, that of the first capture, and its digest
        self._mark = b""  # what tells this rank apart, if nobody is its replica
        self._stated: _Stated | None = None  # by the copier, at the last such cut
        self._published = b""  # the cuts of what this rank has stated to the others
        self._others: list[bytes] = []  # what rank 0 has collected of these cuts
        self._listed = b""  # the cuts of the list
        self._list: tuple[ShareList, bytes] | None = None  # and the document of the table that it is of
        self._next_look_s, self._next_look, self._gap = float("-inf"), 0, 1

    # --- the thread that trains

    def begins(self, step: int, *, is_alone: bool) -> None:
        """The capture of the cut of ``step`` is to begin, on all ranks. ``is_alone``: this rank holds places of readers
        that no other rank holds."""
        self._cuts += 1
        if self._world_size == 1:
            return
        self._mark = b"rank %d" % self._rank if is_alone else b""
        if _is_due(self._cuts):
            self._due = step

    def look(self) -> None:
        """State what was captured, collect what others have stated, and take the list, as far as that is there."""
        stated = self._stated
        if stated is None or stated.cuts == self._listed:
            return
        with suppress(LakeckptError):  # of a store that is gone: others report it
            if stated.cuts != self._published:
                self._published, self._others, self._next_look, self._gap = stated.cuts, [], self._cuts, 1
                if self._rank:
                    self._notes.publish(f"{_LIST}/{self._rank}", stated.cuts + stated.digest)
            if self._cuts < self._next_look or self._now() < self._next_look_s:
                return
            if self._world_size >= _RANKS_PER_S:
                self._next_look_s = self._now() + self._world_size / _RANKS_PER_S
            has_more = self._collect(stated) if self._rank == 0 else self._fetch(stated)
            self._gap = 1 if has_more else self._gap
            self._next_look = self._cuts + self._gap
            self._gap = min(2 * self._gap, _MOST_GAP)

    def _fetch(self, stated: _Stated) -> bool:
        """Take the list from the store, if it is of the same cuts."""
        document = self._noted(_LIST, stated)
        if document is not None:
            self._take(stated, document)
        return document is not None

    def _collect(self, stated: _Stated) -> bool:
        """Collect digests on rank 0, and publish the list when all have come. Return whether some have come now."""
        before = len(self._others)
        for rank in range(before + 1, min(before + 1 + _MOST_PEEKS, self._world_size)):
            if (digest := self._noted(f"{_LIST}/{rank}", stated)) is None:
                break
            self._others.append(digest)
        if len(self._others) == self._world_size - 1:
            document = ShareList.of([stated.digest, *self._others]).document
            self._notes.publish(_LIST, stated.cuts + document)
            self._take(stated, document)
        return len(self._others) > before

    def _noted(self, key: str, stated: _Stated) -> bytes | None:
        """Return what a note says of the same cuts."""
        data = self._notes.peek(key)
        return data[_CUTS_BYTES:] if data is not None and data.startswith(stated.cuts) else None

    def _take(self, stated: _Stated, document: bytes) -> None:
        self._listed = stated.cuts
        try:
            found = ShareList.from_document(document)
        except WireError:
            return
        self._list = (found, stated.table) if found.has_replicas else None

    # --- the copier

    def named(self, cut: CutId, table: TensorTable, trees: Mapping[str, bytes], data: memoryview) -> ShareList | None:
        """Return the list that a capture of ``cut`` names; None if it names none. ``data``: all that it holds."""
        due = self._due
        if due is not None and cut.step >= due:
            digest = statement(table, trees, data, self._mark)
            if self._first is None or self._first[0] != due:
                self._first = due, cut.step, digest
            else:
                cuts = b"".join(step.to_bytes(_CUTS_BYTES // 2, "big") for step in (self._first[1], cut.step))
                both = short_digest(self._first[2], digest)
                self._stated, self._first = _Stated(cuts=cuts, digest=both, table=table.document), None
                self._due = None if self._due == due else self._due
        known = self._list
        return known[0] if known is not None and known[1] == table.document else None


def statement(table: TensorTable, trees: Mapping[str, bytes], data: memoryview, mark: bytes = b"") -> bytes:
    """Return the digest by which ranks compare what they have captured of one cut. ``mark`` tells this rank apart."""
    named = [part for name in sorted(trees) if name != RANDOM for part in (name.encode(), trees[name])]
    return short_digest(table.document, mark, _spots(table, data), *named)


def _spots(table: TensorTable, data: memoryview) -> bytes:
    """Return some bytes of each tensor: all of it, if it is small."""
    places = [(one.start, one.spec.size_bytes) for one in table.places.values() if one.spec.size_bytes]
    if not places:
        return b""
    starts, sizes = np.array(places, np.int64).T
    last = np.maximum(sizes - _SPOT_BYTES, 0)[:, None]
    spots = last * np.arange(_SPOTS) // (_SPOTS - 1)
    within = np.minimum(spots[:, :, None] + np.arange(_SPOT_BYTES), sizes[:, None, None] - 1)
    return bytes(np.frombuffer(data, np.uint8)[starts[:, None, None] + within])


def _is_due(number: int) -> bool:
    """Return whether ranks state what they captured of the cut of this number, counted from 1.

    >>> [number for number in range(1, 50) if _is_due(number)]
    [2, 4, 8, 16, 32]
    """
    return number > 1 and number & (number - 1) == 0
