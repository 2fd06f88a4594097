"""This module computes which source each row of a mixture's lane comes from, by a formula: without tables or start-up.

Sources are the leaves of a tree that Huffman's algorithm makes of their weights. A node of weight b gives its rows to
two children; of its first m rows, the left one of weight a gets ``floor((m * a + offset) / b)``. So the rows of a
source before any place take as many divisions as the leaf is deep, at most 45.

*Bound.* With an offset from 0 to b - 1 a node is off by f, less than one row. A source on the path v_0 (its leaf),
v_1, … below the root is then off by the sum of ``f_i * w(v_0) / w(v_i)``. Weights on a path of Huffman's tree grow at
least as Fibonacci's numbers do (the sibling of v_i+1 is no lighter than v_i, which was one of the two lightest nodes),
so the sum of ``w(v_0) / w(v_i)`` is below 3.36. If it is above 2 for some source, offsets keep as far from 0 and b as
makes every source at most two rows off. With two sources, both are less than one row off.

*Lanes.* Lanes have different offsets, spread evenly (multiples of the golden ratio): if all lanes had the same ones,
all would turn to a rare source in the same step.

The module keeps the last rows of each lane that was asked for. It reads nothing, and starts no threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lakeckpt.cached import cached_property
from lakeckpt.core.hashing import derive_key, hash64

__all__ = ["CARRIED", "MOST_ROWS_OFF", "Turns"]

Int64Array = npt.NDArray[np.int64]
_Rows = TypeVar("_Rows", int, Int64Array)

CARRIED = 64
"""Rows that are carried over into a segment are counted in parts of so many."""
MOST_ROWS_OFF = 2
"""The most rows that a source is off from its share of the first n rows of a lane."""
_PHASES = 1 << 31
_GOLDEN = 1327217885
"""`_PHASES` by the golden ratio: its multiples, modulo `_PHASES`, are spread evenly."""
_RATIO = 1 << 40
_MOST_MADE = 1 << 17
"""The most rows that are made at once: in the formula, floats are exact up to 2^53, and weights stay below 2^32."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A node that is not a leaf. Nodes are numbered; the first numbers are those of the sources."""

    left: int
    right: int
    share: int
    """The weight of the left child."""
    weight: int
    lowest: int
    """The lowest offset."""
    offsets: int
    """How many offsets there are from the lowest one on."""
    shift: int
    """The amount that is added to the offset for what the children had too many when the segment began."""
    phase: int
    """Where lane 0 stands among the offsets, in parts of `_PHASES`."""


class _Turn(NamedTuple):
    node: _Node
    is_left: bool


class _Made(NamedTuple):
    """Rows of a lane that were made."""

    start: int
    sources: npt.NDArray[np.uint16]


