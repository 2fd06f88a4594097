"""What does a checkpoint of torch's own DCP hold, and where?  Its ``.metadata``, a pickle that is described, never run.

`read_dcp_metadata` recognises the few classes of ``torch.distributed.checkpoint.metadata`` in the description of the
pickle, by their names, and takes their fields. Every place, shape and size is checked before a byte is read from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.foreign.pickles import Call, Name, describe
from lakeckpt.checkpoint.foreign.plain import plain
from lakeckpt.checkpoint.tiling import untiled
from lakeckpt.errors import UnsupportedValue, WireDamaged

__all__ = ["METADATA", "DcpChunk", "DcpMetadata", "DcpTensor", "read_dcp_metadata"]

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpChunk:
    """Where a file of ``torch.save`` lies, in an object: a chunk of a tensor, or a value (no offsets and sizes)."""

    path: str
    start: int
    size_bytes: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpTensor:
    """A tensor and its chunks, which tile it."""

    spec: TensorSpec
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """What is there, by the flat names that DCP gives."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpChunk]
    paths: Mapping[str, Path]
    """flat name → where it stands in the nested state; names that are not here stand at the top."""


def read_dcp_metadata(data: bytes) -> DcpMetadata:
    """The metadata. `WireDamaged` where it is not as torch writes it, `UnsupportedValue` for what cannot be read."""
    fields = _fields(describe(data), "Metadata")
    reader = _Reader(len(data))
    stored = {}
    for index, place in _mapping(fields.get("storage_data"), "storage_data").items():
        of = _fields(index, "MetadataIndex")
        offset = None if of.get("offset") is None else reader.sizes(of["offset"])
        stored[_text(of.get("fqn")), offset] = _place(place)
    tensors, values = {}, {}
    for name, found in _mapping(fields.get("state_dict_metadata"), "state_dict_metadata").items():
        if _class_of(found) == f"{_MODULE}.BytesStorageMetadata":
            values[_text(name)] = _stored(stored, name, None)
        else:
            tensors[_text(name)] = reader.tensor(_text(name), found, stored)
    paths = {}
    if isinstance(fields.get("planner_data"), dict):
        for name, path in fields["planner_data"].items():
            paths[_text(name)] = _path(path)
    return DcpMetadata(tensors=tensors, values=values, paths=paths)


_Stored = Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]


class _Reader:
    __slots__ = ("size_bytes",)

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def sizes(self, described: Any) -> tuple[int, ...]:
        found = plain(described, size_bytes=self.size_bytes, what=METADATA)
        if not isinstance(found, tuple) or not all(type(one) is int and 0 <= one < 2**62 for one in found):
            raise WireDamaged(f"sizes are a torch.Size, got a {type(found).__name__}")
        return tuple(found)

    def tensor(self, name: str, described: Any, stored: _Stored) -> DcpTensor:
        fields = _fields(described, "TensorStorageMetadata")
        state = _state(fields.get("properties"), "TensorProperties")
        dtype = state.get("dtype") if isinstance(state, dict) else state[0] if type(state) is tuple and state else None
        found = plain(dtype, size_bytes=self.size_bytes, what=METADATA)
        if not isinstance(found, torch.dtype):
            raise WireDamaged(f"tensor {name!r:.80} has no dtype")
        spec = TensorSpec(key=name, dtype=str(found).removeprefix("torch."), shape=self.sizes(fields.get("size")))
        chunks = fields.get("chunks")
        if type(chunks) is not list:
            raise WireDamaged(f"tensor {name!r:.80} has no chunks")
        found = tuple(self.chunk(spec, one, stored) for one in chunks)
        wrong = untiled(spec.shape, [(one.offsets, one.sizes) for one in found])
        if wrong is not None:
            raise WireDamaged(f"tensor {spec.key!r:.80}: {wrong}")
        return DcpTensor(spec=spec, chunks=found)

    def chunk(self, spec: TensorSpec, described: Any, stored: _Stored) -> DcpChunk:
        fields = _fields(described, "ChunkStorageMetadata")
        offsets, sizes = self.sizes(fields.get("offsets")), self.sizes(fields.get("sizes"))
        at = _stored(stored, spec.key, offsets)
        size_bytes = TensorSpec(key=spec.key, dtype=spec.dtype, shape=sizes).size_bytes
        if size_bytes > at.size_bytes:
            raise WireDamaged(f"a chunk of {spec.key!r:.80} has {size_bytes} bytes and lies in {at.size_bytes}")
        return DcpChunk(path=at.path, start=at.start, size_bytes=at.size_bytes, offsets=offsets, sizes=sizes)


def _stored(stored: _Stored, name: Any, offset: tuple[int, ...] | None) -> DcpChunk:
    found = stored.get((name, offset)) or stored.get((name, None if offset else ()))
    if found is None:
        raise WireDamaged(f"it is not said where {name!r:.80} at {offset} lies")
    path, start, size_bytes = found
    return DcpChunk(path=path, start=start, size_bytes=size_bytes)


def _place(described: Any) -> tuple[str, int, int]:
    fields = _fields(described, "_StorageInfo", _STORAGE)
    if fields.get("transform_descriptors"):
        raise UnsupportedValue("this checkpoint went through transforms (compression) as it was written: save it plain")
    found: list[Any] = [fields.get(name) for name in ("relative_path", "offset", "length")]
    if [type(one) for one in found] != [str, int, int] or not all(0 <= one < 2**62 for one in found[1:]):
        raise WireDamaged("where something lies is not told by a path, an offset and a length")
    return found[0], found[1], found[2]


def _path(described: Any) -> Path:
    if type(described) is not tuple or not all(type(one) in (str, int) for one in described) or not described:
        raise WireDamaged("where a name stands in the state is told by a tuple of names and numbers")
    return described


def _class_of(described: Any) -> str:
    if not isinstance(described, Call):
        return type(described).__name__
    made = described.function
    if (
        str(made) in ("copyreg._reconstructor", "copy_reg._reconstructor")
        and described.arguments
        and isinstance(described.arguments[0], Name)
    ):
        made = described.arguments[0]
    return str(made)


def _state(described: Any, name: str, module: str = _MODULE) -> Any:
    if _class_of(described) != f"{module}.{name}":
        raise WireDamaged(f"expected a {module}.{name}, found a {_class_of(described)}")
    return described.states[-1] if described.states else {}


def _fields(described: Any, name: str, module: str = _MODULE) -> Mapping[Any, Any]:
    found = _state(described, name, module)
    if type(found) is tuple and len(found) == 2 and isinstance(found[0] or {}, dict):  # (its __dict__, its slots)
        found = (found[0] or {}) | (found[1] or {})
    return _mapping(found, name)


def _mapping(found: Any, what: str) -> Mapping[Any, Any]:
    if type(found) is not dict:
        raise WireDamaged(f"{what} is a {type(found).__name__}, not a mapping")
    return found


def _text(found: Any) -> str:
    if type(found) is not str:
        raise WireDamaged(f"a name is a {type(found).__name__}, not a text")
    return found
