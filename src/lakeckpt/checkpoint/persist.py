"""How does a rank's share reach storage?  Files of tensors, each streamed and durable, then the record that names them.

The third stage of a save. Tensors are packed into files of about 256 MiB (a larger tensor has its own) that are named
by their content, several written at once; what an earlier save wrote already is referred to. Beside that it is asked
whether the memory is intact. The record is put last, so that a part that can be read names only objects that are
durable and hold what was captured. Nothing here decides what is whose: see ``agreement``.

Imports without torch: it takes bytes. Its threads are started and joined inside `persist`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

from lakeckpt.checkpoint.digests import short_digest
from lakeckpt.checkpoint.dtypes import TensorSpec
from lakeckpt.checkpoint.fields import Ranks
from lakeckpt.checkpoint.parts import FileRecord, PartRecord, SaveId, TensorRecord, TreeRecord, file_digest
from lakeckpt.checkpoint.tensor_file import layout
from lakeckpt.checkpoint.unchanged import Earlier
from lakeckpt.core.skips import SkipList
from lakeckpt.errors import SaveFailed
from lakeckpt.lake.storage import Storage

__all__ = ["OwnedTensor", "persist"]

FILE_BYTES = 256 * 2**20
_WRITE_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTensor:
    """A tensor that this rank writes; ``ranks`` are those whose state it is."""

    spec: TensorSpec
    data: memoryview
    digest: bytes
    ranks: Ranks


def persist(
    storage: Storage,
    *,
    run: str,
    save: SaveId,
    rank: int,
    world_size: int,
    cut: bytes,
    tensors: Sequence[OwnedTensor],
    trees: Sequence[TreeRecord],
    skips: Mapping[str, SkipList] = MappingProxyType({}),
    earlier: Earlier | None = None,
    intact: Callable[[], None] = lambda: None,
) -> PartRecord:
    """Write the share of ``rank`` and publish its part. Raises `StorageError` or `SaveFailed`; then it is not there.

    ``earlier``: what the rank's last committed part holds; what is in it and unchanged is not written again.
    ``intact``: see `lakeckpt.checkpoint.staged.StagedCut`; what it raises goes through.
    """
    earlier = Earlier() if earlier is None else earlier
    kept = earlier.found((one.spec, one.digest) for one in tensors)
    referred = list({file.path: file for file in kept.values()}.values())
    new = [one for one in tensors if (one.spec, one.digest) not in kept]
    settled = [one for one in new if (one.spec, one.digest) in earlier.places]
    # What did not change lies apart from what did, so that its files are still needed next time.
    packs = [*_packed(settled), *_packed([one for one in new if (one.spec, one.digest) not in earlier.places])]
    with ThreadPoolExecutor(1 + _WRITE_THREADS, thread_name_prefix="lakeckpt-persist") as pool:
        asked = pool.submit(intact)
        jobs = [pool.submit(_write, storage, save, rank, index, pack) for index, pack in enumerate(packs)]
        files = [job.result() for job in jobs]
        asked.result()
    records = [
        TensorRecord(spec=one.spec, digest=one.digest, file=index, ranks=one.ranks)
        for index, pack in enumerate(packs)
        for one in pack
    ]
    at = {file.path: len(packs) + index for index, file in enumerate(referred)}
    records += [
        TensorRecord(spec=one.spec, digest=one.digest, file=at[kept[one.spec, one.digest].path], ranks=one.ranks)
        for one in tensors
        if (one.spec, one.digest) in kept
    ]
    part = PartRecord(
        run=run,
        save=save,
        rank=rank,
        world_size=world_size,
        cut=cut,
        files=(*files, *referred),
        tensors=tuple(records),
        trees=tuple(trees),
        skips=skips,
    )
    storage.put(save.part_path(rank), [part.to_bytes()])
    return part


def _packed(tensors: Sequence[OwnedTensor]) -> Iterator[list[OwnedTensor]]:
    pack: list[OwnedTensor] = []
    size_bytes = 0
    for one in tensors:
        if pack and size_bytes + one.spec.size_bytes > FILE_BYTES:
            yield pack
            pack, size_bytes = [], 0
        pack.append(one)
        size_bytes += one.spec.size_bytes
    if pack:
        yield pack


def _write(storage: Storage, save: SaveId, rank: int, index: int, pack: list[OwnedTensor]) -> FileRecord:
    plan = layout(one.spec for one in pack)
    by_key = {one.spec.key: one for one in pack}
    ordered = [by_key[slab.key] for slab in plan.slabs]
    head_digest = short_digest(plan.head)
    digest = file_digest(head_digest, [one.digest for one in ordered])
    path = save.object_path(rank, index, digest)
    written = storage.put(path, [plan.head, *(one.data for one in ordered)])
    if written != plan.size_bytes:
        raise SaveFailed(f"{path}: the store says it took {written} bytes of {plan.size_bytes}")
    return FileRecord(path=path, size_bytes=plan.size_bytes, head_digest=head_digest, digest=digest)
