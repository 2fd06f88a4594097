"""lakeckpt: resume the training of large models on a data lake, exactly.

The public names load when first used, so that ``import lakeckpt`` and the commit path never pull in torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Batch": "lakeckpt.data.batch",
    "Bubbles": "lakeckpt.checkpoint.bubbles.watch",
    "CheckpointManager": "lakeckpt.checkpoint.manager",
    "Keep": "lakeckpt.checkpoint.keep",
    "ConsumptionWarning": "lakeckpt.data.deliveries",
    "KeptVersion": "lakeckpt.lake.keep",
    "LakeDataset": "lakeckpt.data.dataset",
    "LakeLoadPlanner": "lakeckpt.checkpoint.dcp.planners",
    "LakeLoader": "lakeckpt.data.loader",
    "LakeSavePlanner": "lakeckpt.checkpoint.dcp.planners",
    "LakeStorageReader": "lakeckpt.checkpoint.dcp.reader",
    "LakeStorageWriter": "lakeckpt.checkpoint.dcp.writer",
    "PerRank": "lakeckpt.checkpoint.dcp.value",
    "Ragged": "lakeckpt.reading.ragged",
    "ReadAheadWarning": "lakeckpt.data.deliveries",
    "Receipt": "lakeckpt.core.receipts",
    "SkipList": "lakeckpt.core.skips",
    "SkipWarning": "lakeckpt.data.skip_warning",
    "Table": "lakeckpt.lake.table",
    "TransformContext": "lakeckpt.data.transform",
    "convert_checkpoint": "lakeckpt.checkpoint.foreign.convert",
    "convert_state": "lakeckpt.data.convert_state",
    "errors": "lakeckpt.errors",
    "keep_version": "lakeckpt.lake.keep",
    "load": "lakeckpt.checkpoint.load_objects",
    "merge_states": "lakeckpt.tracking.merge",
    "open_table": "lakeckpt.lake.table",
    "prefetch": "lakeckpt.data.prefetch",
    "read_state": "lakeckpt.checkpoint.foreign.convert",
    "record_digests": "lakeckpt.reading.record_digests",
}

__all__ = [
    "Batch",
    "Bubbles",
    "CheckpointManager",
    "ConsumptionWarning",
    "Keep",
    "KeptVersion",
    "LakeDataset",
    "LakeLoadPlanner",
    "LakeLoader",
    "LakeSavePlanner",
    "LakeStorageReader",
    "LakeStorageWriter",
    "PerRank",
    "Ragged",
    "ReadAheadWarning",
    "Receipt",
    "SkipList",
    "SkipWarning",
    "Table",
    "TransformContext",
    "__version__",
    "convert_checkpoint",
    "convert_state",
    "errors",
    "keep_version",
    "load",
    "merge_states",
    "open_table",
    "prefetch",
    "read_state",
    "record_digests",
]

if TYPE_CHECKING:
    from lakeckpt import errors
    from lakeckpt.checkpoint.bubbles.watch import Bubbles
    from lakeckpt.checkpoint.dcp.planners import LakeLoadPlanner, LakeSavePlanner
    from lakeckpt.checkpoint.dcp.reader import LakeStorageReader
    from lakeckpt.checkpoint.dcp.value import PerRank
    from lakeckpt.checkpoint.dcp.writer import LakeStorageWriter
    from lakeckpt.checkpoint.foreign.convert import convert_checkpoint, read_state
    from lakeckpt.checkpoint.keep import Keep
    from lakeckpt.checkpoint.load_objects import load
    from lakeckpt.checkpoint.manager import CheckpointManager
    from lakeckpt.core.receipts import Receipt
    from lakeckpt.core.skips import SkipList
    from lakeckpt.data.batch import Batch
    from lakeckpt.data.convert_state import convert_state
    from lakeckpt.data.dataset import LakeDataset
    from lakeckpt.data.deliveries import ConsumptionWarning, ReadAheadWarning
    from lakeckpt.data.loader import LakeLoader
    from lakeckpt.data.prefetch import prefetch
    from lakeckpt.data.skip_warning import SkipWarning
    from lakeckpt.data.transform import TransformContext
    from lakeckpt.lake.keep import KeptVersion, keep_version
    from lakeckpt.lake.table import Table, open_table
    from lakeckpt.reading.ragged import Ragged
    from lakeckpt.reading.record_digests import record_digests
    from lakeckpt.tracking.merge import merge_states


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'lakeckpt' has no attribute {name!r}")
    value = importlib.import_module(module)
    value = value if name == "errors" else getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
