"""Which ranks hold one tensor between them, and by which of its dimensions is it divided?

Ranks can have tensors of one name that are not one tensor: the stages of a pipeline number the states of their
optimizers alike. So beside the parts of tensors (``shards``) it is saved which ranks each of them is shared by: those
of its mesh. Parts belong together where name, shape, dtype and these ranks are the same (``wholes``).

Values and their document only. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lakeckpt.checkpoint.fields import Ranks, ranks_of
from lakeckpt.errors import WireDamaged
from lakeckpt.wire.codec import dumps, loads

__all__ = ["Sharing", "say_ranks", "sharing_from_bytes", "sharing_to_bytes"]

_KIND, _VERSION = "tree", (1, 0)
"""It goes the way of the trees of items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How ranks share a tensor."""

    ranks: Ranks
    """The ranks of its mesh, as torch numbers them in the whole job: not in the group that saves."""
    dims: tuple[int, ...]
    """For each dimension of the mesh, the one of the tensor that it divides; -1: none, its ranks hold replicas."""

    def __post_init__(self) -> None:
        if not self.ranks or not all(type(dim) is int and dim >= -1 for dim in self.dims):
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


def sharing_to_bytes(shared: Mapping[str, Sharing]) -> bytes:
    """The document that says how each tensor is shared, by its key in the trees."""
    rows: dict[Sharing, list[str]] = {}
    for key, sharing in shared.items():
        rows.setdefault(sharing, []).append(key)
    plain = [[[list(pair) for pair in one.ranks], list(one.dims), keys] for one, keys in rows.items()]
    return dumps(plain, kind=_KIND, version=_VERSION)


def sharing_from_bytes(data: bytes) -> dict[str, Sharing]:
    """What `sharing_to_bytes` made ``data`` of; `WireError` where it is none."""
    rows = loads(data, kind=_KIND, supported=_VERSION).value
    found: dict[str, Sharing] = {}
    for row in rows if type(rows) is list else [rows]:
        if type(row) is not list or [type(one) for one in row] != [list, list, list]:
            raise WireDamaged(f"how tensors are shared is [ranks, dimensions, keys], got {row!r:.80}")
        sharing = Sharing(ranks=ranks_of(row[0]), dims=tuple(row[1]))
        for key in row[2]:
            if type(key) is not str or key in found:
                raise WireDamaged(f"the key of a tensor that is shared is a text, and there once; got {key!r:.80}")
            found[key] = sharing
    return found
