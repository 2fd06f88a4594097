"""This module divides a state over the replicas of a node, so that each captures a share of it.

A tensor above 16 MiB is divided into boxes of rows, one for each replica. All others stay whole and are spread by their
sizes. The boxes have the keys and the document of tensors that ranks shard
(`lakeckpt.checkpoint.format.sharing`), so that a restore, persisting and verification need no second way: a job whose
nodes have k replicas each shards its tensors over k ranks, and holds them once on each node. All replicas compute the
same division from the same specs. The module is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakeckpt.checkpoint.format.dtypes import TensorSpec
from lakeckpt.checkpoint.format.fields import ranges
from lakeckpt.checkpoint.format.sharing import Sharing, part_key
from lakeckpt.checkpoint.format.units import spread
from lakeckpt.core.intervals import Intervals
from lakeckpt.tracking.tally import Tally

__all__ = ["Division", "RowBox", "division_of", "facts_of_node", "nodes_of_replicas"]

_LARGE_BYTES = 16 * 2**20
_NODE, _REPLICA = "node of rank ", "replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBox:
    """Rows [first, stop) of the tensor ``name``, under the ``key`` of a part; a tensor without dimensions has no rows
    and is one box."""

    name: str
    key: str
    first: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """This rank is replica ``index`` of the ``ranks`` of its node. ``sharing`` is what the documents of trees say."""

    index: int
    ranks: tuple[int, ...]
    sharing: Sharing

    @property
    def count(self) -> int:
        """How many replicas divide the state."""
        return len(self.ranks)

    def boxes(self, specs: Mapping[str, TensorSpec]) -> list[RowBox]:
        """Return the boxes that this rank captures of tensors of ``specs``.

        >>> sharing = Sharing(ranks=((0, 2),), dims=(0,))
        >>> specs = {one.key: one for one in (TensorSpec(key="w", dtype="int8", shape=(2**12, 2**13)),
        ...                                   TensorSpec(key="b", dtype="int8", shape=(5,)))}
        >>> for index in (0, 1):
        ...     print([one.key for one in Division(index=index, ranks=(0, 1), sharing=sharing).boxes(specs)])
        ['w::at 0,0 of 4096,8192', 'b::at 0 of 5']
        ['w::at 2048,0 of 4096,8192']
        """
        found: list[RowBox] = []
        loads = [0] * self.count
        small: dict[str, TensorSpec] = {}
        for name, spec in specs.items():
            if spec.size_bytes <= _LARGE_BYTES or not spec.shape or spec.shape[0] < self.count:
                small[name] = spec
                continue
            bounds = [spec.shape[0] * at // self.count for at in range(self.count + 1)]
            row_bytes = spec.size_bytes // spec.shape[0]
            for at in range(self.count):
                loads[at] += row_bytes * (bounds[at + 1] - bounds[at])
            found.append(_box(spec, bounds[self.index], bounds[self.index + 1]))
        whole = Intervals.whole(self.count)
        owners = spread({(name, b""): (spec.size_bytes, whole) for name, spec in small.items()}, loads)
        for name, spec in small.items():
            if owners[name, b""][0] == self.index:
                found.append(_box(spec, 0, spec.shape[0] if spec.shape else 1))
        return found


def _box(spec: TensorSpec, first: int, stop: int) -> RowBox:
    offsets = (first, *(0 for _ in spec.shape[1:])) if spec.shape else ()
    return RowBox(name=spec.key, key=part_key(spec.key, offsets, spec.shape), first=first, stop=stop)


def facts_of_node(neighbours: Sequence[int], replica: bytes) -> dict[str, str]:
    """Return the facts of a rank for `nodes_of_replicas`: the ranks of its node, and what ranks that are alike have in
    common; none if that is empty."""
    texts = {f"{_NODE}{neighbours[0]}": ",".join(map(str, neighbours)), _REPLICA: replica.hex()}
    return texts if replica else {}


def nodes_of_replicas(tally: Tally) -> dict[int, tuple[int, ...]]:
    """Return rank → the ranks of its node, from the facts of all ranks that stated some; none if they are not alike."""
    replicas = tally.facts.get(_REPLICA, {})
    texts = [text for name, values in tally.facts.items() if name.startswith(_NODE) for text in values]
    groups = [tuple(map(int, text.split(","))) for text in texts]
    nodes = {rank: group for group in groups for rank in group}
    is_alike = len(replicas) == 1 and next(iter(replicas.values())).size == len(nodes)
    return nodes if is_alike else {}


def division_of(nodes: Mapping[int, tuple[int, ...]], rank: int) -> Division | None:
    """Return the division for ``rank``. ``nodes``: rank → the ranks of its node. None if a node has one rank, or nodes
    have different numbers of ranks."""
    here = nodes[rank]
    if len(here) < 2 or any(len(one) != len(here) for one in nodes.values()):
        return None
    dims = (0,) if len(here) == len(nodes) else (-1, 0)
    sharing = Sharing(ranks=ranges(nodes), dims=dims)
    return Division(index=here.index(rank), ranks=here, sharing=sharing)
