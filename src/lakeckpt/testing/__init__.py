"""This package checks users' own datasets, transforms and loaders by the law: `assert_exactly_once`.

`histories` and `topologies` load when first used, because they need Hypothesis. The other names do not.

::

    make_loader, topologies → [exactly_once] ← [attempts]: a history; drawn by [strategies]
                                   |
                                 [job]: all ranks in one process, step by step
                                   |
            each batch → [row_keys]: values to count → [observed]: consumed so far
                         [receipt_laws], [packed_laws]: batch and receipt name the same rows as the table
                                   |
            consumed + rest == table, or a Violation and a script that replays it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lakeckpt.testing.attempts import Attempt, Topology
from lakeckpt.testing.exactly_once import assert_exactly_once, replay

if TYPE_CHECKING:
    from lakeckpt.testing.strategies import histories, topologies

__all__ = ["Attempt", "Topology", "assert_exactly_once", "histories", "replay", "topologies"]


def __getattr__(name: str) -> Any:
    if name not in ("histories", "topologies"):
        raise AttributeError(f"module 'lakeckpt.testing' has no attribute {name!r}")
    from lakeckpt.testing import strategies

    return getattr(strategies, name)
