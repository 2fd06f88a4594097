"""How are tensors read from and written as plain safetensors?  One file, or several with an index, as model hubs have.

Heads are parsed strictly (``tensor_file``): what is not tiled, not known or too large is refused before a byte of a
tensor is read. Tensors are read in ranges, several at once, straight into their own memory. Only tensors can be kept
so: what else a state holds is named and refused. Files are written first, the index last. Threads are started and
joined inside each call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.fetch import read_object
from lakeckpt.checkpoint.tensor_file import HEAD_LIMIT_BYTES, Slab, layout, parse_head, read_head_length
from lakeckpt.checkpoint.tensors import empty_for, host_bytes, on_host, spec_of
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, SaveFailed, UnsupportedValue
from lakeckpt.lake.storage import Storage, describe

__all__ = ["FILE", "INDEX", "SAFETENSORS", "is_safetensors", "read_safetensors", "tensors_of", "write_safetensors"]

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SAFETENSORS = ".safetensors"
"""How files of safetensors are called."""
FILE_BYTES = 5 * 10**9
_READ_THREADS = 4
_SPAN_BYTES = 32 * 2**20
_SHARDED = b'"DCP_SHARDING_INFO"'
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "C64": "complex64",
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_BITS = {
    **{code: 8 * TensorSpec(key="", dtype=dtype, shape=()).size_bytes for code, dtype in _DTYPES.items()},
    "F4": 4,  # torch has two of them in an element, along the last dimension
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Of an element, of every code that safetensors have."""


