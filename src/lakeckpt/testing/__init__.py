"""This package checks users' own datasets, transforms and loaders by the law: `assert_exactly_once`.

It also makes faults: `fail_at` lets a rank of a job fail at a moment of a step, `lose_node` ends a node's processes,
and `FaultyStorage` lets calls of a store fail. `histories` and `topologies` load when first used, because they need
Hypothesis, and `fail_at` and `lose_node`, because they import checkpoints.

::

    make_loader, topologies → [exactly_once] ← [attempts]: a history; drawn by [strategies]
                                   |
                                 [job]: all ranks in one process, step by step
                                   |
            each batch → [row_keys]: values to count → [observed]: consumed so far
                         [receipt_laws], [packed_laws]: batch and receipt name the same rows as the table
                                   |
            consumed + rest == table, or a Violation and a script that replays it

a job that recovers? → [faults]: ranks, nodes; [faulty_storage]: stores
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lakeckpt.testing.attempts import Attempt, Topology
from lakeckpt.testing.exactly_once import assert_exactly_once, replay
from lakeckpt.testing.faulty_storage import FaultyStorage, StoreFault

if TYPE_CHECKING:
    from lakeckpt.testing.faults import fail_at, lose_node
    from lakeckpt.testing.strategies import histories, topologies

__all__ = [
    "Attempt",
    "FaultyStorage",
    "StoreFault",
    "Topology",
    "assert_exactly_once",
    "fail_at",
    "histories",
    "lose_node",
    "replay",
    "topologies",
]


def __getattr__(name: str) -> Any:
    if name in ("fail_at", "lose_node"):
        from lakeckpt.testing import faults

        return getattr(faults, name)
    if name in ("histories", "topologies"):
        from lakeckpt.testing import strategies

        return getattr(strategies, name)
    raise AttributeError(f"module 'lakeckpt.testing' has no attribute {name!r}")
