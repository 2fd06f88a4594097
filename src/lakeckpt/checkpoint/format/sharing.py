"""This module records which ranks hold one tensor between them, and by which of its dimensions it is divided.

Ranks can have tensors of one name that are not one tensor (experts, say, that every rank numbers from 0). So beside the
parts of tensors (``shards``) the ranks of each tensor's mesh are saved. Parts belong together where name, shape, dtype
and these ranks are the same (``wholes``).

Values and their document only. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lakeckpt.checkpoint.format.fields import Ranks
from lakeckpt.errors import WireDamaged
from lakeckpt.wire.documents import as_row, from_plain, to_plain
from lakeckpt.wire.envelope import dumps, loads

__all__ = ["Sharing", "say_ranks", "sharing_from_bytes", "sharing_to_bytes"]

_KIND, _VERSION = "tree", (1, 0)
"""It goes the way of the trees of items."""


@as_row
@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How ranks share a tensor."""

    ranks: Ranks
    """The ranks of its mesh, as torch numbers them in the whole job: not in the group that saves."""
    dims: tuple[int, ...]
    """For each dimension of the mesh, the one of the tensor that it divides; -1: none, its ranks hold replicas."""

    def __post_init__(self) -> None:
        if not self.ranks or min(self.dims, default=0) < -1:
            raise WireDamaged(f"a tensor is shared by some ranks, by its dimensions: got {self.ranks} and {self.dims}")

    @property
    def size(self) -> int:
        """How many ranks share it."""
        return sum(stop - start for start, stop in self.ranks)


def say_ranks(ranks: Ranks) -> str:
    """For messages.

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
    """Return what `sharing_to_bytes` was given. `WireError` where it made none such."""
    rows: _Rows = from_plain(_Rows, loads(data, kind=_KIND, supported=_VERSION).value, "how tensors are shared")
    found = {key: sharing for sharing, keys in rows for key in keys}
    if len(found) != sum(len(keys) for _, keys in rows):
        raise WireDamaged("how tensors are shared: the key of a tensor is there twice")
    return found