def is_safetensors(path: str) -> bool:
    """Whether it is called as a file of safetensors, and lies in the folder itself: what lies deeper is another's."""
    return "/" not in path and path.endswith(SAFETENSORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    path: str
    slab: Slab


def read_safetensors(storage: Storage, file: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors of ``file``, or of all files of safetensors in the folder itself, by name.

    Raises `CheckpointNotFound`, `CheckpointDamaged` naming the object, and `UnsupportedValue` for files that hold parts
    of tensors.
    """
    sizes = {one.path: one.size_bytes for one in storage.list() if is_safetensors(one.path)}
    if file is not None:
        sizes = {path: size for path, size in sizes.items() if path == file}
    if not sizes:
        raise CheckpointNotFound(f"there is no {file or f'file named *{SAFETENSORS}'} in {describe(storage)!r}")
    places: dict[str, _Place] = {}
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-foreign") as pool:
        for path, slabs in zip(sizes, pool.map(lambda path: _slabs(storage, path, sizes[path]), sizes), strict=True):
            for slab in slabs:
                if slab.key in places:
                    raise CheckpointDamaged(f"{path} and {places[slab.key].path} both hold a tensor {slab.key!r}")
                places[slab.key] = _Place(path=path, slab=slab)
        _check_index(storage, places) if file is None else None
        jobs = {key: pool.submit(_tensor, storage, place) for key, place in places.items()}
        return {key: job.result() for key, job in jobs.items()}


def _slabs(storage: Storage, path: str, size_bytes: int) -> tuple[Slab, ...]:
    length = read_head_length(read_object(storage, path, 0, 8), path=path)
    if length > size_bytes:
        raise CheckpointDamaged(f"{path}: its head claims {length} bytes and it has {size_bytes}")
    head = read_object(storage, path, 0, length)
    if _SHARDED in head:
        raise UnsupportedValue(
            f"{path}: it holds parts of tensors (written by DCP on several ranks): consolidate it first"
        )
    slabs = parse_head(head, path=path, size_bytes=size_bytes, bits=_BITS).slabs
    for slab in slabs:
        what = f"{path}: tensor {slab.key!r} is {slab.code} {list(slab.shape)}"
        if slab.code not in _DTYPES or not hasattr(torch, _DTYPES[slab.code]):
            raise UnsupportedValue(f"{what}: torch {torch.__version__} has no such dtype")
        if slab.code == "F4" and (not slab.shape or slab.shape[-1] % 2):
            raise UnsupportedValue(f"{what}: torch has pairs of them alone, along the last dimension")
    return slabs


def _check_index(storage: Storage, places: Mapping[str, _Place]) -> None:
    """What an index names must be there: a file that is missing would pass for fewer tensors."""
    for info in storage.list():
        if "/" in info.path or not info.path.endswith(f"{SAFETENSORS}.index.json"):
            continue
        try:
            named = json.loads(read_object(storage, info.path, 0, HEAD_LIMIT_BYTES))["weight_map"]
            missing = sorted(set(named) - set(places))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointDamaged(f"{info.path}: this is no index of safetensors: {error!r:.200}") from None
        if missing:
            raise CheckpointDamaged(
                f"{info.path} names {missing[0]!r:.120}, which no file holds ({len(missing)} in all)"
            )


def _tensor(storage: Storage, place: _Place) -> torch.Tensor:
    slab = place.slab
    shape = slab.shape if slab.code != "F4" else (*slab.shape[:-1], slab.shape[-1] // 2)
    tensor, view = empty_for(TensorSpec(key=slab.key, dtype=_DTYPES[slab.code], shape=shape))
    for at in range(0, len(view), _SPAN_BYTES):
        stop = min(at + _SPAN_BYTES, len(view))
        data = read_object(storage, place.path, slab.start + at, slab.start + stop)
        if len(data) != stop - at:
            raise CheckpointDamaged(f"{place.path}: it ends inside of the tensor {slab.key!r}")
        view[at:stop] = data
    return tensor


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a nested state, by their names joined with dots; `UnsupportedValue` listing all that is none."""
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    for name, leaf in _leaves(state, ()):
        if not isinstance(leaf, torch.Tensor):
            others.append(f"{name} ({type(leaf).__name__})")
        elif name in tensors:
            raise UnsupportedValue(f"two tensors would be called {name!r} in safetensors")
        else:
            tensors[name] = leaf
    if others:
        shown = ", ".join(others[:10]) + (f" and {len(others) - 10} more" if len(others) > 10 else "")
        raise UnsupportedValue(
            f"safetensors hold tensors alone, and this state holds {shown}: choose a part of it, such as item='model'"
        )
    return tensors


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _leaves(one, (*path, str(key)))
    elif type(value) in (list, tuple) and value:
        for at, one in enumerate(value):
            yield from _leaves(one, (*path, str(at)))
    elif not (isinstance(value, (Mapping, list, tuple))):
        yield ".".join(path), value


def write_safetensors(
    storage: Storage, tensors: Mapping[str, torch.Tensor], *, file_bytes: int = FILE_BYTES
) -> list[str]:
    """Write ``tensors`` as one file, or as several of about ``file_bytes`` and an index; the paths that were written.

    Raises `UnsupportedValue` naming a tensor whose dtype safetensors do not have.
    """
    specs = {key: spec_of(key, tensor) for key, tensor in tensors.items()}
    for spec in specs.values():
        if spec.dtype not in _CODES or (_CODES[spec.dtype] == "F4" and not spec.shape):
            raise UnsupportedValue(f"tensor {spec.key!r}: safetensors have no {spec.dtype}: convert it first")
    packs = list(_packed(specs, file_bytes))
    if len(packs) == 1:
        return [_write(storage, FILE, packs[0], tensors)]
    weights: dict[str, str] = {}
    paths = []
    for number, pack in enumerate(packs, start=1):
        paths.append(f"model-{number:05d}-of-{len(packs):05d}{SAFETENSORS}")
        _write(storage, paths[-1], pack, tensors)
        weights |= dict.fromkeys((spec.key for spec in pack), paths[-1])
    total = sum(spec.size_bytes for spec in specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    storage.put(INDEX, [json.dumps(index, indent=2, ensure_ascii=False).encode()])
    return [*paths, INDEX]


def _described(spec: TensorSpec) -> tuple[str, tuple[int, ...]]:
    """The code and shape that safetensors have for it, where ours may be others."""
    code = _CODES[spec.dtype]
    return code, spec.shape if code != "F4" else (*spec.shape[:-1], 2 * spec.shape[-1])


def _packed(specs: Mapping[str, TensorSpec], file_bytes: int) -> Iterator[list[TensorSpec]]:
    pack: list[TensorSpec] = []
    for spec in specs.values():
        if pack and sum(one.size_bytes for one in pack) + spec.size_bytes > file_bytes:
            yield pack
            pack = []
        pack.append(spec)
    yield pack


def _write(storage: Storage, path: str, pack: list[TensorSpec], tensors: Mapping[str, torch.Tensor]) -> str:
    plan = layout(pack, described=_described)
    hosts = [on_host(tensors[slab.key]) for slab in plan.slabs]
    written = storage.put(path, [plan.head, *(host_bytes(host) for host in hosts)])
    if written != plan.size_bytes:
        raise SaveFailed(f"{path}: the store says it took {written} bytes of {plan.size_bytes}")
    return path
