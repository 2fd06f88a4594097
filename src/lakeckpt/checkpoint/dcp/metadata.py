"""What does a checkpoint of DCP hold, and where?  The document that makes it one, in place of torch's pickle.

``checkpoint.lkc`` is put last, in one piece: without it there is no checkpoint in the folder. It names every tensor
with its dtype, shape and chunks, every value, and for each of them the object in which its bytes lie, where, how
many, and their digest. Objects have names that are never used twice, so that a document always fits the objects that
it names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lakeckpt.checkpoint.digests import DIGEST_BYTES
from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.fields import confined, fields_of, taken
from lakeckpt.errors import UnsupportedValue, WireDamaged
from lakeckpt.wire.codec import Limits, dumps, loads

__all__ = [
    "CHECKPOINT",
    "DATA",
    "Places",
    "Stored",
    "StoredFile",
    "data_name",
    "is_data_name",
    "metadata_from_bytes",
    "metadata_to_bytes",
]

CHECKPOINT = "checkpoint.lkc"
DATA = "data"
_KIND, _VERSION = "dcp-checkpoint", (1, 0)
_LIMITS = Limits(total_bytes=2**30, items=64_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where the bytes of a chunk or a value lie: bytes [start, start + size_bytes) of the object ``path``."""

    path: str
    start: int
    size_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """An object: its size, and the digest of its first ``head_bytes`` bytes, which say what lies in it."""

    size_bytes: int
    head_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What the metadata's ``storage_data`` is: where each chunk and value lies, and the objects by path."""

    stored: Mapping[MetadataIndex, Stored]
    files: Mapping[str, StoredFile]


def data_name(token: str, number: int) -> str:
    """How object ``number`` of what one rank writes is called in `DATA`. ``token``: 16 hexadecimal digits."""
    return f"{token}-{number:04d}.safetensors"


def is_data_name(name: str) -> bool:
    """Whether `data_name` may have made it."""
    return re.fullmatch(r"[0-9a-f]{16}-[0-9]{4,}\.safetensors", name) is not None


def metadata_to_bytes(metadata: Metadata) -> bytes:
    """The document. `UnsupportedValue` where a planner gave what only a pickle could hold."""
    tensors, values = {}, []
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, BytesStorageMetadata):
            values.append(name)
            continue
        spec = TensorSpec(key=name, dtype=_name_of(found.properties.dtype), shape=tuple(found.size))
        chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in found.chunks]
        tensors[name] = [spec.dtype, list(spec.shape), chunks]
    stored = [
        [index.fqn, _list(index.offset), one.path, one.start, one.size_bytes, one.digest]
        for index, one in metadata.storage_data.stored.items()
    ]
    files = {path: [one.size_bytes, one.head_bytes, one.digest] for path, one in metadata.storage_data.files.items()}
    value = {
        "tensors": tensors,
        "values": values,
        "stored": stored,
        "files": files,
        "planner": metadata.planner_data,
    }
    return dumps(value, kind=_KIND, version=_VERSION, limits=_LIMITS, root="metadata")


def metadata_from_bytes(data: bytes) -> Metadata:
    """The metadata that a document holds. `WireError`."""
    plain = fields_of(loads(data, kind=_KIND, supported=_VERSION, limits=_LIMITS).value, "a checkpoint")
    found: dict[str, Any] = {}
    for name, row in taken(plain, "tensors", dict).items():
        if type(row) is not list or [type(one) for one in row] != [str, list, list]:
            raise WireDamaged(f"tensor {name!r} is described by {row!r:.80}")
        spec = TensorSpec(key=str(name), dtype=row[0], shape=_sizes(row[1]))
        chunks = [_chunk(chunk, spec) for chunk in row[2]]
        properties = TensorProperties(dtype=_dtype_of(spec))
        found[spec.key] = TensorStorageMetadata(properties=properties, size=torch.Size(spec.shape), chunks=chunks)
    for name in taken(plain, "values", list):
        found[str(name)] = BytesStorageMetadata()
    return Metadata(
        state_dict_metadata=found,
        planner_data=plain.get("planner"),
        storage_data=Places(
            stored=dict(_stored(row) for row in taken(plain, "stored", list)),
            files=dict(_file(*one) for one in taken(plain, "files", dict).items()),
        ),
    )


def _chunk(row: object, spec: TensorSpec) -> ChunkStorageMetadata:
    if type(row) is not list or len(row) != 2:
        raise WireDamaged(f"a chunk of {spec.key!r} is described by {row!r:.80}")
    offsets, sizes = _sizes(row[0]), _sizes(row[1])
    fits = len(offsets) == len(sizes) == len(spec.shape)
    if not fits or any(at + size > whole for at, size, whole in zip(offsets, sizes, spec.shape, strict=True)):
        raise WireDamaged(f"a chunk of {spec.key!r} at {offsets} of {sizes} is not inside of {spec.shape}")
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def _stored(row: object) -> tuple[MetadataIndex, Stored]:
    if type(row) is not list or len(row) != 6 or [type(one) for one in row[2:]] != [str, int, int, bytes]:
        raise WireDamaged(f"what is stored is described by {row!r:.80}")
    name, offset, path, start, size_bytes, digest = row
    if not isinstance(name, str) or start < 0 or size_bytes < 0 or len(digest) != DIGEST_BYTES:
        raise WireDamaged(f"what is stored of {name!r:.80} is described by {row!r:.80}")
    index = MetadataIndex(name, None if offset is None else torch.Size(_sizes(offset)))
    return index, Stored(path=confined(path, below=DATA), start=start, size_bytes=size_bytes, digest=digest)


def _file(path: object, row: object) -> tuple[str, StoredFile]:
    if type(row) is not list or [type(one) for one in row] != [int, int, bytes] or len(row[2]) != DIGEST_BYTES:
        raise WireDamaged(f"the object {path!r:.80} is described by {row!r:.80}")
    if not 0 <= row[1] <= row[0] < 2**62:
        raise WireDamaged(f"the object {path!r:.80} has {row[0]} bytes, of which {row[1]} are its head")
    return confined(path, below=DATA), StoredFile(size_bytes=row[0], head_bytes=row[1], digest=row[2])


def _list(offset: torch.Size | None) -> list[int] | None:
    return None if offset is None else list(offset)


def _sizes(value: object) -> tuple[int, ...]:
    if type(value) is not list or not all(type(one) is int and 0 <= one < 2**62 for one in value):
        raise WireDamaged(f"{value!r:.80} are no sizes")
    return tuple(value)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedValue(
            f"tensor {spec.key!r}: this torch has no dtype {spec.dtype!r}: use the one that saved it"
        )
    return dtype
