"""What state does a folder of torch's own DCP hold?  Whole tensors and plain values, nested as they were saved.

Several chunks are read at once, each straight from its object, and put into whole tensors in host memory, whatever the
sharding was. Nothing is unpickled: see ``pickles``. Threads are started and joined inside `read_dcp_folder`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from lakeckpt.checkpoint.dcp.planners import is_told_key
from lakeckpt.checkpoint.fetch import read_object
from lakeckpt.checkpoint.foreign.dcp_metadata import METADATA, DcpChunk, DcpMetadata, DcpTensor, Path, read_dcp_metadata
from lakeckpt.checkpoint.foreign.torch_file import TorchFile
from lakeckpt.checkpoint.tensors import empty_for
from lakeckpt.errors import CheckpointDamaged, CheckpointNotFound, LimitExceeded, ObjectMissing, WireDamaged
from lakeckpt.lake.storage import Storage, describe

__all__ = ["nested", "read_dcp_folder"]

_READ_THREADS = 4
_MOST_METADATA_BYTES = 2**30
_MOST_GAPS = 100_000


def read_dcp_folder(storage: Storage) -> dict[str, Any]:
    """The state that ``dcp.save`` wrote into this folder.

    Raises `CheckpointNotFound`, `CheckpointDamaged` naming the object, `UnsupportedValue` naming what only running a
    pickle could make.
    """
    metadata = _metadata(storage)
    listed = {info.path: info.size_bytes for info in storage.list()}
    for name, one in _places(metadata):
        if one.start + one.size_bytes > listed.get(one.path, -1):  # so is a path that leads out of the folder
            raise CheckpointDamaged(
                f"{METADATA} says that {name!r:.80} lies in bytes {one.start} to {one.start + one.size_bytes} of "
                f"{one.path!r:.80}, and there are {listed.get(one.path, 'none')}"
            )
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-foreign") as pool:
        tensors = {name: pool.submit(_tensor, storage, name, one) for name, one in metadata.tensors.items()}
        values = {name: pool.submit(_read, storage, name, one) for name, one in metadata.values.items()}
        flat = {name: job.result() for name, job in (tensors | values).items()}
    try:
        return nested(flat, metadata.paths)
    except WireDamaged as error:
        raise CheckpointDamaged(f"{METADATA}: {error}") from error


def _metadata(storage: Storage) -> DcpMetadata:
    try:
        data = storage.read(METADATA, 0, _MOST_METADATA_BYTES + 1)
    except ObjectMissing:
        raise CheckpointNotFound(
            f"there is no checkpoint of DCP in {describe(storage)!r}: {METADATA} is not there"
        ) from None
    if len(data) > _MOST_METADATA_BYTES:
        raise LimitExceeded(f"{METADATA} has more than the {_MOST_METADATA_BYTES} bytes that we read")
    try:
        return read_dcp_metadata(data)
    except WireDamaged as error:
        raise CheckpointDamaged(f"{METADATA}: {error}") from error


def _places(metadata: DcpMetadata) -> list[tuple[str, DcpChunk]]:
    chunks = [(name, chunk) for name, one in metadata.tensors.items() for chunk in one.chunks]
    return [*chunks, *metadata.values.items()]


def _read(storage: Storage, name: str, one: DcpChunk) -> Any:
    read = partial(_range, storage, one)
    return TorchFile(read, one.size_bytes, what=f"{name!r} in {one.path}").value()


def _range(storage: Storage, one: DcpChunk, start: int, stop: int) -> bytes:
    return read_object(storage, one.path, one.start + start, one.start + stop)


def _tensor(storage: Storage, name: str, one: DcpTensor) -> torch.Tensor:
    if len(one.chunks) == 1 and one.chunks[0].sizes == one.spec.shape:
        return _chunk(storage, name, one, one.chunks[0])
    whole, _ = empty_for(one.spec)
    for chunk in one.chunks:
        into = whole
        for dim, (at, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            into = into.narrow(dim, at, size)
        into.copy_(_chunk(storage, name, one, chunk))
    return whole


def _chunk(storage: Storage, name: str, one: DcpTensor, chunk: DcpChunk) -> torch.Tensor:
    found = _read(storage, name, chunk)
    if not isinstance(found, torch.Tensor):
        raise CheckpointDamaged(f"{chunk.path}: a {type(found).__name__} lies where the tensor {name!r} should")
    dtype = str(found.dtype).removeprefix("torch.")
    if (tuple(found.shape), dtype) != (chunk.sizes, one.spec.dtype):
        raise CheckpointDamaged(
            f"{chunk.path}: {name!r} is {dtype} {list(found.shape)} there, and {one.spec.dtype} {list(chunk.sizes)} in "
            f"{METADATA}"
        )
    return found


def nested(
    flat: Mapping[str, Any], paths: Mapping[str, Path], *, untold: Iterable[Any] | None = None
) -> dict[str, Any]:
    """The state of its leaves, each at its path: texts are keys of dicts, numbers places in lists.

    DCP makes texts of all keys, and leaves empty dicts out. ``untold`` says which, where anybody has noted that: the
    path of a dict, and its keys that are no texts. Where nobody has, the states of optimizers get their parameters'
    numbers back, and an empty state, and what is missing between the places in a list is empty dicts. `WireDamaged`
    where the paths make no state.
    """
    root = _Inner()
    for name, value in flat.items():
        *outer, last = paths.get(name, (name,))
        at = _inside(root, outer, name)
        if last in at:
            raise WireDamaged(f"{name!r:.80} stands where something else does")
        at[last] = value
    for one in untold or ():
        path, keys = _untold(one)
        _inside(root, path, ".".join(map(str, path))).keys_were.update((str(key), key) for key in keys)
    built = _built(root, depth=64, gaps=iter(range(_MOST_GAPS)) if untold is None else None)
    if type(built) is not dict:
        raise WireDamaged("the state is no mapping")
    return built


class _Inner(dict[str | int, Any]):
    """A container that is being put together. ``keys_were``: of its keys, what those were that were no texts."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_were: dict[str, Any] = {}


