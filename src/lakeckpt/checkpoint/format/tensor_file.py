"""This module lays tensors out in files that every reader of safetensors understands.

A file has 8 bytes (the length of the head, little-endian), the head (JSON, padded with spaces to a multiple of 8), and
the bytes of the tensors, back to back. Larger elements come first, so that each tensor is aligned. Large tensors whose
sizes are whole pages come before all others and begin at whole pages, so that direct I/O can write them from memory.
`layout` computes the file before a byte is written, so that it streams into any store. lakeckpt never parses a head:
the record of a part names the place of each slab.

The module never touches storage and never holds tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lakeckpt.checkpoint.format.dtypes import CODE_BYTES, TensorSpec
from lakeckpt.lake.storage.direct import PAGE_BYTES, STRAIGHT_BYTES

__all__ = ["FileLayout", "layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """A whole file: its first bytes (length and head), and the place of each tensor."""

    head: bytes
    starts: Mapping[str, int]
    """Key → the offset of the tensor's first byte in the file, in the order of the bytes."""
    size_bytes: int


def layout(specs: Iterable[TensorSpec]) -> FileLayout:
    """Return the layout of a file that holds ``specs``. Keys must be distinct, and not ``__metadata__``."""
    ordered = sorted(specs, key=_rank)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "lakeckpt": "1"}}
    offsets: dict[str, int] = {}
    at = 0
    for spec in ordered:
        assert spec.key not in entries, f"{spec.key!r} twice in one file"
        offsets[spec.key] = at
        stop = at + spec.size_bytes
        entries[spec.key] = {"dtype": spec.code, "shape": list(spec.stored_shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    has_large = any(spec.size_bytes >= STRAIGHT_BYTES for spec in ordered)
    text += b" " * (-(8 + len(text)) % (PAGE_BYTES if has_large else 8))
    head = len(text).to_bytes(8, "little") + text
    starts = {key: len(head) + offset for key, offset in offsets.items()}
    return FileLayout(head=head, starts=starts, size_bytes=len(head) + at)


def _rank(spec: TensorSpec) -> tuple[bool, int, int, str]:
    """Return the sort key of a tensor in its file: whole pages first, then larger elements, then larger tensors."""
    is_large = spec.size_bytes >= STRAIGHT_BYTES
    is_pages = is_large and spec.size_bytes % PAGE_BYTES == 0
    return not is_pages, -CODE_BYTES[spec.code], -spec.size_bytes if is_large else 0, spec.key
