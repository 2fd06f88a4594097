"""The law as a call: `assert_exactly_once` for users' own datasets, transforms and loaders, and what it is made of.

Names load when first used, so that the pytest plugin, which lives in this package, costs a test suite nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "At": "lakeckpt.testing.fault_proxy",
    "Attempt": "lakeckpt.testing.attempts",
    "Fault": "lakeckpt.testing.storage",
    "FaultProxy": "lakeckpt.testing.fault_proxy",
    "FaultyStorage": "lakeckpt.testing.storage",
    "HttpFault": "lakeckpt.testing.fault_proxy",
    "Killed": "lakeckpt.testing.storage",
    "LakeSpec": "lakeckpt.testing.lakes",
    "StorageLaw": "lakeckpt.testing.storage_law",
    "Topology": "lakeckpt.testing.attempts",
    "Where": "lakeckpt.testing.fault_proxy",
    "assert_exactly_once": "lakeckpt.testing.exactly_once",
    "histories": "lakeckpt.testing.strategies",
    "replay": "lakeckpt.testing.exactly_once",
    "tables": "lakeckpt.testing.strategies",
    "topologies": "lakeckpt.testing.strategies",
}

__all__ = [
    "At",
    "Attempt",
    "Fault",
    "FaultProxy",
    "FaultyStorage",
    "HttpFault",
    "Killed",
    "LakeSpec",
    "StorageLaw",
    "Topology",
    "Where",
    "assert_exactly_once",
    "histories",
    "replay",
    "tables",
    "topologies",
]

if TYPE_CHECKING:
    from lakeckpt.testing.attempts import Attempt, Topology
    from lakeckpt.testing.exactly_once import assert_exactly_once, replay
    from lakeckpt.testing.fault_proxy import At, FaultProxy, HttpFault, Where
    from lakeckpt.testing.lakes import LakeSpec
    from lakeckpt.testing.storage import Fault, FaultyStorage, Killed
    from lakeckpt.testing.storage_law import StorageLaw
    from lakeckpt.testing.strategies import histories, tables, topologies


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'lakeckpt.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
