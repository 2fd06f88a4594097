"""What does every part of the codec need to know: the limits, the tags and the one value type of our own.

The tags are msgpack extension codes. A code, once released, keeps its meaning for ever; a new code is a new major
version of every kind of document that may hold it, since an older reader refuses what it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

__all__ = [
    "DEFAULT_LIMITS",
    "INT_MAX",
    "INT_MIN",
    "MOST_DIMS",
    "NODE_BYTES",
    "Limits",
    "Tag",
    "TensorRef",
    "is_dim_order",
]

INT_MIN = -(2**63)
INT_MAX = 2**64 - 1
NODE_BYTES = 4
"""Of a list, dict or extension beyond the first `Limits.nodes`: so many bytes of payload go with each."""
MOST_DIMS = 64
"""An array or a tensor has at most so many dimensions, as with numpy and torch."""
_MOST_DEPTH = 200


class Tag(IntEnum):
    """The msgpack extension codes of ours. Contents are described in ``docs/reference/formats.md``."""

    TUPLE = 1
    BIG_INT = 2
    COMPLEX = 3
    NUMPY_SCALAR = 4
    NUMPY_ARRAY = 5
    NUMPY_DTYPE = 6
    PAIRS = 7
    TENSOR_REF = 8
    TENSOR_DIM_ORDER = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """A leaf that stands for a tensor stored elsewhere under ``key``.

    ``dim_order`` is how it lay in memory, where that was not row by row: its dimensions, from the outermost to the
    innermost, as ``torch.Tensor.dim_order`` has them (channels last: 0, 2, 3, 1).
    """

    key: str
    dim_order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if type(self.key) is not str:
            raise ValueError(f"the key of a TensorRef is a str, got {self.key!r}")
        order = self.dim_order
        if order is not None and (type(order) is not tuple or not is_dim_order(order)):
            raise ValueError(f"the dim_order of a TensorRef is 0, 1, … in another order, got {order!r}")


def is_dim_order(order: Sequence[object]) -> bool:
    """Whether these are numbers from 0 on, at most `MOST_DIMS`, each once, and not in their own order."""
    if len(order) > MOST_DIMS:
        return False
    numbers = list(range(len(order)))
    return set(order) == set(numbers) and list(order) != numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large a document may be. Writing holds the same limits as reading: what was written can be read.

    ``total_bytes`` is the whole document; ``items`` counts every value and key, at any depth; ``depth`` is how many
    containers may lie inside one another (at most 200). ``nodes`` counts lists, dicts and extensions, at any depth,
    each of which takes far longer to read than a number: so many there may be, and one more for every `NODE_BYTES` of
    the payload. What is worth keeping takes more bytes than that; what was made to cost time takes fewer.
    """

    total_bytes: int = 256 * 2**20
    items: int = 4_000_000
    nodes: int = 20_000
    depth: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{field.name} is a positive int, got {value!r}")
        if self.depth > _MOST_DEPTH:
            raise ValueError(f"depth is at most {_MOST_DEPTH}, got {self.depth}")

    def most_nodes(self, payload_bytes: int) -> int:
        """How many lists, dicts and extensions a payload of that size may hold."""
        return self.nodes + payload_bytes // NODE_BYTES


DEFAULT_LIMITS = Limits()
