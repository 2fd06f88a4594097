"""How does DCP write through us?  Files of tensors, durable and with digests, then one document that makes it visible.

Each rank packs its chunks and values into files that any safetensors reader opens, streams them to the storage, and
tells the coordinator where each lies. The coordinator looks that every file is there in its size, and puts
``checkpoint.lkc``: until then, and where anything fails, the folder holds what it held before. Names of files are never
used twice, so that writing over a checkpoint cannot tear it: the old files go when the new document stands.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lakeckpt.checkpoint.dcp.metadata import (
    CHECKPOINT,
    DATA,
    Places,
    Stored,
    StoredFile,
    data_name,
    metadata_from_bytes,
    metadata_to_bytes,
)
from lakeckpt.checkpoint.dcp.place import Place, can_be_opened
from lakeckpt.checkpoint.dcp.value import is_value
from lakeckpt.checkpoint.digests import content_digest, short_digest
from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.tensor_file import layout
from lakeckpt.checkpoint.tensors import host_bytes, on_host, spec_of
from lakeckpt.errors import (
    CheckpointError,
    ConfigError,
    ObjectExists,
    ObjectMissing,
    SaveFailed,
    StorageError,
    WireError,
)
from lakeckpt.lake.storage import Storage, describe

__all__ = ["LakeStorageWriter"]

FILE_BYTES = 256 * 2**20
_WRITE_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A chunk or a value, in host memory."""

    index: MetadataIndex
    spec: TensorSpec
    data: memoryview


class LakeStorageWriter(StorageWriter):
    """Writes checkpoints of ``torch.distributed.checkpoint`` to any storage: ``dcp.save(state, storage_writer=…)``.

    Args:
        uri: the folder of the checkpoint, local or in a store; ``checkpoint_id`` of ``dcp.save`` takes its place.
        overwrite: whether a checkpoint that is there may be replaced (in one step, when the new one is complete).
        storage_options: as for `lakeckpt.open_table`.

    Values that are no tensors need `lakeckpt.LakeSavePlanner`: torch's planner would pickle them, which is refused.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._overwrite = overwrite
        self._place = Place("LakeStorageWriter", uri, storage_options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new checkpoint, at ``checkpoint_id`` if it is given."""
        self._place.move(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a folder that holds a checkpoint, unless it may be replaced. `ConfigError` without collectives."""
        if kwargs.get("use_collectives") is False and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                "with use_collectives=False each rank commits what it knows of, and the last one would replace the "
                "others: leave it out, or save into a folder for each rank with no_dist=True"
            )
        if is_coordinator and not self._overwrite and self._place.get().list(CHECKPOINT):
            raise CheckpointError(
                f"there is a checkpoint in {describe(self._place.get())!r} already: save into another folder, or give "
                "overwrite=True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See torch."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See torch."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank was given to write. `StorageError`, `UnsupportedValue`, `ConfigError`."""
        token = secrets.token_hex(8)
        results: list[WriteResult] = []
        with ThreadPoolExecutor(_WRITE_THREADS, thread_name_prefix="lakeckpt-dcp") as pool:
            jobs = []
            for number, pack in enumerate(_packed(plan.items)):
                jobs.append(pool.submit(self._write, f"{DATA}/{data_name(token, number)}", pack, planner))
            for job in jobs:
                results += job.result()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint visible. `SaveFailed` where a file is not there as it was written."""
        storage = self._place.get()
        every = [result for one in results for result in one]
        places = Places(
            stored={result.index: result.storage_data[0] for result in every},
            files={result.storage_data[0].path: result.storage_data[1] for result in every},
        )
        _check_files(storage, places.files)
        document = metadata_to_bytes(replace(metadata, storage_data=places))
        if not self._overwrite:
            try:
                storage.put_new(CHECKPOINT, document)
            except ObjectExists:
                raise SaveFailed(
                    f"another job saved into {describe(storage)!r} meanwhile: its checkpoint stands"
                ) from None
            return
        before = _paths(storage)
        storage.put(CHECKPOINT, [document])
        with contextlib.suppress(StorageError):  # what is left over costs room only
            for path in sorted(before):
                storage.delete(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a place that can be opened."""
        return can_be_opened(checkpoint_id)

    def _write(self, path: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        chunks = {chunk.spec.key: chunk for chunk in (_resolved(item, planner) for item in items)}
        plan = layout(chunk.spec for chunk in chunks.values())
        ordered = [chunks[slab.key] for slab in plan.slabs]
        written = self._place.get().put(path, [plan.head, *(chunk.data for chunk in ordered)])
        if written != plan.size_bytes:
            raise SaveFailed(f"{path}: the store says it took {written} bytes of {plan.size_bytes}")
        file = StoredFile(size_bytes=plan.size_bytes, head_bytes=len(plan.head), digest=short_digest(plan.head))
        results = []
        for slab, chunk in zip(plan.slabs, ordered, strict=True):
            size_bytes, digest = slab.stop - slab.start, content_digest(chunk.data, "blake2b")
            stored = Stored(path=path, start=slab.start, size_bytes=size_bytes, digest=digest)
            results.append(WriteResult(index=chunk.index, size_in_bytes=size_bytes, storage_data=(stored, file)))
        return results


def _check_files(storage: Storage, files: Mapping[str, StoredFile]) -> None:
    found = {info.path: info.size_bytes for info in storage.list(DATA)} if files else {}
    for path, file in files.items():
        if found.get(path) != file.size_bytes:
            raise SaveFailed(
                f"{path} has {found.get(path, 'no')} bytes in {describe(storage)!r}, and {file.size_bytes} were "
                "written: nothing was saved"
            )


def _packed(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Items for one file each, of about `FILE_BYTES`."""
    pack: list[WriteItem] = []
    size_bytes = 0
    for item in items:
        mine = _size_of(item)
        if pack and size_bytes + mine > FILE_BYTES:
            yield pack
            pack, size_bytes = [], 0
        pack.append(item)
        size_bytes += mine
    if pack:
        yield pack


def _size_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    sizes = item.tensor_data.chunk.sizes
    return int(torch.Size(sizes).numel()) * item.tensor_data.properties.dtype.itemsize


def _resolved(item: WriteItem, planner: SavePlanner) -> _Chunk:
    found, name = planner.resolve_data(item), item.index.fqn
    if item.type != WriteItemType.BYTE_IO:
        assert isinstance(found, torch.Tensor)
        at = ",".join(map(str, item.index.offset or ()))
        spec = spec_of(f"{name}@{at}", found)  # refuses what has no bytes to bring to the host
        return _Chunk(index=item.index, spec=spec, data=host_bytes(on_host(found)))
    assert not isinstance(found, torch.Tensor)
    data = found.getbuffer()
    if not is_value(data):
        raise ConfigError(
            f"the planner gave {name!r} as bytes that are not ours (torch's planners pickle): pass "
            "planner=lakeckpt.LakeSavePlanner() to dcp.save"
        )
    return _Chunk(index=item.index, spec=TensorSpec(key=f"{name}#value", dtype="uint8", shape=(len(data),)), data=data)


def _paths(storage: Storage) -> set[str]:
    """The objects of the checkpoint that stands, as far as it can be read."""
    try:
        return set(metadata_from_bytes(storage.read(CHECKPOINT)).storage_data.files)
    except (ObjectMissing, WireError):
        return set()