def _inside(at: _Inner, path: Sequence[str | int], what: str) -> _Inner:
    """The container at ``path``, which is made where there is none."""
    for step in path:
        at = at.setdefault(step, _Inner())
        if type(at) is not _Inner:
            raise WireDamaged(f"{what!r:.80} stands inside of what is no container")
    return at


def _untold(one: Any) -> tuple[list[str | int], list[Any]]:
    if type(one) is not list or [type(part) for part in one] != [list, list]:
        raise WireDamaged(f"the keys of a dict are told by {one!r:.80}")
    path, keys = one
    if not all(type(step) in (str, int) for step in path) or not all(map(is_told_key, keys)):
        raise WireDamaged(f"the keys of a dict are told by {one!r:.80}")
    return path, keys


def _built(one: Any, *, depth: int, gaps: Iterator[int] | None) -> Any:
    """``gaps``: one for each place that may be missing in a list; None where all is told."""
    if type(one) is not _Inner:
        return one
    if not depth:
        raise WireDamaged("more containers inside one another than we read")
    inner = {key: _built(value, depth=depth - 1, gaps=gaps) for key, value in one.items()}
    numbers = [key for key in inner if type(key) is int]
    if not numbers:
        inner = {one.keys_were.get(str(key), key): value for key, value in inner.items()}
        return inner if gaps is None else _with_numbers(inner)
    if len(numbers) != len(inner) or min(numbers) < 0:
        raise WireDamaged("the places in a list are not those from 0 on")
    found: list[Any] = []
    for number in sorted(numbers):
        while len(found) < number:
            if gaps is None or next(gaps, None) is None:
                raise WireDamaged("the places in a list are not those from 0 on")
            found.append({})
        found.append(inner[number])
    return found


def _with_numbers(state: dict[Any, Any]) -> dict[Any, Any]:
    """A dict as it is, but an optimizer's state with numbers for its parameters where its groups have numbers."""
    groups = state.get("param_groups")
    if not set(state) <= {"state", "param_groups"} or type(groups) is not list:
        return state
    if not all(type(group) is dict and type(group.get("params")) is list for group in groups):
        return state
    params = [one for group in groups for one in group["params"]]
    state = {"state": {}, **state}
    if not isinstance(state["state"], dict) or not all(type(one) is int for one in params):
        return state
    known = {str(one): one for one in params}
    return {**state, "state": {known.get(key, key): value for key, value in state["state"].items()}}
