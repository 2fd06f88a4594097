"""This module records which ranks hold one tensor between them, and by which of its dimensions it is divided.

Ranks can have different tensors under one name: every rank may number its experts from 0, for example. So the ranks of
each tensor's mesh are saved beside the parts of the tensor. Parts belong together if name, shape, dtype and these ranks
are equal.

The module holds values and their document only. It never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lakeckpt.checkpoint.format.fields import Ranks
from lakeckpt.wire.documents import as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Sharing", "say_ranks", "sharing_from_bytes", "sharing_to_bytes"]

_KIND, _VERSION = "tree", (1, 0)
"""The document is stored like the tree of an item."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How ranks share a tensor."""

    ranks: Ranks
    """The ranks of the tensor's mesh, as torch numbers them in the whole job, not in the group that saves."""
    dims: tuple[int, ...]
    """For each dimension of the mesh, the dimension of the tensor that it divides; -1: its ranks hold replicas."""

    @property
    def size(self) -> int:
        """How many ranks share the tensor."""
        return sum(stop - start for start, stop in self.ranks)


def say_ranks(ranks: Ranks) -> str:
    """Return a text for messages.

    >>> say_ranks(((0, 2), (7, 8)))
    'ranks 0-1, 7'
    """
    texts = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in ranks]
    one = len(ranks) == 1 and ranks[0][1] == ranks[0][0] + 1
    return f"rank{'' if one else 's'} {', '.join(texts)}"


_Rows = tuple[tuple[Sharing, tuple[str, ...]], ...]


def sharing_to_bytes(shared: Mapping[str, Sharing]) -> bytes:
    """Return the document that says how each tensor is shared, by its key in the trees."""
    rows: dict[Sharing, list[str]] = {}
    for key, sharing in shared.items():
        rows.setdefault(sharing, []).append(key)
    return dumps(to_plain(tuple(rows.items()), _Rows), kind=_KIND, version=_VERSION)


def sharing_from_bytes(data: bytes) -> dict[str, Sharing]:
    """Return the value that `sharing_to_bytes` wrote. `WireError`."""
    rows: _Rows = from_plain(_Rows, loads(data, kind=_KIND, supported=_VERSION), "how tensors are shared")
    return {key: sharing for sharing, keys in rows for key in keys}
