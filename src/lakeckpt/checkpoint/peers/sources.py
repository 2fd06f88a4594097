"""This module reads one share from the best source that has it, and from the next one if a source fails.

A share that several nodes hold, or several ranks of a node, has several sources. Whatever is wrong with one of them
(damage, a lost connection, a node that is gone), the next one is taken, and what was under way is read anew. The
documents are those of the source that is the rank's own, wherever it lies, since random states are in them; else those
of the first source that could be opened. If no source is left, `ArenaDamaged` says what was wrong with each.

The module starts no threads but those of `lakeckpt.checkpoint.arena.contents`. Imports without torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TypeVar

from lakeckpt.checkpoint.arena.contents import Contents, GenerationDocuments, TensorTable
from lakeckpt.checkpoint.format.digests import LEAF_BYTES
from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.errors import ArenaDamaged

__all__ = ["HeldShare", "ShareSource"]

_LOG = logging.getLogger("lakeckpt")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSource:
    """A source of a share: what ``rank`` has captured. ``tier`` names where it lies, for reports. ``open`` opens it on
    a stack, which closes it; it raises `ArenaDamaged` if it cannot be read."""

    rank: int
    tier: str
    open: Callable[[ExitStack], Contents]


class HeldShare:
    """A share with its ``sources``, the best first: a `lakeckpt.checkpoint.state.loaded.TensorSource`. One thread calls
    it. ``count(tier, bytes)`` is called for what was read. ``own``: the rank whose own documents are preferred. Raises
    `ArenaDamaged` if no source can be opened."""

    def __init__(
        self, sources: Iterable[ShareSource], count: Callable[[str, int], None], *, missing: str, own: int = -1
    ) -> None:
        self._left = list(sources)
        self._count, self._missing = count, missing
        self._wrong: list[str] = []
        self._stack = ExitStack()
        self._table: TensorTable | None = None
        self._source, self._contents = self._next()
        self.rank = self._source.rank
        """Whose documents these are."""
        self.documents: GenerationDocuments = self._contents.documents
        self._table = self.documents.table
        if own != self.rank and (mine := next((one for one in self._left if one.rank == own), None)) is not None:
            self._take_documents(mine)

    def _take_documents(self, source: ShareSource) -> None:
        """Take the documents of another source, if they can be read."""
        with suppress(ArenaDamaged), ExitStack() as stack:
            documents = source.open(stack).documents
            if documents.table == self._table:
                self.rank, self.documents = source.rank, documents

    def close(self) -> None:
        """Release what was opened."""
        self._stack.close()

    @property
    def is_checked(self) -> bool:
        """True if what is read is compared with checksums."""
        return self._contents.checksums is not None

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """key → the spec of each tensor."""
        return self._contents.specs

    def leaves(self) -> dict[str, bytes]:
        """See `Contents`."""
        return self._read(Contents.leaves)

    def verify(self) -> None:
        """See `Contents`. If a source is damaged, the next one is verified."""
        self._read(Contents.verify)

    def fill(self, into: Mapping[str, memoryview]) -> None:
        """See `TensorSource`."""
        self._read(lambda contents: contents.fill(into))
        self._count(self._source.tier, sum(map(len, into.values())))

    def fill_range(self, key: str, start: int, into: memoryview) -> None:
        """See `TensorSource`."""
        self._read(lambda contents: contents.fill_range(key, start, into))
        self._count(self._source.tier, len(into))

    def unit_bytes(self, key: str) -> int:
        """See `TensorSource`."""
        return LEAF_BYTES

    def same(self, one: str, other: str) -> bool:
        """See `TensorSource`."""
        return self._read(lambda contents: contents.same(one, other))

    def _read(self, work: Callable[[Contents], _T]) -> _T:
        while True:
            try:
                return work(self._contents)
            except ArenaDamaged as error:
                self._give_up(error)
                self._source, self._contents = self._next()

    def _next(self) -> tuple[ShareSource, Contents]:
        while self._left:
            source = self._left.pop(0)
            self._stack.close()
            self._stack = ExitStack()
            try:
                found = source.open(self._stack)
                if self._table not in (None, found.documents.table):
                    raise ArenaDamaged(f"what rank {source.rank} captured has other tensors")
                return source, found
            except ArenaDamaged as error:
                self._stack.close()
                self._give_up(error)
        self._stack.close()
        raise ArenaDamaged("; ".join(self._wrong) or self._missing)

    def _give_up(self, error: ArenaDamaged) -> None:
        self._wrong.append(str(error))
        if self._left:
            _LOG.warning("a share is read from its next source: %s", error)
