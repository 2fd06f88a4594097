"""The law as a call: `assert_exactly_once` for users' own datasets, transforms and loaders, and what it is made of.

Names load when first used, so that the pytest plugin, which lives in this package, costs a test suite nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "Attempt": "lakeckpt.testing.attempts",
    "LakeSpec": "lakeckpt.testing.lakes",
    "Topology": "lakeckpt.testing.attempts",
    "assert_exactly_once": "lakeckpt.testing.exactly_once",
    "histories": "lakeckpt.testing.strategies",
    "replay": "lakeckpt.testing.exactly_once",
    "tables": "lakeckpt.testing.strategies",
    "topologies": "lakeckpt.testing.strategies",
}

__all__ = [
    "Attempt",
    "LakeSpec",
    "Topology",
    "assert_exactly_once",
    "histories",
    "replay",
    "tables",
    "topologies",
]

if TYPE_CHECKING:
    from lakeckpt.testing.attempts import Attempt, Topology
    from lakeckpt.testing.exactly_once import assert_exactly_once, replay
    from lakeckpt.testing.lakes import LakeSpec
    from lakeckpt.testing.strategies import histories, tables, topologies


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'lakeckpt.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