class Turns:
    """The source of every row of every lane in a segment of a mixture.

    ``weights`` are integers below 2^32. ``carried``: for each source, the rows that a lane had too many when the
    segment began, in parts of `CARRIED`; empty: none.
    """

    def __init__(self, weights: Sequence[int], carried: Sequence[int], seed: int) -> None:
        self.weights, self._seed = tuple(weights), seed
        self._carried = list(carried) or [0] * len(weights)
        self._has_carried = any(carried)
        self._made: dict[int, _Made] = {}

    def before(self, source: int, lane: _Rows, rows: _Rows) -> _Rows:
        """Return how many of the first ``rows`` rows of ``lane`` are of ``source``: integers, or arrays of int64."""
        if not self.weights[source]:
            return rows * 0
        for node, is_left in self._paths[source]:
            left = self._left(node, lane, rows)
            rows = left if is_left else rows - left
        return rows

    def sources(self, lane: int, start: int, stop: int) -> npt.NDArray[np.uint16]:
        """Return the source of each row of ``lane`` from ``start`` to ``stop`` (exclusive): uint16, not writable."""
        made = self._made.get(lane, _Made(start, np.empty(0, np.uint16)))
        end = made.start + len(made.sources)
        if not made.start <= start < stop <= end:
            # A caller that goes on gets more at once, which is cheaper; its first batch does not wait for that.
            ahead = 2 * len(made.sources) if made.start <= start <= end else 0
            most = min(_MOST_MADE, max(8192, 256 * len(self.weights)))
            made = _Made(start, self._make(lane, start, max(stop, start + min(ahead, most))))
            self._made[lane] = made
        return made.sources[start - made.start : stop - made.start]

    def _make(self, lane: int, start: int, stop: int) -> npt.NDArray[np.uint16]:
        starts = range(start, stop, _MOST_MADE)
        found = np.concatenate([self._of(self._root, lane, one, min(stop - one, _MOST_MADE)) for one in starts])
        found.flags.writeable = False
        return found

    def _of(self, number: int, lane: int, before: int, rows: int) -> npt.NDArray[np.uint16]:
        """Return the sources of ``rows`` rows of a node, after its first ``before`` ones."""
        if number < len(self.weights):
            return np.full(rows, number, np.uint16)
        found = np.empty(rows, np.uint16)
        if rows:
            node = self._nodes[number - len(self.weights)]
            is_left, left = self._is_left(node, lane, before, rows), self._left(node, lane, before)
            mine, others = np.flatnonzero(is_left), np.flatnonzero(~is_left)
            found[mine] = self._of(node.left, lane, left, len(mine))
            found[others] = self._of(node.right, lane, before - left, len(others))
        return found

    def _is_left(self, node: _Node, lane: int, before: int, rows: int) -> npt.NDArray[np.bool_]:
        """Return for each of ``rows`` rows of ``node``, after its first ``before`` ones, if the left child gets it."""
        steps = np.arange(rows + 1, dtype=np.float64)
        known, inside = divmod(before * node.share + self._offset(node, lane), node.weight)
        counts = steps * node.share
        counts += inside
        counts /= node.weight
        np.floor(counts, out=counts)
        if self._has_carried:
            counts = np.clip(counts, -known, steps + (before - known))
        found: npt.NDArray[np.bool_] = counts[1:] != counts[:-1]
        return found

    def _left(self, node: _Node, lane: _Rows, rows: _Rows) -> _Rows:
        """Return how many of the first ``rows`` rows of ``node`` the left child gets."""
        periods, inside = rows // node.weight, rows % node.weight
        found = periods * node.share + (inside * node.share + self._offset(node, lane)) // node.weight
        if not self._has_carried:
            return found
        if isinstance(found, int):
            return min(max(found, 0), rows)
        return np.clip(found, 0, rows)

    def _offset(self, node: _Node, lane: _Rows) -> _Rows:
        phase = (node.phase + lane * _GOLDEN) % _PHASES
        return node.lowest + node.shift + phase * node.offsets // _PHASES

    @cached_property
    def _tree(self) -> list[tuple[int, int]]:
        """(left, right) of each node that is no leaf, children first."""
        leaves = deque(sorted((weight, source) for source, weight in enumerate(self.weights) if weight))
        inner: deque[tuple[int, int]] = deque()
        found: list[tuple[int, int]] = []
        while len(leaves) + len(inner) > 1:
            pair = []
            for _ in range(2):  # inner nodes are made in ascending order of their weights
                lighter = leaves if leaves and (not inner or leaves[0][0] <= inner[0][0]) else inner
                pair.append(lighter.popleft())
            inner.append((pair[0][0] + pair[1][0], len(self.weights) + len(found)))
            found.append((pair[0][1], pair[1][1]))
        return found

    @cached_property
    def _root(self) -> int:
        if self._tree:
            return len(self.weights) + len(self._tree) - 1
        return next(source for source, weight in enumerate(self.weights) if weight)

    @cached_property
    def _nodes(self) -> list[_Node]:
        weights, carried = list(self.weights), list(self._carried)
        for left, right in self._tree:
            weights.append(weights[left] + weights[right])
            carried.append(carried[left] + carried[right])
        phases = hash64(derive_key("mixture", self._seed), np.arange(len(self._tree), dtype=np.uint64)) % _PHASES
        ratio = self._largest_ratio(weights)
        found: list[_Node] = []
        for number, (left, right) in enumerate(self._tree, len(self.weights)):
            weight = weights[number]
            highest = min(weight - 1, MOST_ROWS_OFF * _RATIO * weight // ratio)
            lowest = max(0, weight - MOST_ROWS_OFF * _RATIO * weight // ratio)
            found.append(
                _Node(
                    left,
                    right,
                    share=weights[left],
                    weight=weight,
                    lowest=lowest,
                    offsets=highest - lowest + 1,
                    shift=(weights[left] * carried[number] - weight * carried[left]) // CARRIED,
                    phase=int(phases[len(found)]),
                )
            )
        return found

    def _largest_ratio(self, weights: Sequence[int]) -> int:
        """Return the largest sum of the module's docstring over all sources, or 2: in parts of `_RATIO`, rounded up."""
        parents = {child: number for number, pair in enumerate(self._tree, len(self.weights)) for child in pair}
        found = MOST_ROWS_OFF * _RATIO
        for source, weight in enumerate(self.weights):
            node, total = source, 0
            while node in parents:
                total += -(-weight * _RATIO // weights[node])
                node = parents[node]
            found = max(found, total)
        return found

    @cached_property
    def _paths(self) -> dict[int, list[_Turn]]:
        """Source → the nodes from the root down to it."""
        paths: dict[int, list[_Turn]] = {self._root: []}
        for number in reversed(range(len(self._nodes))):
            node = self._nodes[number]
            above = paths.pop(number + len(self.weights))
            paths[node.left] = [*above, _Turn(node, True)]
            paths[node.right] = [*above, _Turn(node, False)]
        return paths
