"""This module reads and writes checkpoints in the formats of others: files of ``torch.save``, safetensors."""

from __future__ import annotations

from lakeckpt.checkpoint.interop.convert import Converted, convert_checkpoint, read_state

__all__ = ["Converted", "convert_checkpoint", "read_state"]
