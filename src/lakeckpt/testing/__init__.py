"""This package checks users' own datasets, transforms and loaders by the law: `assert_exactly_once`.

Names load when first used: `histories` and `topologies` need Hypothesis, and the other names do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "Attempt": "lakeckpt.testing.attempts",
    "Topology": "lakeckpt.testing.attempts",
    "assert_exactly_once": "lakeckpt.testing.exactly_once",
    "histories": "lakeckpt.testing.strategies",
    "replay": "lakeckpt.testing.exactly_once",
    "topologies": "lakeckpt.testing.strategies",
}

__all__ = [
    "Attempt",
    "Topology",
    "assert_exactly_once",
    "histories",
    "replay",
    "topologies",
]

if TYPE_CHECKING:
    from lakeckpt.testing.attempts import Attempt, Topology
    from lakeckpt.testing.exactly_once import assert_exactly_once, replay
    from lakeckpt.testing.strategies import histories, topologies


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'lakeckpt.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
