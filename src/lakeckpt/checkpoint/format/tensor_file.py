"""This module lays tensors out in files that every reader of safetensors understands, and parses such files.

A file has 8 bytes (the length of the head, little-endian), the head (JSON, padded with spaces to a multiple of 8), and
the bytes of the tensors, back to back. Larger elements come first, so that each tensor is aligned. Large tensors whose
sizes are whole pages come before all others and begin at whole pages, so that direct I/O can write them from memory.
`layout` computes the file before a byte is written, so that it streams into any store. `parse_head` refuses a head
unless its tensors are of known dtypes, have the right sizes, and tile the file exactly.

The module never touches storage and never holds tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from lakeckpt.checkpoint.format.dtypes import CODE_BYTES, TensorSpec
from lakeckpt.errors import CheckpointDamaged
from lakeckpt.lake.storage.direct import PAGE_BYTES, STRAIGHT_BYTES

__all__ = ["FileLayout", "Slab", "layout", "parse_head", "read_head_length"]

HEAD_LIMIT_BYTES = 100_000_000
"""The longest head that safetensors readers accept."""

_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A tensor's place in a file: its safetensors code and stored shape, and its bytes [start, stop) of the file."""

    key: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """A whole file: its first bytes (length and head), and the slabs in the order of their bytes."""

    head: bytes
    slabs: tuple[Slab, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self.slabs[-1].stop if self.slabs else len(self.head)


def layout(specs: Iterable[TensorSpec]) -> FileLayout:
    """Return the layout of a file that holds ``specs``. Keys must be distinct, and not ``__metadata__``."""
    ordered = sorted(specs, key=_rank)
    entries: dict[str, Any] = {_METADATA: {"format": "pt", "lakeckpt": "1"}}
    at = 0
    for spec in ordered:
        assert spec.key not in entries, f"{spec.key!r} twice in one file"
        offsets = [at, at + spec.size_bytes]
        entries[spec.key] = {"dtype": spec.code, "shape": list(spec.stored_shape), "data_offsets": offsets}
        at += spec.size_bytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    has_large = any(spec.size_bytes >= STRAIGHT_BYTES for spec in ordered)
    text += b" " * (-(8 + len(text)) % (PAGE_BYTES if has_large else 8))
    head = len(text).to_bytes(8, "little") + text
    slabs, start = [], len(head)
    for spec in ordered:
        stop = start + spec.size_bytes
        slabs.append(Slab(key=spec.key, code=spec.code, shape=spec.stored_shape, start=start, stop=stop))
        start = stop
    return FileLayout(head=head, slabs=tuple(slabs))


def _rank(spec: TensorSpec) -> tuple[bool, int, int, str]:
    """Return the sort key of a tensor in its file: whole pages first, then larger elements, then larger tensors."""
    is_large = spec.size_bytes >= STRAIGHT_BYTES
    is_pages = is_large and spec.size_bytes % PAGE_BYTES == 0
    return not is_pages, -CODE_BYTES[spec.code], -spec.size_bytes if is_large else 0, spec.key


def read_head_length(first: bytes, *, path: str) -> int:
    """Return the length of the head, including its own 8 bytes of length, from the first 8 bytes of a file."""
    if len(first) < 8:
        raise CheckpointDamaged(f"{path}: {len(first)} bytes are less than the start of a safetensors file")
    length = int.from_bytes(first[:8], "little")
    if length > HEAD_LIMIT_BYTES:
        raise CheckpointDamaged(f"{path}: its head claims {length} bytes, more than the {HEAD_LIMIT_BYTES} allowed")
    return 8 + length


def parse_head(head: bytes, *, path: str, size_bytes: int) -> FileLayout:
    """Return the layout that ``head`` (length included) describes, for a file of ``size_bytes``.

    Raises `CheckpointDamaged` for anything but a JSON object of known dtypes and sizes whose slabs tile the rest of the
    file without gap or overlap; duplicate names and deep nesting are refused, too.
    """
    if read_head_length(head, path=path) != len(head):
        raise CheckpointDamaged(f"{path}: its head has {len(head) - 8} bytes and does not say so")
    try:
        entries = json.loads(head[8:].decode("utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path}: its head is not a JSON object with distinct names: {error}") from None
    if not isinstance(entries, dict):
        raise CheckpointDamaged(f"{path}: its head is a JSON {type(entries).__name__}, not an object")
    entries.pop(_METADATA, None)
    slabs = sorted(
        (_slab(key, entry, len(head), path) for key, entry in entries.items()),
        key=lambda slab: (slab.start, slab.stop),
    )
    at = len(head)
    for slab in slabs:
        if slab.start != at:
            raise CheckpointDamaged(f"{path}: tensor {slab.key!r} starts at byte {slab.start}, expected {at}")
        at = slab.stop
    if at != size_bytes:
        raise CheckpointDamaged(f"{path}: its head describes {at} bytes and it has {size_bytes}")
    return FileLayout(head=head, slabs=tuple(slabs))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _slab(key: str, entry: object, head_bytes: int, path: str) -> Slab:
    if not isinstance(entry, Mapping) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointDamaged(f"{path}: tensor {key!r} is not described by dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or not isinstance(code, str):
        raise CheckpointDamaged(f"{path}: tensor {key!r} has a malformed description")
    if code not in CODE_BYTES:
        raise CheckpointDamaged(f"{path}: tensor {key!r} has the dtype {code!r:.40}, which lakeckpt never writes")
    start, stop = offsets
    if stop - start != prod(shape) * CODE_BYTES[code]:
        raise CheckpointDamaged(f"{path}: tensor {key!r} has {stop - start} bytes, not those of {code} {shape}")
    return Slab(key=key, code=code, shape=tuple(shape), start=head_bytes + start, stop=head_bytes + stop)


def _sizes(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(type(x) is int and 0 <= x < 2**62 for x in value)
