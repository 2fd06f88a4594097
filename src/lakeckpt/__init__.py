"""lakeckpt: resume the training of large models on a data lake, exactly.

The public names load when first used, so that ``import lakeckpt`` and the commit path never pull in torch.

::

    table → [lake/] → [reading/] → [data/]: batches → training loop → [checkpoint/]: cuts, commits, the proof
                                      ^                                    |
                                   [core/]: the order of rows          [tracking/]: what all ranks agree on
                                                                           |
                                    [watch/]: where ranks are →        [recovery/]: which cut to go on from
    what lasts is written by [wire/]. [errors]: all errors. [counters] → [metrics/]. [progress]: long work is shown.

    commands: [cli/], [demo/]. Public modules: [convert], [dcp], [bubbles], [testing/], [integrations/].
    [versions]: the libraries that are installed fit. [cached]: values that are computed once, also beside a fork.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lakeckpt.versions import check_versions

check_versions()

__version__ = "0.1.0"

_PUBLIC = {
    "Backup": "lakeckpt.checkpoint.copying.backups",
    "Batch": "lakeckpt.data.base.batch",
    "CheckpointInfo": "lakeckpt.checkpoint.format.manifest",
    "CheckpointManager": "lakeckpt.checkpoint.manager",
    "Follow": "lakeckpt.data.base.options",
    "Keep": "lakeckpt.checkpoint.format.keep",
    "MixedReceipt": "lakeckpt.core.streams.mixed_batches",
    "ConsumptionWarning": "lakeckpt.data.position.deliveries",
    "LakeDataset": "lakeckpt.data.dataset.dataset",
    "LakeLoader": "lakeckpt.data.loader.loader",
    "Ragged": "lakeckpt.reading.columns.ragged",
    "ReadOptions": "lakeckpt.data.base.options",
    "ReadAheadWarning": "lakeckpt.data.position.deliveries",
    "Receipt": "lakeckpt.core.receipts",
    "RestoreReport": "lakeckpt.checkpoint.restore.report",
    "SaveHandle": "lakeckpt.checkpoint.report",
    "Table": "lakeckpt.lake.table.table",
    "TransformContext": "lakeckpt.data.base.transform",
    "cumulative_lengths": "lakeckpt.data.streams.pack",
    "errors": "lakeckpt.errors",
    "load": "lakeckpt.checkpoint.load",
    "merge_states": "lakeckpt.core.merge",
    "mix": "lakeckpt.data.streams.mix",
    "open_table": "lakeckpt.lake.formats.dispatch",
    "pack": "lakeckpt.data.streams.pack",
    "prefetch": "lakeckpt.data.loader.device_prefetch",
}

_MODULES = ("bubbles", "convert", "dcp", "metrics", "testing")
"""Public modules, which need no import of their own."""

__all__ = [
    "Backup",
    "Batch",
    "CheckpointInfo",
    "CheckpointManager",
    "ConsumptionWarning",
    "Follow",
    "Keep",
    "LakeDataset",
    "LakeLoader",
    "MixedReceipt",
    "Ragged",
    "ReadAheadWarning",
    "ReadOptions",
    "Receipt",
    "RestoreReport",
    "SaveHandle",
    "Table",
    "TransformContext",
    "__version__",
    "cumulative_lengths",
    "errors",
    "load",
    "merge_states",
    "mix",
    "open_table",
    "pack",
    "prefetch",
]

if TYPE_CHECKING:
    from lakeckpt import errors
    from lakeckpt.checkpoint.copying.backups import Backup
    from lakeckpt.checkpoint.format.keep import Keep
    from lakeckpt.checkpoint.format.manifest import CheckpointInfo
    from lakeckpt.checkpoint.load import load
    from lakeckpt.checkpoint.manager import CheckpointManager
    from lakeckpt.checkpoint.report import SaveHandle
    from lakeckpt.checkpoint.restore.report import RestoreReport
    from lakeckpt.core.merge import merge_states
    from lakeckpt.core.receipts import Receipt
    from lakeckpt.core.streams.mixed_batches import MixedReceipt
    from lakeckpt.data.base.batch import Batch
    from lakeckpt.data.base.options import Follow, ReadOptions
    from lakeckpt.data.base.transform import TransformContext
    from lakeckpt.data.dataset.dataset import LakeDataset
    from lakeckpt.data.loader.device_prefetch import prefetch
    from lakeckpt.data.loader.loader import LakeLoader
    from lakeckpt.data.position.deliveries import ConsumptionWarning, ReadAheadWarning
    from lakeckpt.data.streams.mix import mix
    from lakeckpt.data.streams.pack import cumulative_lengths, pack
    from lakeckpt.lake.formats.dispatch import open_table
    from lakeckpt.lake.table.table import Table
    from lakeckpt.reading.columns.ragged import Ragged


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None and name not in _MODULES:
        raise AttributeError(f"module 'lakeckpt' has no attribute {name!r}")
    value = importlib.import_module(module or f"lakeckpt.{name}")
    value = value if module is None or name == "errors" else getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
