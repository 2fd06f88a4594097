"""This module gives ``torch.distributed.checkpoint`` (DCP) a reader for checkpoints of a run."""

from __future__ import annotations

from lakeckpt.checkpoint.interop.run_reader import RunReader

__all__ = ["RunReader"]
