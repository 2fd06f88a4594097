"""How does DCP read through us?  The document, then whole chunks, each compared with its digest, and the parts wanted.

A chunk is read once for all that is wanted of it, several at a time, and no more of them are held than are being read:
never a second copy of the state. Nothing that was read is ever unpickled: values come as documents of ours, which only
planners of ours understand.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lakeckpt.checkpoint.dcp.metadata import CHECKPOINT, Places, Stored, StoredFile, metadata_from_bytes
from lakeckpt.checkpoint.dcp.place import Place, can_be_opened
from lakeckpt.checkpoint.dcp.planners import LakeLoadPlanner
from lakeckpt.checkpoint.digests import content_digest, short_digest
from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.fetch import read_object
from lakeckpt.checkpoint.ranged import read_range
from lakeckpt.checkpoint.tensors import empty_for
from lakeckpt.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    LimitExceeded,
    ObjectMissing,
    UnsupportedValue,
    WireDamaged,
)
from lakeckpt.lake.storage import Storage, describe

__all__ = ["LakeStorageReader"]

_READ_THREADS = 4


class LakeStorageReader(StorageReader):
    """Reads what `LakeStorageWriter` wrote: ``dcp.load(state, storage_reader=…, planner=lakeckpt.LakeLoadPlanner())``.

    ``uri``: the folder of the checkpoint; ``checkpoint_id`` of ``dcp.load`` takes its place. Any number of ranks, and
    any sharding: DCP's planner decides what is wanted. Every byte that is used was compared with its digest.
    """

    def __init__(
        self, uri: str | os.PathLike[str] | None = None, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._place = Place("LakeStorageReader", uri, storage_options)
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to read a checkpoint, at ``checkpoint_id`` if it is given."""
        self._metadata = None
        self._place.move(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds. `CheckpointNotFound`, `CheckpointDamaged`, `NewerFormat`.

        There is one document for all ranks. Where one rank could not read it, torch asks it for its own ``rank``'s, and
        would go on without the others, which wait for it.
        """
        storage = self._place.get()
        if kwargs.get("rank") is not None:
            raise CheckpointNotFound(f"{describe(storage)!r} holds nothing that is said of rank {kwargs['rank']} alone")
        try:
            return metadata_from_bytes(storage.read(CHECKPOINT))
        except ObjectMissing:
            raise CheckpointNotFound(_nothing_in(storage)) from None
        except (WireDamaged, UnsupportedValue, LimitExceeded) as error:
            raise CheckpointDamaged(f"{CHECKPOINT} in {describe(storage)!r}: {error}") from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See torch."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See torch."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See torch."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill in what this rank wants. `CheckpointDamaged` names the object whose bytes are not what was written."""
        by_chunk: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO and not isinstance(planner, LakeLoadPlanner):
                raise ConfigError(
                    f"the value {item.storage_index.fqn!r} is a document of lakeckpt, which torch's planners would "
                    "unpickle: pass planner=lakeckpt.LakeLoadPlanner() to dcp.load"
                )
            by_chunk.setdefault(item.storage_index, []).append(item)
        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="lakeckpt-dcp") as pool:
            self._check_files(pool, by_chunk)
            jobs = [pool.submit(self._fill, index, items, planner) for index, items in by_chunk.items()]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a place that can be opened."""
        return can_be_opened(checkpoint_id)

    def _check_files(self, pool: ThreadPoolExecutor, wanted: Iterable[MetadataIndex]) -> None:
        """Objects have the sizes and heads that were written: what is cut or longer is damaged, whatever is wanted."""
        assert self._metadata is not None, "set_up_storage_reader comes first"
        places: Places = self._metadata.storage_data
        paths = {places.stored[index].path for index in wanted if index in places.stored}
        for job in [pool.submit(self._check_file, path, places.files.get(path)) for path in sorted(paths)]:
            job.result()

    def _check_file(self, path: str, file: StoredFile | None) -> None:
        if file is None:
            raise CheckpointDamaged(f"{CHECKPOINT} does not name the object {path}, in which it says that bytes lie")
        head = read_object(self._place.get(), path, 0, file.head_bytes)
        last = read_object(self._place.get(), path, max(0, file.size_bytes - 1), file.size_bytes + 1)
        if short_digest(head) != file.digest or len(last) != min(1, file.size_bytes):
            raise CheckpointDamaged(f"{path}: its head or its size is not what was written")

    def _fill(self, index: MetadataIndex, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        assert self._metadata is not None, "set_up_storage_reader comes first"
        stored: Stored | None = self._metadata.storage_data.stored.get(index)
        if stored is None:
            raise CheckpointDamaged(f"{CHECKPOINT} names no bytes of {index.fqn!r} at {index.offset}")
        if items[0].type == LoadItemType.BYTE_IO:
            data = self._verified(index, stored, None)
            for item in items:
                planner.load_bytes(item, io.BytesIO(data))
            return
        file = self._metadata.storage_data.files.get(stored.path)
        if file is None or stored.start + stored.size_bytes > file.size_bytes:  # before memory of that size is taken
            raise CheckpointDamaged(f"{CHECKPOINT} says that {index.fqn!r} lies behind the end of {stored.path}")
        chunk, view = self._empty(index, stored)
        self._verified(index, stored, view)
        for item in items:
            wanted = narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.size() != wanted.size():
                raise CheckpointDamaged(
                    f"{index.fqn!r}: {tuple(target.size())} is wanted where {tuple(wanted.size())} is stored"
                )
            target.copy_(wanted)
            planner.commit_tensor(item, target)

    def _verified(self, index: MetadataIndex, stored: Stored, into: memoryview | None) -> memoryview:
        """The bytes of a chunk, in ``into`` where that is given: then they are nowhere else."""
        data = read_range(self._place.get(), stored.path, stored.start, stored.start + stored.size_bytes, into)
        if content_digest(data, "blake2b") != stored.digest:
            raise CheckpointDamaged(f"{stored.path}: the bytes of {index.fqn!r} are not what was written")
        return data

    def _empty(self, index: MetadataIndex, stored: Stored) -> tuple[torch.Tensor, memoryview]:
        assert self._metadata is not None
        told = self._metadata.state_dict_metadata[index.fqn]
        sizes = next(tuple(one.sizes) for one in told.chunks if one.offsets == index.offset)  # type: ignore[union-attr]
        dtype = str(told.properties.dtype).removeprefix("torch.")  # type: ignore[union-attr]
        spec = TensorSpec(key=index.fqn, dtype=dtype, shape=sizes)
        if spec.size_bytes != stored.size_bytes:
            raise CheckpointDamaged(
                f"{index.fqn!r}: a chunk of {sizes} has {spec.size_bytes} bytes, and {stored.size_bytes} are stored"
            )
        return empty_for(spec)


def _nothing_in(storage: Storage) -> str:
    where = describe(storage)
    if storage.list(".metadata"):
        return f"{where!r} holds a checkpoint of torch.distributed.checkpoint alone: read it with torch's own reader"
    return f"there is no checkpoint in {where!r}: {CHECKPOINT} is not there"
