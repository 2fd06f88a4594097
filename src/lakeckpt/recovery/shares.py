"""This module defines the list of shares: which ranks of a job capture the same share of a cut.

Each rank captures a *share* of every cut. Equal ids are of shares that restore the same state, but for random states:
under data parallelism each rank holds the whole, and in a mesh as many ranks hold each part as there are replicas.
Replicas are not assumed, but found: ranks *state* a digest of what they have captured of one cut, and equal digests
make equal ids. All cuts of one plan of capture have one list. It lies in each generation, so that a node that holds one
share knows what the whole cut needs. The module is pure: it defines values and their texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from lakeckpt.wire.documents import from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["SHARE_BYTES", "UNKNOWN", "ShareList"]

SHARE_BYTES = 16
UNKNOWN = bytes(SHARE_BYTES)
"""The id of a share that nobody has compared with others."""
_KIND, _VERSION = "shares", (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareList:
    """The ids of the shares of all ranks, one behind the other, in the order of ranks."""

    ids: bytes
    document: bytes = field(init=False, repr=False, compare=False)
    """What a generation holds. Made once, however many cuts name it."""

    def __post_init__(self) -> None:
        if not self.ids or len(self.ids) % SHARE_BYTES:
            raise ValueError(f"a list of shares has {SHARE_BYTES} bytes for each rank, got {len(self.ids)}")
        document = dumps(to_plain(self.ids, bytes), kind=_KIND, version=_VERSION, compress=True)
        object.__setattr__(self, "document", document)

    @classmethod
    def of(cls, stated: Sequence[bytes]) -> ShareList:
        """Return the list for the digests that the ranks stated, in the order of ranks.

        >>> found = ShareList.of([b"all"] * 4)
        >>> found.id_of(0) == found.id_of(3), found.has_replicas
        (True, True)
        """
        return cls(ids=b"".join(blake2b(one, digest_size=SHARE_BYTES).digest() for one in stated))

    @classmethod
    def from_document(cls, data: bytes) -> ShareList:
        """Return the list of a `document`. Raises `WireError`."""
        plain = loads(data, kind=_KIND, supported=_VERSION)
        return cls(ids=from_plain(bytes, plain, "a list of shares"))

    @property
    def world(self) -> int:
        """How many ranks capture shares."""
        return len(self.ids) // SHARE_BYTES

    @property
    def digest(self) -> bytes:
        """What the record of a generation names the list by."""
        return blake2b(self.document, digest_size=SHARE_BYTES).digest()

    @property
    def has_replicas(self) -> bool:
        """True if some rank captures what another one captures, too. Else the list tells nobody anything."""
        return len({self.id_of(rank) for rank in range(self.world)}) < self.world

    def id_of(self, rank: int) -> bytes:
        """Return the id of the share of a rank."""
        return self.ids[rank * SHARE_BYTES : (rank + 1) * SHARE_BYTES]
